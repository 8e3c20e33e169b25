/* Products of tokens with the 4-bit matrices of routed experts, for few tokens an expert: decoded in registers and
 * multiplied there, gated before they are stored. Compiled by build.py.
 *
 * weight = level[code] * (value[scale byte] * unit), or level[code] * scale where scales have 16 or 32 bits; a scale may
 * be multiplied with a sum of level[code] * x instead.
 * Two codes share a byte, the even column in the low nibble. A block has 16, 32, 64 or 128 columns.
 * Each result is computed by one thread, in an order that depends on the matrix alone: neither on the number of threads
 * nor on the other tokens.
 * Legend: T tokens, k experts a token, P = T k pairs, E experts, N rows, K columns padded to the block.
 */
#include <math.h>
#include <stdlib.h>
#include "numbers.h"
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define WIDE 1
#elif defined(__AVX2__) && defined(__FMA__)
#define HALF 1
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
#define PLACE(k) ((k) % WORD * 16 + (k) % SPAN / WORD)
#else
/* The codes of 32 columns are 16 bytes: even columns, then odd ones. */
#define SPAN 32
#define PLACE(k) ((k) % 2 * 16 + (k) % SPAN / 2)
#endif
#define CHUNK 32     /* results that a thread takes at a time */
#define TOKENS 4     /* tokens that share one decoding of a row */
#define TILE 4096    /* columns whose scales are looked up at a time */

enum { FP32, BF16, FP16, BYTE };
static const int SCALE_BYTES[] = {4, 2, 2, 1};
enum { NONE, RELU, RELU2, GELU, GELU_TANH, SILU };

/* One matrix of each expert. */
typedef struct {
    const uint8_t *const *pages;  /* [E] */
    const float *levels, *values;  /* [E or 1, 16], [256]; values of bytes only */
    int64_t level_step;  /* 16 where each expert has levels of its own, else 0 */
    int64_t codes, scales, unit;  /* offsets in a page, in bytes; unit: -1 where it is 1 */
    int64_t experts, rows, columns, block, scale_type;
} Bank;

typedef struct {
    int32_t function, gated, interleaved, sigmoid;  /* sigmoid: alpha is not 1 */
    float alpha, limit, shift;  /* limit: infinite for none */
} Gate;

/* What is multiplied, and where results go: both rows of numbers of one type. */
typedef struct {
    const int64_t *ids;  /* [P] */
    int64_t pairs, pairs_per_row;  /* row of x = pair / pairs_per_row */
    int64_t most;  /* an expert with more pairs is left to the caller */
    const void *x, *bias;  /* [rows, inputs], [E, N] or NULL */
    void *out;  /* [P, results] */
    int64_t inputs;  /* K without the padding */
    int32_t x_type, bias_type, out_type;
} Task;

static inline float load(const void *from, int type, int64_t at) {
    if (type == FP32) return ((const float *)from)[at];
    const uint16_t word = ((const uint16_t *)from)[at];
    return type == BF16 ? bf16_value(word) : fp16_value(word);
}

static inline void store(void *to, int type, int64_t at, float value) {
    if (type == FP32) ((float *)to)[at] = value;
    else ((int16_t *)to)[at] = type == BF16 ? bf16_bits(value) : fp16_bits(value);
}

/* -- dots: sums[r * TOKENS + m] of rows r with tokens m; `rows`, `tokens` and `block` are constants once it is inlined */

typedef struct {
    const uint8_t *codes[2], *scales[2];  /* by row */
    const float *levels;  /* [16] */
    int scale_type;
#ifdef WIDE
    const uint16_t *halves;  /* [256] by scale byte: the upper halves of values, which have few significant bits */
    float unit;
#else
    const float *values;  /* [256] by scale byte: value * unit */
#endif
    const float *x[TOKENS];  /* in spans */
    int64_t columns;
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

INLINE void dots(const Dots *d, int rows, int tokens, int block, float *sums) {
    const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i block_of = _mm512_srli_epi32(iota, block == 16 ? 1 : block == 32 ? 2 : block == 64 ? 3 : 4);
    const __m512 levels = _mm512_loadu_ps(d->levels);
    __m512i table[8];
    __m512 sum[2][TOKENS], level[WORD];
    float scales[2][TILE / 16 + 32];
    for (int i = 0; i < 8; i++) table[i] = _mm512_loadu_si512(d->halves + 32 * i);
    const int type = d->scale_type;
    for (int r = 0; r < rows; r++)
        for (int m = 0; m < tokens; m++) sum[r][m] = _mm512_setzero_ps();
    for (int64_t first = 0; first < d->columns; first += TILE) {
        const int64_t columns = d->columns - first < TILE ? d->columns - first : TILE;
        for (int r = 0; r < rows; r++) {
            const uint8_t *stored = d->scales[r] + first / block * SCALE_BYTES[type];
            if (type == BYTE) look_up(stored, columns / block, table, d->unit, scales[r]);
            else convert(stored, columns / block, type, scales[r]);
        }
        for (int64_t k = 0; k < columns; k += SPAN) {
            const int64_t left = columns - k;
            const __mmask16 words = left >= SPAN ? 0xFFFF : (1 << left / WORD) - 1;
            for (int r = 0; r < rows; r++) {
                const __m512i codes = _mm512_maskz_loadu_epi32(words, d->codes[r] + (first + k) / 2);
                const __m512 scale = _mm512_permutexvar_ps(block_of, _mm512_loadu_ps(scales[r] + k / block));
                /* vpermps looks at the lowest four bits of an index only */
                for (int j = 0; j < WORD; j++)
                    level[j] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4 * j), levels);
                for (int m = 0; m < tokens; m++) {
                    const float *x = d->x[m] + first + k;
                    __m512 part = _mm512_mul_ps(level[0], _mm512_loadu_ps(x));
                    for (int j = 1; j < WORD; j++)
                        part = _mm512_fmadd_ps(level[j], _mm512_loadu_ps(x + 16 * j), part);
                    sum[r][m] = _mm512_fmadd_ps(part, scale, sum[r][m]);
                }
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int m = 0; m < tokens; m++) sums[r * TOKENS + m] = _mm512_reduce_add_ps(sum[r][m]);
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

INLINE void dots(const Dots *d, int rows, int tokens, int block, float *sums) {
    const __m256 low = _mm256_loadu_ps(d->levels), high = _mm256_loadu_ps(d->levels + 8);
    for (int r = 0; r < rows; r++) {
        __m256 sum[TOKENS][2];
        for (int m = 0; m < tokens; m++) sum[m][0] = sum[m][1] = _mm256_setzero_ps();
        for (int64_t k = 0; k < d->columns; k += SPAN / 2) {
            const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(d->codes[r] + k / 2)));
            const __m256 scale = _mm256_set1_ps(scale_at(d, r, k / block));
            const __m256 even = _mm256_mul_ps(levels_of(code, low, high), scale);
            const __m256 odd = _mm256_mul_ps(levels_of(_mm256_srli_epi32(code, 4), low, high), scale);
            const int64_t at = k / SPAN * SPAN + (k / 16 & 1) * 8;
            for (int m = 0; m < tokens; m++) {
                sum[m][0] = _mm256_fmadd_ps(even, _mm256_loadu_ps(d->x[m] + at), sum[m][0]);
                sum[m][1] = _mm256_fmadd_ps(odd, _mm256_loadu_ps(d->x[m] + at + 16), sum[m][1]);
            }
        }
        for (int m = 0; m < tokens; m++) sums[r * TOKENS + m] = total(_mm256_add_ps(sum[m][0], sum[m][1]));
    }
}

#else

INLINE void dots(const Dots *d, int rows, int tokens, int block, float *sums) {
    for (int r = 0; r < rows; r++) {
        float sum[TOKENS][16] = {{0}}, weight[16];
        for (int64_t k = 0; k < d->columns; k += SPAN / 2) {
            const uint8_t *codes = d->codes[r] + k / 2;
            const float scale = scale_at(d, r, k / block);
            const int64_t at = k / SPAN * SPAN + (k / 16 & 1) * 8;
            for (int j = 0; j < 8; j++) {
                weight[j] = d->levels[codes[j] & 15] * scale;
                weight[j + 8] = d->levels[codes[j] >> 4] * scale;
            }
            for (int m = 0; m < tokens; m++)
                for (int j = 0; j < 16; j++) sum[m][j] += weight[j] * d->x[m][at + j + (j & 8)];
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

INLINE void dots_of_block(const Dots *d, int rows, int tokens, int block, float *sums) {
    if (tokens == 4) dots(d, rows, 4, block, sums);
    else if (tokens == 2) dots(d, rows, 2, block, sums);
    else dots(d, rows, 1, block, sums);
}

static void dots_of_rows(const Dots *d, int rows, int tokens, int block, float *sums) {
    if (rows == 1) {
        if (block == 16) dots_of_block(d, 1, tokens, 16, sums);
        else if (block == 32) dots_of_block(d, 1, tokens, 32, sums);
        else if (block == 64) dots_of_block(d, 1, tokens, 64, sums);
        else dots_of_block(d, 1, tokens, 128, sums);
    } else {
        if (block == 16) dots_of_block(d, 2, tokens, 16, sums);
        else if (block == 32) dots_of_block(d, 2, tokens, 32, sums);
        else if (block == 64) dots_of_block(d, 2, tokens, 64, sums);
        else dots_of_block(d, 2, tokens, 128, sums);
    }
}

/* -- gates -------------------------------------------------------------------------------------------------------- */

static inline float function(int name, float x) {
    switch (name) {
        case RELU: return x < 0 ? 0 : x;
        case RELU2: return x < 0 ? 0 : x * x;
        case GELU: return 0.5f * x * (1 + erff(x * 0.70710678118654752f));
        case GELU_TANH: return 0.5f * x * (1 + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
        case SILU: return x / (1 + expf(-x));
        default: return x;
    }
}

static inline float gated(const Gate *g, float gate, float value) {
    if (gate > g->limit) gate = g->limit;
    if (value > g->limit) value = g->limit;
    if (value < -g->limit) value = -g->limit;
    gate = g->sigmoid ? gate / (1 + expf(-g->alpha * gate)) : function(g->function, gate);
    return gate * (value + g->shift);
}

/* -- products ----------------------------------------------------------------------------------------------------- */

/* The pairs of one expert: order[first] to order[first + count - 1]. */
typedef struct { int64_t expert, first, count; } Group;

typedef struct {
    float *x;  /* rows in spans */
    int64_t span_columns;  /* K rounded up to whole spans */
    int64_t *order;  /* pairs by expert, ascending within each */
    Group *groups;
    int64_t count;  /* of groups */
} Plan;

static void *taken(char **memory, int64_t bytes) {
    void *here = *memory;
    *memory += (bytes + 63) / 64 * 64;
    return here;
}

static void sort_pairs(const Bank *b, const Task *t, Plan *plan, int64_t *starts) {
    memset(starts, 0, (b->experts + 1) * sizeof *starts);
    for (int64_t p = 0; p < t->pairs; p++)
        if (t->ids[p] >= 0 && t->ids[p] < b->experts) starts[t->ids[p] + 1]++;
    plan->count = 0;
    for (int64_t e = 0; e < b->experts; e++) {
        const int64_t count = starts[e + 1];
        if (count && count <= t->most) plan->groups[plan->count++] = (Group){e, starts[e], count};
        starts[e + 1] += starts[e];
    }
    for (int64_t p = 0; p < t->pairs; p++)
        if (t->ids[p] >= 0 && t->ids[p] < b->experts) plan->order[starts[t->ids[p]]++] = p;
}

static void spread(const Task *t, const Plan *plan) {
    const int64_t rows = t->pairs / t->pairs_per_row;
    for (int64_t r = 0; r < rows; r++) {
        float *to = plan->x + r * plan->span_columns;
        const int64_t whole = t->inputs / SPAN * SPAN;
        memset(to + whole, 0, (plan->span_columns - whole) * sizeof *to);
        for (int64_t k = 0; k < t->inputs; k++)
            to[k / SPAN * SPAN + PLACE(k)] = load(t->x, t->x_type, r * t->inputs + k);
    }
}

/* results first to last - 1 of the pairs of a group */
static void multiply(const Bank *b, const Gate *g, const Task *t, const Plan *plan, const Group *group, int64_t first,
                     int64_t last) {
    const uint8_t *page = b->pages[group->expert];
    const int pair_of_rows = g->gated;  /* a gate and its value */
    const int64_t half = b->rows / 2, results = pair_of_rows ? half : b->rows;
    float unit = 1, sums[2 * TOKENS];
    if (b->unit >= 0) memcpy(&unit, page + b->unit, 4);
#ifdef WIDE
    uint16_t table[256];
    for (int i = 0; i < 256; i++) table[i] = b->scale_type == BYTE ? (uint16_t)bf16_bits(b->values[i]) : 0;
    Dots d = {.halves = table, .unit = unit};
#else
    float table[256];
    for (int i = 0; i < 256 && b->scale_type == BYTE; i++) table[i] = b->values[i] * unit;
    Dots d = {.values = table};
#endif
    d.levels = b->levels + b->level_step * group->expert, d.columns = b->columns, d.scale_type = (int)b->scale_type;
    for (int64_t n = first; n < last; n += pair_of_rows ? 1 : 2) {
        const int count = pair_of_rows || n + 1 < last ? 2 : 1;
        const int64_t row[2] = {pair_of_rows && g->interleaved ? 2 * n : n,
                                !pair_of_rows ? n + 1 : g->interleaved ? 2 * n + 1 : n + half};
        float bias[2] = {0, 0};
        for (int r = 0; r < count; r++) {
            d.codes[r] = page + b->codes + row[r] * (b->columns / 2);
            d.scales[r] = page + b->scales + row[r] * (b->columns / b->block) * SCALE_BYTES[b->scale_type];
            if (t->bias) bias[r] = load(t->bias, t->bias_type, group->expert * b->rows + row[r]);
        }
        for (int64_t i = 0; i < group->count;) {
            const int64_t left = group->count - i, *pairs = plan->order + group->first + i;
            const int tokens = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            for (int m = 0; m < tokens; m++) d.x[m] = plan->x + pairs[m] / t->pairs_per_row * plan->span_columns;
            dots_of_rows(&d, count, tokens, b->block, sums);
            for (int m = 0; m < tokens; m++) {
                const float one = sums[m] + bias[0], two = sums[TOKENS + m] + bias[1];
                const int64_t at = pairs[m] * results + n;
                if (pair_of_rows) {
                    store(t->out, t->out_type, at, gated(g, one, two));
                } else {
                    store(t->out, t->out_type, at, function(g->function, one));
                    if (count == 2) store(t->out, t->out_type, at + 1, function(g->function, two));
                }
            }
            i += tokens;
        }
    }
}

/* Returns 0 where there was no memory. Rows of sentinels, and of experts with more than `most` pairs, are not written. */
int vbrt_experts_product(const Bank *b, const Gate *g, const Task *t, int threads) {
    const int64_t spans = (b->columns + SPAN - 1) / SPAN * SPAN, rows = t->pairs / t->pairs_per_row;
    const int64_t wanted = rows * spans * 4 + t->pairs * 8 + (b->experts + 1) * (8 + sizeof(Group)) + 5 * 64;
    char *memory = malloc(wanted), *at = (char *)(((uintptr_t)memory + 63) / 64 * 64);
    if (!memory) return 0;
    Plan plan = {.x = taken(&at, rows * spans * 4), .span_columns = spans};
    plan.order = taken(&at, t->pairs * 8);
    plan.groups = taken(&at, b->experts * sizeof(Group));
    sort_pairs(b, t, &plan, taken(&at, (b->experts + 1) * 8));
    spread(t, &plan);
    const int64_t results = g->gated ? b->rows / 2 : b->rows, chunks = (results + CHUNK - 1) / CHUNK;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t i = 0; i < plan.count * chunks; i++) {
        const int64_t first = i % chunks * CHUNK, end = first + CHUNK;
        multiply(b, g, t, &plan, plan.groups + i / chunks, first, end < results ? end : results);
    }
    free(memory);
    return 1;
}

#define PART 256  /* results of a token that a thread adds up at a time */

INLINE void sum_part(const void *rows, int type, const int64_t *ids, const float *weights, int64_t experts, int64_t k,
                     int64_t n, int64_t count, float *sum) {
    for (int64_t j = 0; j < k; j++) {
        if (ids[j] < 0 || ids[j] >= experts) continue;
        for (int64_t c = 0; c < count; c++) sum[c] += weights[j] * load(rows, type, j * n + c);
    }
}

/* out [T, N] = sum over j of weights[t, j] * rows[t k + j], in the order of j; ids outside 0 .. experts - 1 are skipped;
 * shape is T, k, N; rows and out are of one type */
void vbrt_experts_sum(const char *rows, const int64_t *ids, const float *weights, int64_t experts, const int64_t *shape,
                      void *out, int type, int threads) {
    const int64_t tokens = shape[0], k = shape[1], n = shape[2], parts = (n + PART - 1) / PART;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < tokens * parts; i++) {
        const int64_t t = i / parts, first = i % parts * PART, count = n - first < PART ? n - first : PART;
        const char *here = rows + (t * k * n + first) * (type == FP32 ? 4 : 2);
        float sum[PART] = {0};
        if (type == FP32) sum_part(here, FP32, ids + t * k, weights + t * k, experts, k, n, count, sum);
        else if (type == BF16) sum_part(here, BF16, ids + t * k, weights + t * k, experts, k, n, count, sum);
        else sum_part(here, FP16, ids + t * k, weights + t * k, experts, k, n, count, sum);
        for (int64_t c = 0; c < count; c++) store(out, type, t * n + first + c, sum[c]);
    }
}

/* the most pairs of an expert for which vbrt_experts_product beats decoding its matrix and a matmul */
int vbrt_experts_most(void) {
#ifdef WIDE
    return 16;
#else
    return 4;
#endif
}
