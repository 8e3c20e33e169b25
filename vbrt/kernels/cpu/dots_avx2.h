/* `dots` for AVX2 with FMA. */
#include <immintrin.h>
#include "dots_spans.h"

/* levels of the lowest four bits of each index */
INLINE __m256 levels_of(__m256i code, __m256 low, __m256 high) {
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code), _mm256_permutevar8x32_ps(high, code), upper);
}

INLINE float total(__m256 v) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

INLINE void dots(const Dots *d, int rows, int tokens, float *sums) {
    const __m256 low = _mm256_loadu_ps(d->levels), high = _mm256_loadu_ps(d->levels + 8);
    for (int r = 0; r < rows; r++) {
        __m256 sum[TOKENS][2];
        for (int m = 0; m < tokens; m++) sum[m][0] = sum[m][1] = _mm256_setzero_ps();
        for (int64_t k = 0; k < d->columns; k += SPAN / 2) {
            const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(d->codes[r] + k / 2)));
            const __m256 scale = _mm256_set1_ps(scale_at(d, r, k >> d->shift));
            const __m256 even = _mm256_mul_ps(levels_of(code, low, high), scale);
            const __m256 odd = _mm256_mul_ps(levels_of(_mm256_srli_epi32(code, 4), low, high), scale);
            const int64_t at = k / SPAN * SPAN + (k / 16 & 1) * 8;
            for (int m = 0; m < tokens; m++) {
                sum[m][0] = _mm256_fmadd_ps(even, _mm256_loadu_ps((const float *)d->x[m] + at), sum[m][0]);
                sum[m][1] = _mm256_fmadd_ps(odd, _mm256_loadu_ps((const float *)d->x[m] + at + 16), sum[m][1]);
            }
        }
        for (int m = 0; m < tokens; m++) sums[r * TOKENS + m] = total(_mm256_add_ps(sum[m][0], sum[m][1]));
    }
}
