/* Block format encoder on a CPU: the arithmetic of `BlockFormat._search` and `Levels._encode_blocks` with
 * `E2M1Rounding`, `TableRounding` and `Int8Rounding`, operation by operation. Compiled by build.py, without FMA
 * contraction.
 *
 * Sixteen blocks are processed together, one per lane, so that block sums add vectors in the order of
 * `rounding.block_sum`.
 */
#include <stddef.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#include "numbers.h"

enum { LANES = 16, LARGEST = 128, CELLS = 4096 };
enum { FP32, BF16, FP16 };
enum { E4M3, E8M0, UE4M4 };
/* kinds of codes: E2M1, table entries, integers */
enum { FLOATS, TABLE, WHOLE };

#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const void *weight;  /* [rows, columns] of `type` */
    const float *values;  /* [256] by scale byte; for level formats: the `candidates` nonzero levels */
    const float *squares;  /* [rows / rows_each, columns], or NULL: unweighted errors */
    const float *cells, *bounds;  /* [CELLS], [15] midpoints of levels, ascending; NULL: E2M1 or 8-bit codes */
    const uint8_t *order;  /* [16]: code of each level, in ascending order */
    uint8_t *codes;  /* [blocks, block / 2] or, of 8 bits, [blocks, block], `per_row` blocks a row; NULL: scales only */
    void *scales;  /* [blocks]: bytes, or `scale_type` */
    int64_t rows, columns, per_row, rows_each;
    int32_t type, block, first, candidates, low, high, shift, scale_type, bits;
    float per_unit, least, top;  /* for level formats, `least` is the largest scale */
} Encoding;

static inline int32_t bits_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float value_at(const void *weight, int64_t at, int type) {
    if (type == FP32) return ((const float *)weight)[at];
    const uint16_t word = ((const uint16_t *)weight)[at];
    return type == BF16 ? bf16_value(word) : fp16_value(word);
}

/* nearest E4M3 byte of a value in [0, 448], ties to even */
static inline int32_t nearest_e4m3(float value) {
    const int32_t bits = bits_of(value);
    if (value < 0.015625f) return bits_of(value * 512.0f + 8388608.0f) & 0xFF;
    return ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3);
}

static __attribute__((noinline)) void load(
    const Encoding *e, int64_t begin, int64_t blocks, int block, int type, float (*x)[LANES], float (*m)[LANES]) {
    for (int lane = 0; lane < LANES; lane++) {
        const int64_t at = begin + lane, row = at / e->per_row, column = at % e->per_row * block;
        const int there = at >= blocks ? 0 : e->columns - column < block ? (int)(e->columns - column) : block;
        for (int j = 0; j < there; j++) x[j][lane] = value_at(e->weight, row * e->columns + column + j, type) * e->per_unit;
        for (int j = there; j < block; j++) x[j][lane] = 0;
        if (!e->squares) continue;
        for (int j = 0; j < there; j++) m[j][lane] = e->squares[row / e->rows_each * e->columns + column + j];
        for (int j = there; j < block; j++) m[j][lane] = 0;
    }
}

static inline int32_t nearest_byte(float scale, int scales, int kind) {
    if (kind == WHOLE) return (bits_of(scale) + 0x007FFFFF) >> 23;  /* round up to a power of two */
    if (scales == E4M3) return nearest_e4m3(scale > 448.0f ? 448.0f : scale);
    if (scales == E8M0) return (bits_of(scale) + 0x004AFB0D) >> 23;
    return ((bits_of(scale) + (1 << 18)) >> 19) - (120 << 4);
}

/* squared errors of a candidate scale per weight, in units common to all candidates except for the scale */
INLINE void e2m1_losses(
    int block, const float (*a)[LANES], const float *scale, float (*loss)[LANES]) {
    float factor[LANES];
    for (int lane = 0; lane < LANES; lane++) factor[lane] = 4194304.0f / scale[lane];  /* 2^22, folded into y */
    for (int j = 0; j < block; j++)
        for (int lane = 0; lane < LANES; lane++) {
            const float y = a[j][lane] * factor[lane], t = y < 4194304.0f ? 4194304.0f : y;
            const float small = y * 0x1p-22f, level = (t + small) - t;
            const float q = (level > 6.0f ? 6.0f : level) - small;
            loss[j][lane] = q * q;
        }
}

INLINE void table_losses(
    int block, const float (*x)[LANES], const float *scale, const float *cells, float (*loss)[LANES]) {
    float factor[LANES];
    for (int lane = 0; lane < LANES; lane++) factor[lane] = 1 / scale[lane] * (CELLS / 2);  /* rounded twice, as there */
#ifdef __AVX512F__  /* compilers that tune for all CPUs load one cell after the other */
    const __m512 half = _mm512_set1_ps(CELLS / 2), last = _mm512_set1_ps(CELLS - 1), scaled = _mm512_loadu_ps(factor);
    for (int j = 0; j < block; j++) {
        const __m512 y = _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(x[j]), scaled), half);
        const __m512i at = _mm512_cvttps_epi32(_mm512_min_ps(_mm512_max_ps(y, _mm512_setzero_ps()), last));
        const __m512 q = _mm512_sub_ps(y, _mm512_i32gather_ps(at, cells, 4));
        _mm512_storeu_ps(loss[j], _mm512_mul_ps(q, q));
    }
#else
    for (int j = 0; j < block; j++)
        for (int lane = 0; lane < LANES; lane++) {
            const float y = x[j][lane] * factor[lane] + CELLS / 2, low = y < 0.0f ? 0.0f : y;
            const float q = y - cells[(int32_t)(low > CELLS - 1 ? CELLS - 1 : low)];
            loss[j][lane] = q * q;
        }
#endif
}

/* to an integer from -127 to 127, ties to even */
static inline float whole(float y) {
    const float low = y < -127.0f ? -127.0f : y;
    return ((low > 127.0f ? 127.0f : low) + 12582912.0f) - 12582912.0f;
}

INLINE void whole_losses(int block, const float (*x)[LANES], const float *scale, float (*loss)[LANES]) {
    for (int j = 0; j < block; j++)
        for (int lane = 0; lane < LANES; lane++) {
            const float y = x[j][lane] / scale[lane], q = whole(y) - y;
            loss[j][lane] = q * q;
        }
}

/* sums over each block, in loss[0] */
INLINE void sum_losses(
    const Encoding *e, int block, const float (*m)[LANES], float (*loss)[LANES]) {
    if (e->squares)
        for (int j = 0; j < block; j++)
            for (int lane = 0; lane < LANES; lane++) loss[j][lane] *= m[j][lane];
    for (int half = block / 2; half; half /= 2)
        for (int j = 0; j < half; j++)
            for (int lane = 0; lane < LANES; lane++) loss[j][lane] += loss[j + half][lane];
}

/* scale byte of each lane: the candidate with the least sum of m (x / scale - level)^2; for E2M1, x are magnitudes */
INLINE void search(
    const Encoding *e, int block, int kind, const float (*x)[LANES], const float (*m)[LANES], const int32_t *near,
    int32_t *chosen) {
    int32_t best[LANES];
    float sum[LARGEST][LANES];
    for (int lane = 0; lane < LANES; lane++) best[lane] = 0x7FFFFFFF, chosen[lane] = 0;
    for (int candidate = 0; candidate < e->candidates; candidate++) {
        int32_t byte[LANES];
        float scale[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            const int32_t wanted = near[lane] + e->first + candidate;
            const int32_t least = wanted < e->low ? e->low : wanted;
            byte[lane] = least > e->high ? e->high : least;
            scale[lane] = e->values[byte[lane]];
        }
        if (kind == TABLE) table_losses(block, x, scale, e->cells, sum);
        else if (kind == WHOLE) whole_losses(block, x, scale, sum);
        else e2m1_losses(block, x, scale, sum);
        sum_losses(e, block, m, sum);
        for (int lane = 0; lane < LANES; lane++) {
            const float error = sum[0][lane] * scale[lane] * scale[lane];
            const int32_t rank = (bits_of(error) & -16) | candidate;
            chosen[lane] = rank < best[lane] ? byte[lane] : chosen[lane];
            best[lane] = rank < best[lane] ? rank : best[lane];
        }
    }
}

static inline int32_t e2m1_code(float x, float scale) {
    const float y = __builtin_fabsf(x) / scale, twice = y * 2.0f, more = y + 2.0f, half = y * 0.5f + 4.0f;
    const float least = twice < more ? twice : more, v = least < half ? least : half;
    const int32_t nearest = bits_of(v + 8388608.0f) & 0xFF;  /* to integers, ties to even */
    return (nearest > 7 ? 7 : nearest) | (bits_of(x) >> 28 & 8);
}

static void round_whole(
    const Encoding *e, int block, const float (*x)[LANES], const float *scale, int64_t begin, int there) {
    for (int lane = 0; lane < there; lane++)
        for (int j = 0; j < block; j++) e->codes[(begin + lane) * block + j] = (uint8_t)(int8_t)whole(x[j][lane] / scale[lane]);
}

INLINE void round_codes(
    const Encoding *e, int block, int table, const float (*x)[LANES], const float *scale, int64_t begin, int there) {
    int32_t code[LARGEST][LANES];
    for (int j = 0; j < block; j++)
        for (int lane = 0; lane < LANES; lane++) {
            if (!table) {
                code[j][lane] = e2m1_code(x[j][lane], scale[lane]);
                continue;
            }
            const float y = x[j][lane] / scale[lane];
            int32_t rank = 0;
            for (int bound = 0; bound < 15; bound++) rank += y > e->bounds[bound];
            code[j][lane] = rank;
        }
    for (int lane = 0; lane < there; lane++) {
        uint8_t *out = e->codes + (begin + lane) * (block / 2);
        for (int j = 0; j < block / 2; j++) {
            const int32_t even = code[2 * j][lane], odd = code[2 * j + 1][lane];
            out[j] = (uint8_t)(table ? e->order[even] | e->order[odd] << 4 : even | odd << 4);
        }
    }
}

INLINE void encode_group(
    const Encoding *e, int64_t begin, int64_t blocks, int block, int type, int kind) {
    float x[LARGEST][LANES], a[LARGEST][LANES], m[LARGEST][LANES], amax[LANES] = {0}, scale[LANES];
    int32_t near[LANES], chosen[LANES];
    const int there = blocks - begin < LANES ? (int)(blocks - begin) : LANES;
    load(e, begin, blocks, block, type, x, m);
    for (int j = 0; j < block; j++)
        for (int lane = 0; lane < LANES; lane++) {
            a[j][lane] = __builtin_fabsf(x[j][lane]);
            amax[lane] = a[j][lane] > amax[lane] ? a[j][lane] : amax[lane];
        }
    for (int lane = 0; lane < LANES; lane++) near[lane] = nearest_byte(amax[lane] / e->top, e->scale_type, kind);
    search(e, block, kind, (const float (*)[LANES])(kind == FLOATS ? a : x), (const float (*)[LANES])m, near, chosen);
    for (int lane = 0; lane < LANES; lane++) scale[lane] = e->values[chosen[lane]];
    if (e->codes && kind == WHOLE) round_whole(e, block, (const float (*)[LANES])x, scale, begin, there);
    else if (e->codes) round_codes(e, block, kind == TABLE, (const float (*)[LANES])x, scale, begin, there);
    for (int lane = 0; lane < there; lane++)
        ((uint8_t *)e->scales)[begin + lane] = amax[lane] > e->least ? (uint8_t)(chosen[lane] + e->shift) : 0;
}

void vbrt_encode(const Encoding *e, int threads) {
    const int64_t blocks = e->rows * e->per_row;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t begin = 0; begin < blocks; begin += LANES) {
        if (e->cells) encode_group(e, begin, blocks, 64, e->type, TABLE);
        else if (e->bits == 8) encode_group(e, begin, blocks, 32, e->type, WHOLE);
        else if (e->block == 16) encode_group(e, begin, blocks, 16, e->type, FLOATS);
        else encode_group(e, begin, blocks, 32, e->type, FLOATS);
    }
}

/* -- formats of any 16 levels: scales of either sign, which map a block's largest weight to one of the levels */

/* round scales to their stored type */
static __attribute__((noinline)) void round_scales(float *scale, int type) {
    if (type == BF16)
        for (int lane = 0; lane < LANES; lane++) scale[lane] = bf16_value((uint16_t)bf16_bits(scale[lane]));
    if (type == FP16)
        for (int lane = 0; lane < LANES; lane++) scale[lane] = fp16_value((uint16_t)fp16_bits(scale[lane]));
}

/* divisor of weights under a scale: levels are in units of the largest; smaller weights round to zero */
INLINE float divisor_of(float scale, float top) {
    const float divisor = scale * top;
    return __builtin_fabsf(divisor) < 0x1p-100f ? 0x1p-100f : divisor;
}

/* scale of each lane with the least error, among one candidate per level */
static void search_levels(
    const Encoding *e, int block, const float (*x)[LANES], const float (*m)[LANES], const float *largest,
    float *chosen) {
    int32_t best[LANES];
    float loss[LARGEST][LANES];
    for (int lane = 0; lane < LANES; lane++) best[lane] = 0x7FFFFFFF, chosen[lane] = 0;
    for (int candidate = 0; candidate < e->candidates; candidate++) {
        float scale[LANES], divisor[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            const float wanted = largest[lane] / e->values[candidate], least = wanted < -e->least ? -e->least : wanted;
            scale[lane] = least > e->least ? e->least : least;
        }
        round_scales(scale, e->scale_type);
        for (int lane = 0; lane < LANES; lane++) divisor[lane] = divisor_of(scale[lane], e->top);
        table_losses(block, x, divisor, e->cells, loss);
        sum_losses(e, block, m, loss);
        for (int lane = 0; lane < LANES; lane++) {
            const float error = loss[0][lane] * divisor[lane] * divisor[lane];
            const int32_t rank = (bits_of(error) & -16) | candidate;
            chosen[lane] = rank < best[lane] ? scale[lane] : chosen[lane];
            best[lane] = rank < best[lane] ? rank : best[lane];
        }
    }
}

static void encode_levels(const Encoding *e, int64_t begin, int64_t blocks, int block) {
    float x[LARGEST][LANES], m[LARGEST][LANES], amax[LANES], largest[LANES] = {0}, scale[LANES], divisor[LANES];
    const int there = blocks - begin < LANES ? (int)(blocks - begin) : LANES;
    load(e, begin, blocks, block, e->type, x, m);
    for (int lane = 0; lane < LANES; lane++) amax[lane] = -1;
    for (int j = 0; j < block; j++)
        for (int lane = 0; lane < LANES; lane++) {  /* the first among equals */
            const float a = __builtin_fabsf(x[j][lane]);
            largest[lane] = a > amax[lane] ? x[j][lane] : largest[lane];
            amax[lane] = a > amax[lane] ? a : amax[lane];
        }
    search_levels(e, block, (const float (*)[LANES])x, (const float (*)[LANES])m, largest, scale);
    for (int lane = 0; lane < LANES; lane++) divisor[lane] = divisor_of(scale[lane], e->top);
    round_codes(e, block, 1, (const float (*)[LANES])x, divisor, begin, there);
    for (int lane = 0; lane < there; lane++) {
        if (e->scale_type == FP32) ((float *)e->scales)[begin + lane] = scale[lane];
        else ((int16_t *)e->scales)[begin + lane] = e->scale_type == BF16 ? bf16_bits(scale[lane]) : fp16_bits(scale[lane]);
    }
}

void vbrt_encode_levels(const Encoding *e, int threads) {
    const int64_t blocks = e->rows * e->per_row;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t begin = 0; begin < blocks; begin += LANES) encode_levels(e, begin, blocks, e->block);
}

/* -- fitted levels: passes over all weights */

enum { PATTERNS = 1 << 15 };

/* histogram of 16-bit magnitude patterns: counts [threads, PATTERNS], zeroed before */
void vbrt_count_patterns(const uint16_t *weight, int64_t size, int64_t *counts, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int part = 0; part < threads; part++) {
        int64_t *own = counts + (int64_t)part * PATTERNS;
        for (int64_t at = size * part / threads; at < size * (part + 1) / threads; at++) own[weight[at] & 0x7FFF]++;
    }
}

/* number of weights larger than `reach` times their block's scale */
int64_t vbrt_count_beyond(const Encoding *e, const uint8_t *bytes, float unit, float reach, int threads) {
    int64_t count = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : count)
    for (int64_t row = 0; row < e->rows; row++)
        for (int64_t first = 0, at = row * e->per_row; first < e->columns; first += e->block, at++) {
            const float limit = e->values[bytes[at]] * unit * reach;
            const int64_t left = e->columns - first, there = left < e->block ? left : e->block;
            int32_t beyond = 0;
            for (int64_t j = 0; j < there; j++)
                beyond += __builtin_fabsf(value_at(e->weight, row * e->columns + first + j, e->type)) > limit;
            count += beyond;
        }
    return count;
}

#include "split.h"
#include "code.h"
