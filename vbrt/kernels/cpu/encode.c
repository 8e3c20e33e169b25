/* Encoding to block formats on a CPU: the arithmetic of `BlockFormat._search` with `E2M1Rounding` and `TableRounding`,
 * operation by operation. Compiled by build.py, without fused multiply-adds.
 *
 * Sixteen blocks go together, a lane each, so that sums over a block add vectors in the order of `rounding.block_sum`.
 */
#include <stddef.h>
#include "numbers.h"

enum { LANES = 16, LARGEST = 64, CELLS = 4096 };
enum { FP32, BF16, FP16 };
enum { E4M3, E8M0, UE4M4 };

typedef struct {
    const void *weight;  /* [rows, columns] of `type` */
    const float *values;  /* [256] by scale byte */
    const float *squares;  /* [rows / rows_each, columns], or NULL: errors count alike */
    const float *cells, *bounds;  /* [CELLS], [15] between the levels, ascending; NULL: codes are E2M1 */
    const uint8_t *order;  /* [16]: the code of each level, ascending */
    uint8_t *codes, *bytes;  /* [blocks, block / 2], [blocks]: `per_row` blocks in a row */
    int64_t rows, columns, per_row, rows_each;
    int32_t type, block, first, candidates, low, high, shift, scales;
    float per_unit, least, top;
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

static inline int32_t nearest_byte(float scale, int scales) {
    if (scales == E4M3) return nearest_e4m3(scale > 448.0f ? 448.0f : scale);
    if (scales == E8M0) return (bits_of(scale) + 0x004AFB0D) >> 23;
    return ((bits_of(scale) + (1 << 18)) >> 19) - (120 << 4);
}

/* squares of what a candidate loses of each weight, in units that all candidates share but for the scale */
static inline __attribute__((always_inline)) void e2m1_losses(
    int block, const float (*a)[LANES], const float *scale, float (*loss)[LANES]) {
    float factor[LANES];
    for (int lane = 0; lane < LANES; lane++) factor[lane] = 4194304.0f / scale[lane];  /* 2^22, carried in y */
    for (int j = 0; j < block; j++)
        for (int lane = 0; lane < LANES; lane++) {
            const float y = a[j][lane] * factor[lane], t = y < 4194304.0f ? 4194304.0f : y;
            const float small = y * 0x1p-22f, level = (t + small) - t;
            const float q = (level > 6.0f ? 6.0f : level) - small;
            loss[j][lane] = q * q;
        }
}

static inline __attribute__((always_inline)) void table_losses(
    int block, const float (*x)[LANES], const float *scale, const float *cells, float (*loss)[LANES]) {
    float factor[LANES];
    for (int lane = 0; lane < LANES; lane++) factor[lane] = (CELLS / 2) / scale[lane];
    for (int j = 0; j < block; j++)
        for (int lane = 0; lane < LANES; lane++) {
            const float y = x[j][lane] * factor[lane] + CELLS / 2, low = y < 0.0f ? 0.0f : y;
            const float q = y - cells[(int32_t)(low > CELLS - 1 ? CELLS - 1 : low)];
            loss[j][lane] = q * q;
        }
}

/* the scale byte of each lane, whose candidate has the least sum of m (x / scale - level)^2; of E2M1, x are magnitudes */
static inline __attribute__((always_inline)) void search(
    const Encoding *e, int block, int table, const float (*x)[LANES], const float (*m)[LANES], const int32_t *near,
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
        if (table) table_losses(block, x, scale, e->cells, sum);
        else e2m1_losses(block, x, scale, sum);
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

static inline int32_t e2m1_code(float x, float scale) {
    const float y = __builtin_fabsf(x) / scale, twice = y * 2.0f, more = y + 2.0f, half = y * 0.5f + 4.0f;
    const float least = twice < more ? twice : more, v = least < half ? least : half;
    const int32_t nearest = bits_of(v + 8388608.0f) & 0xFF;  /* to whole numbers, ties to even */
    return (nearest > 7 ? 7 : nearest) | (bits_of(x) >> 28 & 8);
}

static inline __attribute__((always_inline)) void round_codes(
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

static inline __attribute__((always_inline)) void encode_group(
    const Encoding *e, int64_t begin, int64_t blocks, int block, int type, int table) {
    float x[LARGEST][LANES], a[LARGEST][LANES], m[LARGEST][LANES], amax[LANES] = {0}, scale[LANES];
    int32_t near[LANES], chosen[LANES];
    const int there = blocks - begin < LANES ? (int)(blocks - begin) : LANES;
    load(e, begin, blocks, block, type, x, m);
    for (int j = 0; j < block; j++)
        for (int lane = 0; lane < LANES; lane++) {
            a[j][lane] = __builtin_fabsf(x[j][lane]);
            amax[lane] = a[j][lane] > amax[lane] ? a[j][lane] : amax[lane];
        }
    for (int lane = 0; lane < LANES; lane++) near[lane] = nearest_byte(amax[lane] / e->top, e->scales);
    search(e, block, table, (const float (*)[LANES])(table ? x : a), (const float (*)[LANES])m, near, chosen);
    for (int lane = 0; lane < LANES; lane++) scale[lane] = e->values[chosen[lane]];
    round_codes(e, block, table, (const float (*)[LANES])x, scale, begin, there);
    for (int lane = 0; lane < there; lane++)
        e->bytes[begin + lane] = amax[lane] > e->least ? (uint8_t)(chosen[lane] + e->shift) : 0;
}

void vbrt_encode(const Encoding *e, int threads) {
    const int64_t blocks = e->rows * e->per_row;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t begin = 0; begin < blocks; begin += LANES) {
        if (e->cells) encode_group(e, begin, blocks, 64, e->type, 1);
        else if (e->block == 16) encode_group(e, begin, blocks, 16, e->type, 0);
        else encode_group(e, begin, blocks, 32, e->type, 0);
    }
}
