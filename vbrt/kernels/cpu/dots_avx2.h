/* `dots` for AVX2 with FMA. Two lookups by 32 codes give the upper bytes of their levels, which is all of E2M1's; two
 * more give the lower bytes of others. Lookups work within 128-bit lanes: the lower lane has columns 0 to 31. */
#include <immintrin.h>
#include "dots_spans.h"

/* 32 bytes of codes. A vector of x has four columns of each lane, all of one block: for each half of a lane, the even
 * columns, then the odd ones. */
#define SPAN 64
#define AHEAD 8192  /* prefetch distance in bytes of codes, into L2: rows are consecutive */

/* Convert a span of x to fp32. */
INLINE void spread_span(const float *span, int narrow, void *to) {
    (void)narrow;
    for (int k = 0; k < SPAN; k++) {
        const int lane = k / 32, half = k % 32 / 16, four = k % 16 / 8;
        ((float *)to)[half * 32 + k % 2 * 16 + four * 8 + lane * 4 + k % 8 / 2] = span[k];
    }
}

INLINE __m256i codes_at(const uint8_t *at, int64_t columns) {
    uint8_t rest[SPAN / 2] = {0};
    if (columns >= SPAN) return _mm256_loadu_si256((const __m256i *)at);
    memcpy(rest, at, columns / 2);
    return _mm256_loadu_si256((const __m256i *)rest);
}

/* words[half] of bytes `place` and `place + 1` of 32 codes' levels */
INLINE void words_of(const __m256i *bytes, int place, __m256i code, __m256i *words) {
    const __m256i low = _mm256_shuffle_epi8(bytes[place], code), high = _mm256_shuffle_epi8(bytes[place + 1], code);
    words[0] = _mm256_unpacklo_epi8(low, high);
    words[1] = _mm256_unpackhi_epi8(low, high);
}

/* Scales of one half of each lane; 0 beyond the row's end. */
INLINE __m256 scales_at(const Dots *d, int r, int64_t k) {
    const float low = k < d->columns ? scale_at(d, r, k >> d->shift) : 0;
    const float high = k + 32 < d->columns ? scale_at(d, r, (k + 32) >> d->shift) : 0;
    return _mm256_set_m128(_mm_set1_ps(high), _mm_set1_ps(low));
}

INLINE float total(__m256 v) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

/* `upper`, a constant after inlining: the lower two bytes of levels are zero. */
INLINE void dots_as(const Dots *d, int rows, int tokens, int upper, float *sums) {
    const __m256i four = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
    __m256i bytes[4];
    for (int i = 0; i < 4; i++) bytes[i] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)d->bytes[i]));
    for (int r = 0; r < rows; r++) {
        __m256 sum[TOKENS];  /* one per token: there are 16 registers */
        for (int m = 0; m < tokens; m++) sum[m] = _mm256_setzero_ps();
        for (int64_t k = 0; k < d->columns; k += SPAN) {
            _mm_prefetch((const char *)d->codes[r] + k / 2 + AHEAD, _MM_HINT_T1);
            const __m256i codes = codes_at(d->codes[r] + k / 2, d->columns - k);
            const __m256i code[2] = {_mm256_and_si256(codes, four), _mm256_and_si256(_mm256_srli_epi16(codes, 4), four)};
            __m256i high[2][2], low[2][2] = {{zero, zero}, {zero, zero}};
            for (int odd = 0; odd < 2; odd++) {
                words_of(bytes, 2, code[odd], high[odd]);
                if (!upper) words_of(bytes, 0, code[odd], low[odd]);
            }
            const __m256 scale[2] = {scales_at(d, r, k), scales_at(d, r, k + 16)};
            __m256 level[2][4];
            for (int half = 0; half < 2; half++)
                for (int odd = 0; odd < 2; odd++) {
                    const __m256i upper_words = high[odd][half], lower_words = low[odd][half];
                    level[half][2 * odd] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(lower_words, upper_words));
                    level[half][2 * odd + 1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(lower_words, upper_words));
                }
            for (int m = 0; m < tokens; m++)
                for (int half = 0; half < 2; half++) {
                    const float *x = (const float *)d->x[m] + k + 32 * half;
                    __m256 part = _mm256_mul_ps(level[half][0], _mm256_loadu_ps(x));
                    for (int i = 1; i < 4; i++) part = _mm256_fmadd_ps(level[half][i], _mm256_loadu_ps(x + 8 * i), part);
                    sum[m] = _mm256_fmadd_ps(part, scale[half], sum[m]);
                }
        }
        for (int m = 0; m < tokens; m++) sums[r * TOKENS + m] = total(sum[m]);
    }
}

INLINE void dots(const Dots *d, int rows, int tokens, float *sums) {
    if (d->upper) dots_as(d, rows, tokens, 1, sums);
    else dots_as(d, rows, tokens, 0, sums);
}
