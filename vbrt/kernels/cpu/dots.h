/* Dots of a few tokens with rows of 4-bit weights: decoded in registers and multiplied there.
 *
 * weight = level[code] * (value[scale byte] * unit), or level[code] * scale where scales have 16 or 32 bits; a scale may
 * be multiplied with a sum of level[code] * x instead.
 * Two codes share a byte, the even column in the low nibble. A block has 16, 32, 64 or 128 columns.
 * Each dot is computed in an order that depends on the row's length alone.
 */
#include <stdlib.h>
#include "numbers.h"
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define WIDE 1
#elif defined(__AVX2__) && defined(__FMA__)
#define HALF 1
#endif
#if defined(WIDE) && defined(__AVX512BF16__)
#define PAIRS 1  /* products of pairs of bf16 */
#endif
#if defined(WIDE) || defined(HALF)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
/* Inputs lie in spans of columns, in the order in which decoding gives weights. */
#ifdef WIDE
/* The codes of 128 columns are 16 words of eight; shifted by 4 j bits their lowest four bits are the codes of columns j,
 * 8 + j, 16 + j, ... A block's weights are in whole words, so a word has one scale. */
#define SPAN 128
#define WORD 8
#define AHEAD 2048  /* bytes of codes that are read ahead: rows follow each other */
#else
/* The codes of 32 columns are 16 bytes: even columns, then odd ones. */
#define SPAN 32
#endif
#define TOKENS 4     /* tokens that share one decoding of a row */
#define TILE 4096    /* columns whose scales are looked up at a time */

enum { FP32, BF16, FP16, BYTE };
static const int SCALE_BYTES[] = {4, 2, 2, 1};

static inline float load(const void *from, int type, int64_t at) {
    if (type == FP32) return ((const float *)from)[at];
    const uint16_t word = ((const uint16_t *)from)[at];
    return type == BF16 ? bf16_value(word) : fp16_value(word);
}

static inline void store(void *to, int type, int64_t at, float value) {
    if (type == FP32) ((float *)to)[at] = value;
    else ((int16_t *)to)[at] = type == BF16 ? bf16_bits(value) : fp16_bits(value);
}

/* -- dots: sums[r * TOKENS + m] of rows r with tokens m; `rows` and `tokens` are constants once it is inlined */

typedef struct {
    const uint8_t *codes[2], *scales[2];  /* by row */
    const float *levels;  /* [16] */
    int scale_type, shift;  /* a block has 1 << shift columns */
#ifdef WIDE
    const uint16_t *halves;  /* [256] by scale byte: the upper halves of values, which have few significant bits */
    float unit;
#else
    const float *values;  /* [256] by scale byte: value * unit */
#endif
    const void *x[TOKENS];  /* in spans */
    int64_t columns;
    int narrow;  /* x is bf16; levels are numbers that bf16 has */
} Dots;

#ifdef WIDE

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

#else

INLINE float scale_at(const Dots *d, int r, int64_t block) {
    return d->scale_type == BYTE ? d->values[d->scales[r][block]] : load(d->scales[r], d->scale_type, block);
}

#ifdef HALF

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

#else

INLINE void dots(const Dots *d, int rows, int tokens, float *sums) {
    for (int r = 0; r < rows; r++) {
        float sum[TOKENS][16] = {{0}}, weight[16];
        for (int64_t k = 0; k < d->columns; k += SPAN / 2) {
            const uint8_t *codes = d->codes[r] + k / 2;
            const float scale = scale_at(d, r, k >> d->shift);
            const int64_t at = k / SPAN * SPAN + (k / 16 & 1) * 8;
            for (int j = 0; j < 8; j++) {
                weight[j] = d->levels[codes[j] & 15] * scale;
                weight[j + 8] = d->levels[codes[j] >> 4] * scale;
            }
            for (int m = 0; m < tokens; m++)
                for (int j = 0; j < 16; j++) sum[m][j] += weight[j] * ((const float *)d->x[m])[at + j + (j & 8)];
        }
        for (int m = 0; m < tokens; m++) {
            for (int half = 8; half; half /= 2)
                for (int j = 0; j < half; j++) sum[m][j] += sum[m][j + half];
            sums[r * TOKENS + m] = sum[m][0];
        }
    }
}

#endif
#endif

INLINE void dots_of_tokens(const Dots *d, int rows, int tokens, float *sums) {
    if (tokens == 4) dots(d, rows, 4, sums);
    else if (tokens == 2) dots(d, rows, 2, sums);
    else dots(d, rows, 1, sums);
}

/* Whether x and levels are multiplied as pairs of bf16, which changes neither. */
static int narrows(const float *levels, int64_t count, int x_type) {
    int exact = x_type == BF16;
#ifdef PAIRS
    for (int64_t i = 0; i < count; i++) exact = exact && bf16_value((uint16_t)bf16_bits(levels[i])) == levels[i];
    return exact;
#else
    return 0;
#endif
}

/* Tables by scale byte, in the form in which `dots` looks values up. */
#ifdef WIDE
typedef struct { uint16_t halves[256]; } Scales;
#else
typedef struct { float values[256]; } Scales;
#endif

/* Dots of x, in numbers of `x_type`, with rows of weights; `values` are looked at for scales of bytes only. */
static Dots dots_with(const float *levels, const float *values, float unit, int64_t type, int64_t block, int x_type,
                      Scales *scales) {
    Dots d = {.levels = levels, .scale_type = (int)type, .shift = __builtin_ctzll(block)};
#ifdef WIDE
    for (int i = 0; i < 256; i++) scales->halves[i] = type == BYTE ? (uint16_t)bf16_bits(values[i]) : 0;
    d.halves = scales->halves, d.unit = unit;
#else
    for (int i = 0; i < 256 && type == BYTE; i++) scales->values[i] = values[i] * unit;
    d.values = scales->values;
#endif
    d.narrow = narrows(levels, 16, x_type);
    return d;
}

/* Bytes of one row of x in spans. */
static inline int64_t row_bytes(int64_t columns) { return (columns + SPAN - 1) / SPAN * SPAN * sizeof(float); }

/* One row of `inputs` numbers of x in spans, zeros behind the last: as bf16 where `narrow`, else as fp32; `type` is a
 * constant once it is inlined. */
INLINE void spread_as(const void *x, int type, int64_t at, int64_t inputs, int64_t columns, int narrow, void *to) {
#ifdef WIDE
    const __m512i eighths = _mm512_setr_epi32(0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120);
#endif
    for (int64_t first = 0; first < columns; first += SPAN) {
        const int64_t count = inputs - first < SPAN ? inputs - first : SPAN;
        float span[SPAN];
        if (count < SPAN) memset(span, 0, sizeof span);
        for (int64_t k = 0; k < count; k++) span[k] = load(x, type, at + first + k);
#ifdef WIDE
        if (narrow)
            for (int k = 0; k < SPAN; k++) ((int16_t *)to)[first + k % 4 * 32 + k / 4] = bf16_bits(span[k]);
        else
            for (int j = 0; j < WORD; j++)
                _mm512_storeu_ps((float *)to + first + 16 * j, _mm512_i32gather_ps(eighths, span + j, 4));
#else
        for (int k = 0; k < SPAN; k++) ((float *)to)[first + k % 2 * 16 + k / 2] = span[k];
#endif
    }
}

static void spread_row(const void *x, int type, int64_t at, int64_t inputs, int64_t columns, int narrow, void *to) {
    if (type == FP32) spread_as(x, FP32, at, inputs, columns, narrow, to);
    else if (type == BF16) spread_as(x, BF16, at, inputs, columns, narrow, to);
    else spread_as(x, FP16, at, inputs, columns, narrow, to);
}
