/* `dots` for AVX-512, of pairs of bf16 where the CPU multiplies them. */
#include <immintrin.h>
#ifdef __AVX512BF16__
#define PAIRS 1  /* products of pairs of bf16 */
#endif

/* The codes of 128 columns are 16 words of eight; shifted by 4 j bits their lowest four bits are the codes of columns j,
 * 8 + j, 16 + j, ... A block's weights are in whole words, so a word has one scale. */
#define SPAN 128
#define WORD 8
#define AHEAD 2048  /* bytes of codes that are read ahead: rows follow each other */

/* Values by scale byte: their upper halves, as they have few significant bits. */
typedef struct { uint16_t halves[256]; } Scales;

typedef struct {
    const uint8_t *codes[2], *scales[2];  /* by row */
    const float *levels;  /* [16] */
    int scale_type, shift;  /* a block has 1 << shift columns */
    const uint16_t *halves;  /* [256] by scale byte */
    float unit;
    const void *x[TOKENS];  /* in spans */
    int64_t columns;
    int narrow;  /* x is bf16; levels are numbers that bf16 has */
} Dots;

/* out [count, rounded up to 32] = value * unit of `count` scale bytes */
INLINE void look_up(const uint8_t *bytes, int64_t count, const __m512i *table, float unit, float *out) {
    for (int64_t i = 0; i < count; i += 32) {
        const __mmask32 here = count - i >= 32 ? ~0u : (1u << (count - i)) - 1;
        const __m512i byte = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(here, bytes + i));
        const __mmask32 bit6 = _mm512_test_epi16_mask(byte, _mm512_set1_epi16(64));
        const __mmask32 bit7 = _mm512_test_epi16_mask(byte, _mm512_set1_epi16(128));
        __m512i quarter[4];
        for (int q = 0; q < 4; q++) quarter[q] = _mm512_permutex2var_epi16(table[2 * q], byte, table[2 * q + 1]);
        const __m512i low = _mm512_mask_mov_epi16(quarter[0], bit6, quarter[1]);
        const __m512i high = _mm512_mask_mov_epi16(quarter[2], bit6, quarter[3]);
        const __m512i half = _mm512_mask_mov_epi16(low, bit7, high);
        const __m256i first = _mm512_castsi512_si256(half), second = _mm512_extracti64x4_epi64(half, 1);
        const __m512 one = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(first), 16));
        const __m512 two = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
        _mm512_storeu_ps(out + i, _mm512_mul_ps(one, _mm512_set1_ps(unit)));
        _mm512_storeu_ps(out + i + 16, _mm512_mul_ps(two, _mm512_set1_ps(unit)));
    }
}

/* out [count, rounded up to 16] of `count` scales of 16 or 32 bits */
static void convert(const uint8_t *scales, int64_t count, int type, float *out) {
    for (int64_t i = 0; i < count; i += 16, scales += 16 * SCALE_BYTES[type]) {
        const __mmask16 here = count - i >= 16 ? 0xFFFF : (1u << (count - i)) - 1;
        __m512 value;
        if (type == FP32) {
            value = _mm512_maskz_loadu_ps(here, scales);
        } else {
            const __m256i half = _mm256_maskz_loadu_epi16(here, scales);
            const __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
            value = type == BF16 ? _mm512_castsi512_ps(upper) : _mm512_cvtph_ps(half);
        }
        _mm512_storeu_ps(out + i, value);
    }
}

/* What a span of codes gives with one span of each token's x: a lane sums a word's eight columns. `narrow` is a constant
 * once it is inlined. */
INLINE void parts_of(const Dots *d, __m512i codes, int64_t at, int tokens, int narrow, __m512 levels, __m512i words,
                     __m512 *part) {
    if (!narrow) {
        __m512 level[WORD];
        /* vpermps looks at the lowest four bits of an index only */
        for (int j = 0; j < WORD; j++) level[j] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4 * j), levels);
        for (int m = 0; m < tokens; m++) {
            const float *x = (const float *)d->x[m] + at;
            part[m] = _mm512_mul_ps(level[0], _mm512_loadu_ps(x));
            for (int j = 1; j < WORD; j++) part[m] = _mm512_fmadd_ps(level[j], _mm512_loadu_ps(x + 16 * j), part[m]);
        }
    }
#ifdef PAIRS
    if (narrow) {
        __m512i level[WORD / 2];  /* vpermw looks at the lowest five bits: there are two copies of the levels */
        for (int j = 0; j < WORD / 2; j++) level[j] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * j), words);
        for (int m = 0; m < tokens; m++) {
            const uint16_t *x = (const uint16_t *)d->x[m] + at;
            part[m] = _mm512_setzero_ps();
            for (int j = 0; j < WORD / 2; j++)
                part[m] = _mm512_dpbf16_ps(part[m], (__m512bh)level[j], (__m512bh)_mm512_loadu_si512(x + 32 * j));
        }
    }
#endif
}

INLINE void dots_as(const Dots *d, int rows, int tokens, int narrow, float *sums) {
    const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i block_of = _mm512_srli_epi32(iota, d->shift - 3);
    const __m512 levels = _mm512_loadu_ps(d->levels);
    const __m512i halves = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)levels, 16)));
    const __m512i words = _mm512_shuffle_i64x2(halves, halves, 0x44);  /* of bf16: the levels twice */
    __m512i table[8];
    __m512 sum[2][TOKENS], part[TOKENS];
    float scales[2][TILE / 16 + 32];
    for (int i = 0; i < 8; i++) table[i] = _mm512_loadu_si512(d->halves + 32 * i);
    const int type = d->scale_type, shift = d->shift;
    for (int r = 0; r < rows; r++)
        for (int m = 0; m < tokens; m++) sum[r][m] = _mm512_setzero_ps();
    for (int64_t first = 0; first < d->columns; first += TILE) {
        const int64_t columns = d->columns - first < TILE ? d->columns - first : TILE;
        for (int r = 0; r < rows; r++) {
            const uint8_t *stored = d->scales[r] + (first >> shift) * SCALE_BYTES[type];
            if (type == BYTE) look_up(stored, columns >> shift, table, d->unit, scales[r]);
            else convert(stored, columns >> shift, type, scales[r]);
        }
        for (int64_t k = 0; k < columns; k += SPAN) {
            const int64_t left = columns - k;
            const __mmask16 whole = left >= SPAN ? 0xFFFF : (1 << left / WORD) - 1;
            for (int r = 0; r < rows; r++) {
                const uint8_t *at = d->codes[r] + (first + k) / 2;
                _mm_prefetch((const char *)at + AHEAD, _MM_HINT_T0);
                const __m512i codes = _mm512_maskz_loadu_epi32(whole, at);
                const __m512 scale = _mm512_permutexvar_ps(block_of, _mm512_loadu_ps(scales[r] + (k >> shift)));
                parts_of(d, codes, first + k, tokens, narrow, levels, words, part);
                for (int m = 0; m < tokens; m++) sum[r][m] = _mm512_fmadd_ps(part[m], scale, sum[r][m]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int m = 0; m < tokens; m++) sums[r * TOKENS + m] = _mm512_reduce_add_ps(sum[r][m]);
}

INLINE void dots(const Dots *d, int rows, int tokens, float *sums) {
    if (d->narrow) dots_as(d, rows, tokens, 1, sums);
    else dots_as(d, rows, tokens, 0, sums);
}

static void fill_scales(Dots *d, const float *values, float unit, Scales *scales) {
    for (int i = 0; i < 256; i++) scales->halves[i] = d->scale_type == BYTE ? (uint16_t)bf16_bits(values[i]) : 0;
    d->halves = scales->halves, d->unit = unit;
}

/* One span of x, as bf16 where `narrow`, else as fp32. */
INLINE void spread_span(const float *span, int narrow, void *to) {
    const __m512i eighths = _mm512_setr_epi32(0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120);
    if (narrow)
        for (int k = 0; k < SPAN; k++) ((int16_t *)to)[k % 4 * 32 + k / 4] = bf16_bits(span[k]);
    else
        for (int j = 0; j < WORD; j++)
            _mm512_storeu_ps((float *)to + 16 * j, _mm512_i32gather_ps(eighths, span + j, 4));
}
