/* Encoding to E2M1 formats on a CPU: the arithmetic of `BlockFormat._search` with `E2M1Rounding`, operation by operation.
 * Compiled by build.py, without fused multiply-adds.
 *
 * Sixteen blocks go together, a lane each, so that sums over a block add vectors in the order of `rounding.block_sum`.
 */
#include <stddef.h>
#include "numbers.h"

enum { LANES = 16, LARGEST = 32 };
enum { FP32, BF16, FP16 };

typedef struct {
    const void *weight;  /* [rows, columns] of `type` */
    const float *values;  /* [256] by scale byte */
    const float *squares;  /* [rows / rows_each, columns], or NULL: errors count alike */
    uint8_t *codes, *bytes;  /* [blocks, block / 2], [blocks]: `per_row` blocks in a row */
    int64_t rows, columns, per_row, rows_each;
    int32_t type, block, first, candidates, low, high, shift, e4m3;
    float per_unit, least;
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

/* the byte of the E4M3 value nearest to one in [0, 448], ties to even */
static inline int32_t nearest_e4m3(float value) {
    const int32_t bits = bits_of(value);
    if (value < 0.015625f) return bits_of(value * 512.0f + 8388608.0f) & 0xFF;
    return ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3);
}

static inline __attribute__((always_inline)) void load(
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

/* the scale byte of each lane, whose candidate has the least sum of m (x / scale - level)^2 */
static inline __attribute__((always_inline)) void search(
    const Encoding *e, int block, const float (*a)[LANES], const float (*m)[LANES], const int32_t *near, int32_t *chosen) {
    int32_t best[LANES];
    float sum[LARGEST][LANES];
    for (int lane = 0; lane < LANES; lane++) best[lane] = 0x7FFFFFFF, chosen[lane] = 0;
    for (int candidate = 0; candidate < e->candidates; candidate++) {
        int32_t byte[LANES];
        float scale[LANES], factor[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            const int32_t wanted = near[lane] + e->first + candidate;
            const int32_t least = wanted < e->low ? e->low : wanted;
            byte[lane] = least > e->high ? e->high : least;
            scale[lane] = e->values[byte[lane]];
        }
        for (int lane = 0; lane < LANES; lane++) factor[lane] = 4194304.0f / scale[lane];  /* 2^22, carried in y */
        for (int j = 0; j < block; j++)
            for (int lane = 0; lane < LANES; lane++) {
                const float y = a[j][lane] * factor[lane], t = y < 4194304.0f ? 4194304.0f : y;
                const float small = y * 0x1p-22f, level = (t + small) - t;
                const float q = (level > 6.0f ? 6.0f : level) - small;
                sum[j][lane] = q * q;
            }
        if (e->squares)
            for (int j = 0; j < block; j++)
                for (int lane = 0; lane < LANES; lane++) sum[j][lane] *= m[j][lane];
        for (int half = block / 2; half; half /= 2)
            for (int j = 0; j < half; j++)
                for (int lane = 0; lane < LANES; lane++) sum[j][lane] += sum[j + half][lane];
        for (int lane = 0; lane < LANES; lane++) {
            const float error = sum[0][lane] * scale[lane] * scale[lane];
            const int32_t rank = (bits_of(error) & -16) | candidate;
            chosen[lane] = rank < best[lane] ? byte[lane] : chosen[lane];
            best[lane] = rank < best[lane] ? rank : best[lane];
        }
    }
}

static inline __attribute__((always_inline)) void round_codes(
    const Encoding *e, int block, const float (*x)[LANES], const float (*a)[LANES], const float *scale, int64_t begin, int there) {
    int32_t code[LARGEST][LANES];
    for (int j = 0; j < block; j++)
        for (int lane = 0; lane < LANES; lane++) {
            const float y = a[j][lane] / scale[lane], twice = y * 2.0f, more = y + 2.0f, half = y * 0.5f + 4.0f;
            const float least = twice < more ? twice : more, v = least < half ? least : half;
            const int32_t nearest = bits_of(v + 8388608.0f) & 0xFF;  /* to whole numbers, ties to even */
            code[j][lane] = (nearest > 7 ? 7 : nearest) | (bits_of(x[j][lane]) >> 28 & 8);
        }
    for (int lane = 0; lane < there; lane++) {
        uint8_t *out = e->codes + (begin + lane) * (block / 2);
        for (int j = 0; j < block / 2; j++) out[j] = (uint8_t)(code[2 * j][lane] | code[2 * j + 1][lane] << 4);
    }
}

static inline __attribute__((always_inline)) void encode_group(
    const Encoding *e, int64_t begin, int64_t blocks, int block, int type) {
    float x[LARGEST][LANES], a[LARGEST][LANES], m[LARGEST][LANES], amax[LANES] = {0}, scale[LANES];
    int32_t near[LANES], chosen[LANES];
    const int there = blocks - begin < LANES ? (int)(blocks - begin) : LANES;
    load(e, begin, blocks, block, type, x, m);
    for (int j = 0; j < block; j++)
        for (int lane = 0; lane < LANES; lane++) {
            a[j][lane] = __builtin_fabsf(x[j][lane]);
            amax[lane] = a[j][lane] > amax[lane] ? a[j][lane] : amax[lane];
        }
    for (int lane = 0; lane < LANES; lane++) {
        const float over = amax[lane] / 6.0f;
        near[lane] = e->e4m3 ? nearest_e4m3(over > 448.0f ? 448.0f : over) : (bits_of(over) + 0x004AFB0D) >> 23;
    }
    search(e, block, (const float (*)[LANES])a, (const float (*)[LANES])m, near, chosen);
    for (int lane = 0; lane < LANES; lane++) scale[lane] = e->values[chosen[lane]];
    round_codes(e, block, (const float (*)[LANES])x, (const float (*)[LANES])a, scale, begin, there);
    for (int lane = 0; lane < there; lane++)
        e->bytes[begin + lane] = amax[lane] > e->least ? (uint8_t)(chosen[lane] + e->shift) : 0;
}

void vbrt_encode(const Encoding *e, int threads) {
    const int64_t blocks = e->rows * e->per_row;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t begin = 0; begin < blocks; begin += LANES) {
        if (e->block == 16 && e->type == BF16) encode_group(e, begin, blocks, 16, BF16);
        else if (e->block == 16) encode_group(e, begin, blocks, 16, e->type);
        else encode_group(e, begin, blocks, e->block, e->type);
    }
}
