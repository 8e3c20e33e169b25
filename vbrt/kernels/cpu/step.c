/* Step ops between the layers of a decode step: norms, rotary embeddings, gates, attention of few queries, routers.
 * Compiled by build.py.
 *
 * Numbers are fp32, bf16 or fp16, computed in fp32 and rounded where `vbrt/kernels/step.py` rounds. Each result is
 * computed by one thread, in an order that depends on its own row alone.
 * Legend: B batch, S tokens, H heads, G heads of keys, D columns of a head, K columns, L keys, E experts.
 */
#include <math.h>
#include <stddef.h>
#include "numbers.h"

#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline))  /* not inlined: types are dispatched per row, not per number */
#define LANES 16
#define PIECE 256    /* numbers processed at a time */
#define COLUMNS 256  /* maximum head dimension */
#define QUERIES 16   /* maximum queries that share keys */
#define KEYS 64      /* keys per block of scores */

enum { FP32, BF16, FP16 };

/* -- rows of numbers ---------------------------------------------------------------------------------------------- */

/* to nearest, ties to even; NaN-safe without a branch, which would prevent vectorization */
INLINE uint16_t bf16_word(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

APART void read_row(const void *from, int type, int64_t at, int64_t count, float *row) {
    const uint16_t *words = (const uint16_t *)from + at;
    if (type == FP32) memcpy(row, (const float *)from + at, count * sizeof *row);
    else if (type == BF16) for (int64_t i = 0; i < count; i++) row[i] = bf16_value(words[i]);
    else for (int64_t i = 0; i < count; i++) row[i] = fp16_value(words[i]);
}

APART void write_row(const float *row, int type, int64_t at, int64_t count, void *to) {
    uint16_t *words = (uint16_t *)to + at;
    if (type == FP32) memcpy((float *)to + at, row, count * sizeof *row);
    else if (type == BF16) for (int64_t i = 0; i < count; i++) words[i] = bf16_word(row[i]);
    else for (int64_t i = 0; i < count; i++) words[i] = (uint16_t)fp16_bits(row[i]);
}

/* round in place: store, then load */
APART void round_row(float *row, int type, int64_t count) {
    if (type == BF16) for (int64_t i = 0; i < count; i++) row[i] = bf16_value(bf16_word(row[i]));
    if (type == FP16) for (int64_t i = 0; i < count; i++) row[i] = fp16_value((uint16_t)fp16_bits(row[i]));
}

static int64_t bytes_of(int type) { return type == FP32 ? 4 : 2; }

INLINE int64_t at_most(int64_t count, int64_t most) { return count < most ? count : most; }

/* pairwise sum: a latency of four adds instead of sixteen */
INLINE float summed(const float *lanes) {
    float eight[8], four[4];
    for (int i = 0; i < 8; i++) eight[i] = lanes[i] + lanes[8 + i];
    for (int i = 0; i < 4; i++) four[i] = eight[i] + eight[4 + i];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* accumulate the products of two rows, number i in lane i % LANES */
INLINE void add_products(const float *a, const float *b, int64_t count, float *lanes) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int j = 0; j < LANES; j++) lanes[j] += a[i + j] * b[i + j];
    for (; i < count; i++) lanes[i % LANES] += a[i] * b[i];
}

/* e^x, to a few ulp; underflow gives the smallest normal number */
INLINE float exponential(float x) {
    x = x > 88.3762626647949f ? 88.3762626647949f : x;
    x = x < -87.3365447504019f ? -87.3365447504019f : x;
    const float n = rintf(x * 1.44269504088896341f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

/* -- norms -------------------------------------------------------------------------------------------------------- */

typedef struct {
    const void *gain;  /* [K] or NULL */
    float eps, shift;
    int32_t rounds, pad;
} Rule;

/* numbers `at` to `at + count - 1` of a row, times the norm's factor and the gain */
INLINE void scale_row(float *row, int type, const Rule *rule, float factor, int64_t at, int64_t count) {
    float gain[PIECE];
    for (int64_t i = 0; i < count; i++) row[i] *= factor;
    if (!rule->gain) return;
    read_row(rule->gain, type, at, count, gain);
    if (rule->shift != 0) for (int64_t i = 0; i < count; i++) gain[i] += rule->shift;
    if (rule->rounds) {
        round_row(row, type, count);
        if (rule->shift != 0) round_row(gain, type, count);
    }
    for (int64_t i = 0; i < count; i++) row[i] *= gain[i];
}

/* Rows of x, or of x + other if given, which are stored in `total`. */
typedef struct {
    const void *x, *other;
    void *total, *y;
    Rule rule;
    int64_t rows, columns;
    int32_t type, pad;
} Norm;

int vbrt_step_norm(const Norm *n) {
    const int64_t k = n->columns;
    float row[PIECE], more[PIECE];
    for (int64_t r = 0; r < n->rows; r++) {
        float lanes[LANES] = {0};
        for (int64_t first = 0; first < k; first += PIECE) {
            const int64_t count = at_most(k - first, PIECE), at = r * k + first;
            read_row(n->x, n->type, at, count, row);
            if (n->other) {
                read_row(n->other, n->type, at, count, more);
                for (int64_t i = 0; i < count; i++) row[i] += more[i];
                write_row(row, n->type, at, count, n->total);
                round_row(row, n->type, count);
            }
            add_products(row, row, count, lanes);
        }
        const float factor = 1.0f / sqrtf(summed(lanes) / (float)k + n->rule.eps);
        for (int64_t first = 0; first < k; first += PIECE) {
            const int64_t count = at_most(k - first, PIECE), at = r * k + first;
            read_row(n->other ? n->total : n->x, n->type, at, count, row);
            scale_row(row, n->type, &n->rule, factor, first, count);
            write_row(row, n->type, at, count, n->y);
        }
    }
    return 1;
}

/* -- rotary embeddings -------------------------------------------------------------------------------------------- */

/* Heads [B, H, S, D] to norm, if there is a rule, rotate or copy, and store. */
typedef struct {
    const void *x;
    void *y;
    const int64_t *at;  /* [S], positions in y; NULL: as in x */
    int64_t heads, x_step[3], y_step[3];  /* strides of B, H and S */
    Rule rule;
    int32_t normed, copied;
} Part;

typedef struct {
    const Part *parts;
    const void *cos, *sin;  /* [B, S, turned] */
    int64_t count, batch, tokens, columns, turned, step[2];  /* strides of cos and sin in B and S */
    int32_t type, pad;
} Rotation;

/* heads of one token: x and y offsets of the first one are `from` and `to` */
static void rotate_heads(const Rotation *r, const Part *p, int64_t from, const float *cos, const float *sin, int64_t to) {
    const int64_t d = r->columns, turned = r->turned, half = turned / 2;
    float row[COLUMNS], straight[COLUMNS], crossed[COLUMNS];
    for (int64_t h = 0; h < p->heads; h++) {
        read_row(p->x, r->type, from + h * p->x_step[1], d, row);
        if (p->normed) {
            float lanes[LANES] = {0};
            add_products(row, row, d, lanes);
            scale_row(row, r->type, &p->rule, 1.0f / sqrtf(summed(lanes) / (float)d + p->rule.eps), 0, d);
            round_row(row, r->type, d);
        }
        for (int64_t i = 0; i < turned; i++) straight[i] = row[i] * cos[i];
        for (int64_t i = 0; i < half; i++) crossed[i] = -row[half + i] * sin[i];
        for (int64_t i = half; i < turned; i++) crossed[i] = row[i - half] * sin[i];
        round_row(straight, r->type, turned);
        round_row(crossed, r->type, turned);
        for (int64_t i = 0; i < turned; i++) row[i] = straight[i] + crossed[i];
        write_row(row, r->type, to + h * p->y_step[1], d, p->y);
    }
}

static void copy_heads(const Rotation *r, const Part *p, int64_t from, int64_t to) {
    const int64_t bytes = bytes_of(r->type);
    for (int64_t h = 0; h < p->heads; h++)
        memcpy((char *)p->y + (to + h * p->y_step[1]) * bytes, (const char *)p->x + (from + h * p->x_step[1]) * bytes,
               r->columns * bytes);
}

int vbrt_step_rotate(const Rotation *r) {
    float cos[COLUMNS], sin[COLUMNS];
    for (int64_t b = 0; b < r->batch; b++)
        for (int64_t s = 0; s < r->tokens; s++) {
            read_row(r->cos, r->type, b * r->step[0] + s * r->step[1], r->turned, cos);
            read_row(r->sin, r->type, b * r->step[0] + s * r->step[1], r->turned, sin);
            for (const Part *p = r->parts; p < r->parts + r->count; p++) {
                const int64_t from = b * p->x_step[0] + s * p->x_step[2];
                const int64_t to = b * p->y_step[0] + (p->at ? p->at[s] : s) * p->y_step[2];
                if (p->copied) copy_heads(r, p, from, to);
                else rotate_heads(r, p, from, cos, sin, to);
            }
        }
    return 1;
}

/* -- gates -------------------------------------------------------------------------------------------------------- */

enum { NONE, RELU, GELU, GELU_TANH, SILU };

static void activate_row(int function, float *x, int64_t count) {
    if (function == RELU) for (int64_t i = 0; i < count; i++) x[i] = x[i] < 0 ? 0 : x[i];
    if (function == SILU) for (int64_t i = 0; i < count; i++) x[i] = x[i] / (1 + exponential(-x[i]));
    if (function == GELU) for (int64_t i = 0; i < count; i++) x[i] = 0.5f * x[i] * (1 + erff(x[i] * 0.70710678118654752f));
    if (function == GELU_TANH)
        for (int64_t i = 0; i < count; i++) {
            const float z = 0.79788456080286536f * (x[i] + 0.044715f * x[i] * x[i] * x[i]);
            x[i] = x[i] / (1 + exponential(-2 * z));  /* (1 + tanh(z)) / 2 */
        }
}

/* activation(gate) * up for rows [rows, columns] with a pitch. */
typedef struct {
    const void *gate, *up;
    void *y;
    int64_t rows, columns, gate_pitch, up_pitch;
    int32_t type, function;
} Gate;

int vbrt_step_gate(const Gate *g) {
    float gate[PIECE], up[PIECE];
    for (int64_t r = 0; r < g->rows; r++)
        for (int64_t first = 0; first < g->columns; first += PIECE) {
            const int64_t count = at_most(g->columns - first, PIECE);
            read_row(g->gate, g->type, r * g->gate_pitch + first, count, gate);
            read_row(g->up, g->type, r * g->up_pitch + first, count, up);
            activate_row(g->function, gate, count);
            round_row(gate, g->type, count);
            for (int64_t i = 0; i < count; i++) gate[i] *= up[i];
            write_row(gate, g->type, r * g->columns + first, count, g->y);
        }
    return 1;
}

/* -- attention ---------------------------------------------------------------------------------------------------- */

/* q [B, H, S, D], k and v [B, G, L, D]: H is G, or S is 1; y is contiguous. */
typedef struct {
    const void *q, *k, *v;
    void *y;
    const uint8_t *mask;  /* [B, L] with stride `mask_step` in B; NULL: no mask */
    int64_t batch, heads, groups, tokens, keys, columns, mask_step;
    int64_t q_step[3], k_step[3], v_step[3];
    float scale;
    int32_t type, threads, pad;
} Attention;

INLINE float dot(const float *a, const float *b, int64_t d) {
    float lanes[LANES] = {0};
    add_products(a, b, d, lanes);
    return summed(lanes);
}

/* up to KEYS unmasked positions from `*next` on */
INLINE int some_places(const uint8_t *mask, int64_t keys, int64_t *next, int64_t *places) {
    int count = 0;
    int64_t l = *next;
    for (; l < keys && count < KEYS; l++) {
        uint64_t eight;
        if (mask && l + 8 <= keys && (memcpy(&eight, mask + l, 8), !eight)) {
            l += 7;
            continue;
        }
        if (!mask || mask[l]) places[count++] = l;
    }
    *next = l;
    return count;
}

/* queries that share key head g of batch b; online softmax over blocks of KEYS */
static void attend_group(const Attention *a, int64_t b, int64_t g) {
    const int64_t d = a->columns, shared = a->heads / a->groups, rows = shared * a->tokens;
    float q[QUERIES][COLUMNS], sums[QUERIES][COLUMNS], weights[QUERIES][KEYS], one[COLUMNS];
    float largest[QUERIES], total[QUERIES];
    for (int64_t r = 0; r < rows; r++) {
        const int64_t head = g * shared + r / a->tokens, token = r % a->tokens;
        read_row(a->q, a->type, b * a->q_step[0] + head * a->q_step[1] + token * a->q_step[2], d, q[r]);
        for (int64_t i = 0; i < d; i++) q[r][i] *= a->scale, sums[r][i] = 0;
        largest[r] = -INFINITY, total[r] = 0;
    }
    const uint8_t *mask = a->mask ? a->mask + b * a->mask_step : NULL;
    int64_t places[KEYS], next = 0;
    for (int count; (count = some_places(mask, a->keys, &next, places));) {
        for (int j = 0; j < count; j++) {
            read_row(a->k, a->type, b * a->k_step[0] + g * a->k_step[1] + places[j] * a->k_step[2], d, one);
            for (int64_t r = 0; r < rows; r++) weights[r][j] = dot(q[r], one, d);
        }
        for (int64_t r = 0; r < rows; r++) {
            float top = largest[r], more = 0;
            for (int j = 0; j < count; j++) top = weights[r][j] > top ? weights[r][j] : top;
            const float factor = total[r] > 0 ? exponential(largest[r] - top) : 0;
            for (int j = 0; j < count; j++) weights[r][j] = exponential(weights[r][j] - top);
            for (int j = 0; j < count; j++) more += weights[r][j];
            total[r] = total[r] * factor + more, largest[r] = top;
            for (int64_t i = 0; i < d; i++) sums[r][i] *= factor;
        }
        for (int j = 0; j < count; j++) {
            read_row(a->v, a->type, b * a->v_step[0] + g * a->v_step[1] + places[j] * a->v_step[2], d, one);
            for (int64_t r = 0; r < rows; r++)
                for (int64_t i = 0; i < d; i++) sums[r][i] += weights[r][j] * one[i];
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        const int64_t head = g * shared + r / a->tokens;
        const float inverse = total[r] == 0 ? 0 : 1 / total[r];
        for (int64_t i = 0; i < d; i++) sums[r][i] *= inverse;
        write_row(sums[r], a->type, ((b * a->heads + head) * a->tokens + r % a->tokens) * d, d, a->y);
    }
}

#define WORK_OF_A_THREAD (1 << 18)  /* query-key products per thread that make threading worth it */

int vbrt_step_attend(const Attention *a) {
    const int64_t groups = a->batch * a->groups;
    int64_t attended = a->mask ? 0 : a->keys * a->batch;
    if (a->mask)
        for (int64_t b = 0; b < a->batch; b++)
            for (int64_t l = 0; l < a->keys; l++) attended += a->mask[b * a->mask_step + l] != 0;
    const int64_t worth = attended * a->heads * a->tokens * a->columns / WORK_OF_A_THREAD;
    const int threads = worth < 1 ? 1 : (int)at_most(worth, a->threads);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < groups; i++) attend_group(a, i / a->groups, i % a->groups);
    return 1;
}

/* -- small matrices ------------------------------------------------------------------------------------------------- */

/* x [T, K] @ w.T for w [N, K], all contiguous */
typedef struct {
    const void *x, *w;
    void *y;
    int64_t tokens, rows, columns;
    int32_t type, pad;
} Projection;

int vbrt_step_project(const Projection *p) {
    const int64_t k = p->columns;
    float x[PIECE], w[PIECE];
    for (int64_t t = 0; t < p->tokens; t++)
        for (int64_t n = 0; n < p->rows; n++) {
            float lanes[LANES] = {0}, y;
            for (int64_t first = 0; first < k; first += PIECE) {
                const int64_t count = at_most(k - first, PIECE);
                read_row(p->x, p->type, t * k + first, count, x);
                read_row(p->w, p->type, n * k + first, count, w);
                add_products(x, w, count, lanes);
            }
            y = summed(lanes);
            write_row(&y, p->type, t * p->rows + n, 1, p->y);
        }
    return 1;
}

/* -- routers ------------------------------------------------------------------------------------------------------ */

#define EXPERTS 1024
#define CHOSEN 32

/* logits [T, E] with a row pitch -> weights and ids [T, chosen] in descending order, the first among equals. */
typedef struct {
    const void *logits;
    void *weights;
    int64_t *ids;
    int64_t tokens, experts, pitch, chosen;
    int32_t type, weights_type, first, renormalized;  /* first: softmax before top-k, else after */
} Route;

static void choose(float *logits, int64_t experts, int64_t chosen, float *best, int64_t *ids) {
    for (int64_t j = 0; j < chosen; j++) {
        int64_t at = 0;
        for (int64_t e = 1; e < experts; e++) at = logits[e] > logits[at] ? e : at;
        ids[j] = at, best[j] = logits[at], logits[at] = -INFINITY;
    }
}

int vbrt_step_route(const Route *r) {
    float logits[EXPERTS], best[CHOSEN], all[EXPERTS];
    for (int64_t t = 0; t < r->tokens; t++) {
        read_row(r->logits, r->type, t * r->pitch, r->experts, logits);
        memcpy(all, logits, r->experts * sizeof *all);
        choose(logits, r->experts, r->chosen, best, r->ids + t * r->chosen);
        float total = 0, sum = 0;
        for (int64_t e = 0; r->first && e < r->experts; e++) all[e] = exponential(all[e] - best[0]);
        for (int64_t e = 0; r->first && e < r->experts; e++) total += all[e];
        const float top = best[0];
        for (int64_t j = 0; j < r->chosen; j++) best[j] = exponential(best[j] - top);
        for (int64_t j = 0; !r->first && j < r->chosen; j++) total += best[j];
        for (int64_t j = 0; j < r->chosen; j++) best[j] /= total;
        for (int64_t j = 0; j < r->chosen; j++) sum += best[j];
        for (int64_t j = 0; r->renormalized && j < r->chosen; j++) best[j] /= sum;
        write_row(best, r->weights_type, t * r->chosen, r->chosen, r->weights);
    }
    return 1;
}

/* -- programs ----------------------------------------------------------------------------------------------------- */

/* A call on prepared arguments, of this library or of linear.c; it returns 0 if it failed. */
typedef struct {
    int (*function)(const void *);
    const void *with;
} Call;

/* Calls in order; the number of those that did not fail before one that did. */
int64_t vbrt_step_run(const Call *calls, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!calls[i].function(calls[i].with)) return i;
    return count;
}
