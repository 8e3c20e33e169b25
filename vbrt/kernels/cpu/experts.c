/* Products of tokens with routed experts' matrices in 4 or 8 bits, for few tokens per expert: codes are decoded in
 * registers and multiplied there, with the gate as epilogue: by OpenMP's threads, or by a team (team.h) that overlaps
 * with the caller's work. Compiled by build.py.
 * Each result is computed by one thread, in an order that depends on the matrix alone: neither on the number of threads
 * nor on other tokens.
 * Legend: T tokens, k experts per token, P = T k pairs, E experts, N rows, K columns padded to the block.
 */
#include <math.h>
#include "dots.h"
#include "shares.h"
#include "team.h"
#include "tiled.h"
#define CHUNK 32     /* results per work item */
enum { NONE, RELU, RELU2, GELU, GELU_TANH, SILU };

/* One matrix of each expert. */
typedef struct {
    const uint8_t *const *pages;  /* [E] */
    const float *levels, *values;  /* [E or 1, 16], [256]; values for byte scales only */
    int64_t level_step;  /* 16 if each expert has its own levels, else 0 */
    int64_t codes, scales, unit;  /* offsets in a page, in bytes; unit: -1 if it is 1 */
    int64_t experts, rows, columns, block, scale_type, bits;
    int64_t tiled;  /* codes are in tile order, with interleaved scales */
} Bank;

typedef struct {
    int32_t function, gated, interleaved, sigmoid;  /* sigmoid: alpha is not 1 */
    float alpha, limit, shift;  /* limit: infinite for none */
} Gate;

/* Operands and results of a product: rows of one type each. */
typedef struct {
    const int64_t *ids;  /* [P] */
    int64_t pairs, pairs_per_row;  /* row of x = pair / pairs_per_row */
    int64_t most;  /* experts with more pairs are left to the caller */
    const void *x, *bias;  /* [rows, inputs], [E, N] or NULL */
    void *out;  /* [P, results] */
    int64_t inputs;  /* K without padding */
    int32_t x_type, bias_type, out_type, rounded;  /* rounded: x may be quantized to int8 */
} Task;

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

/* Pairs of one expert: order[first] to order[first + count - 1]. */
typedef struct { int64_t expert, first, count; } Group;

/* Tables of one expert's matrix. */
typedef struct { Dots dots; Scales scales; } Tables;

typedef struct {
    char *x;  /* rows in spans */
    int64_t pitch;  /* bytes of a row */
    int form;  /* layout of x */
    int64_t *order;  /* pairs by expert, ascending within each */
    Group *groups;
    Tables *tables;  /* by group; not used for tiles */
    int64_t count;  /* number of groups */
    int64_t chunks;  /* work items per group */
} Plan;

static void *taken(char **memory, int64_t bytes) {
    void *here = *memory;
    *memory += (bytes + 63) / 64 * 64;
    return here;
}

/* Sort the pairs of experts that have a page, by counting. */
static void sort_pairs(const Bank *b, const Task *t, Plan *plan, int64_t *starts) {
    memset(starts, 0, (b->experts + 1) * sizeof *starts);
    for (int64_t p = 0; p < t->pairs; p++)
        if (t->ids[p] >= 0 && t->ids[p] < b->experts && b->pages[t->ids[p]]) starts[t->ids[p] + 1]++;
    plan->count = 0;
    for (int64_t e = 0; e < b->experts; e++) {
        const int64_t count = starts[e + 1];
        if (count && count <= t->most) plan->groups[plan->count++] = (Group){e, starts[e], count};
        starts[e + 1] += starts[e];
    }
    for (int64_t p = 0; p < t->pairs; p++)
        if (t->ids[p] >= 0 && t->ids[p] < b->experts && b->pages[t->ids[p]]) plan->order[starts[t->ids[p]]++] = p;
}

/* convert row r of x to the layout of the products */
static void spread(const Bank *b, const Task *t, const Plan *plan, int64_t r) {
#ifdef TILED
    if (b->tiled) {
        spread_tiles(t->x, t->x_type, r * t->inputs, t->inputs, tiles_across(b->columns), plan->x + r * plan->pitch);
        return;
    }
#endif
    spread_row(t->x, t->x_type, r * t->inputs, t->inputs, b->columns, plan->form, plan->x + r * plan->pitch);
}

static void fill_tables(const Bank *b, const Plan *plan) {
    for (int64_t i = 0; i < plan->count && !b->tiled; i++) {
        const int64_t expert = plan->groups[i].expert;
        float unit = 1;
        if (b->unit >= 0) memcpy(&unit, b->pages[expert] + b->unit, 4);
        Tables *of = plan->tables + i;
        of->dots = dots_with(b->levels + b->level_step * expert, b->values, unit, b->scale_type, b->block, plan->form,
                             &of->scales);
        of->dots.columns = b->columns;
    }
}

static int64_t most_groups(const Bank *b, const Task *t) { return t->pairs < b->experts ? t->pairs : b->experts; }

/* Bytes of a row of x in the layout of the products. */
static int64_t x_bytes(const Bank *b) {
#ifdef TILED
    if (b->tiled) return tiled_row_bytes(b->columns);
#endif
    return row_bytes(b->columns);
}

/* Bytes of a plan. */
static int64_t plan_bytes(const Bank *b, const Task *t) {
    return t->pairs / t->pairs_per_row * x_bytes(b) + t->pairs * 8 + (b->experts + 1) * 8 +
           most_groups(b, t) * (sizeof(Group) + sizeof(Tables)) + 6 * 64;
}

/* All of a plan except the rows of x; `memory` is cache-line aligned. */
static Plan planned(const Bank *b, const Gate *g, const Task *t, char **memory) {
    const int64_t pitch = x_bytes(b), most = most_groups(b, t);
    const int64_t results = g->gated ? b->rows / 2 : b->rows, at_once = b->tiled ? TILE_ROWS : CHUNK;
    Plan plan = {.x = taken(memory, t->pairs / t->pairs_per_row * pitch), .pitch = pitch};
    plan.form = form_of(b->levels, b->level_step ? 16 * b->experts : 16, b->bits, t->x_type, t->rounded);
    plan.order = taken(memory, t->pairs * 8);
    plan.groups = taken(memory, most * sizeof(Group));
    plan.tables = taken(memory, most * sizeof(Tables));
    plan.chunks = (results + at_once - 1) / at_once;
    sort_pairs(b, t, &plan, taken(memory, (b->experts + 1) * 8));
    fill_tables(b, &plan);
    return plan;
}

/* results first to last - 1 for the pairs of a group */
static void multiply(const Bank *b, const Gate *g, const Task *t, const Plan *plan, const Group *group, int64_t first,
                     int64_t last) {
    const uint8_t *page = b->pages[group->expert];
    const int pair_of_rows = g->gated;  /* a gate and its value */
    const int64_t half = b->rows / 2, results = pair_of_rows ? half : b->rows;
    float sums[2 * TOKENS];
    Dots d = plan->tables[group - plan->groups].dots;
    for (int64_t n = first; n < last; n += pair_of_rows ? 1 : 2) {
        const int count = pair_of_rows || n + 1 < last ? 2 : 1;
        const int64_t row[2] = {pair_of_rows && g->interleaved ? 2 * n : n,
                                !pair_of_rows ? n + count - 1 : g->interleaved ? 2 * n + 1 : n + half};
        float bias[2] = {0, 0};
        for (int r = 0; r < 2; r++) {
            d.codes[r] = page + b->codes + row[r] * code_bytes(b->columns, b->bits);
            d.scales[r] = page + b->scales + row[r] * (b->columns / b->block) * SCALE_BYTES[b->scale_type];
            if (t->bias) bias[r] = load(t->bias, t->bias_type, group->expert * b->rows + row[r]);
        }
        for (int64_t i = 0; i < group->count;) {
            const int64_t left = group->count - i, *pairs = plan->order + group->first + i;
            const int tokens = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            for (int m = 0; m < tokens; m++) d.x[m] = plan->x + pairs[m] / t->pairs_per_row * plan->pitch;
            dots_of_tokens(&d, 2, tokens, sums);  /* a single last row is computed twice */
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

#ifdef TILED
/* 16 results for the pairs of a group, from 16 `item` on; those beyond the last are dropped. A gate and its value are
 * in the same row of tiles, or half of all rows apart, which is whole rows of tiles. */
static void multiply_tiles(const Bank *b, const Gate *g, const Task *t, const Plan *plan, const Group *group, int64_t item) {
    const uint8_t *page = b->pages[group->expert], *tiles = page + b->codes;
    const int64_t across = tiles_across(b->columns), pitch = across * tile_bytes(b->block), half = b->rows / 2;
    const int64_t results = g->gated ? half : b->rows, first = item * TILE_ROWS;
    const int count = results - first < TILE_ROWS ? (int)(results - first) : TILE_ROWS;
    const int64_t row[2] = {g->gated && g->interleaved ? 2 * item : item,
                            !g->gated ? item : g->interleaved ? 2 * item + 1 : item + half / TILE_ROWS};
    const int64_t step = g->gated && g->interleaved ? 2 : 1, apart = step == 2 ? 1 : TILE_ROWS;
    float unit, sums[2 * TILE_ROWS * TOKENS];
    memcpy(&unit, page + b->unit, 4);
    for (int64_t i = 0; i < group->count;) {
        const int64_t left = group->count - i, *pairs = plan->order + group->first + i;
        const int tokens = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        const char *x[TOKENS];
        for (int m = 0; m < tokens; m++) x[m] = plan->x + pairs[m] / t->pairs_per_row * plan->pitch;
        for (int r = 0; r < (g->gated && row[1] * TILE_ROWS < b->rows ? 2 : 1); r++)
            dots_of_tile_row(tiles + row[r] * pitch, across, b->block, x, t->x_type, tokens, unit,
                             sums + r * TILE_ROWS * TOKENS);
        for (int m = 0; m < tokens; m++)
            for (int n = 0; n < count; n++) {
                const float *one = sums + n * step * TOKENS + m;
                const int64_t at = pairs[m] * results + first + n, of_gate = (first + n) * step;
                const int64_t of_value = step == 2 ? of_gate + 1 : of_gate + half;
                float sum[2] = {*one, g->gated ? one[apart * TOKENS] : 0};
                if (t->bias) {
                    const int64_t head = group->expert * b->rows;
                    sum[0] += load(t->bias, t->bias_type, head + of_gate);
                    if (g->gated) sum[1] += load(t->bias, t->bias_type, head + of_value);
                }
                store(t->out, t->out_type, at, g->gated ? gated(g, sum[0], sum[1]) : function(g->function, sum[0]));
            }
        i += tokens;
    }
}
#endif

/* One work item: item i of `count` times `chunks`. */
static void multiply_item(const Bank *b, const Gate *g, const Task *t, const Plan *plan, int64_t i) {
    const Group *group = plan->groups + i / plan->chunks;
    const int64_t results = g->gated ? b->rows / 2 : b->rows;
#ifdef TILED
    if (b->tiled) {
        multiply_tiles(b, g, t, plan, group, i % plan->chunks);
        return;
    }
#endif
    const int64_t first = i % plan->chunks * CHUNK, end = first + CHUNK;
    multiply(b, g, t, plan, group, first, end < results ? end : results);
}

/* Returns 0 if out of memory. Does not write rows of sentinels, of experts without a page, and of those with more than
 * `most` pairs. */
int vbrt_experts_product(const Bank *b, const Gate *g, const Task *t, int threads) {
    char *memory = malloc(plan_bytes(b, t)), *at = (char *)(((uintptr_t)memory + 63) / 64 * 64);
    if (!memory) return 0;
    const Plan plan = planned(b, g, t, &at);
    for (int64_t r = 0; r < t->pairs / t->pairs_per_row; r++) spread(b, t, &plan, r);
    Range ranges[threads];
    share_out(ranges, threads, plan.count * plan.chunks);
#pragma omp parallel num_threads(threads)
    {
        Taker mine = taker(ranges, threads);
        for (int64_t i; (i = take(&mine)) >= 0;) multiply_item(b, g, t, &plan, i);
    }
    free(memory);
    return 1;
}

/* -- both products, by a team --------------------------------------------------------------------------------------- */

/* W_down g(W_up x) of some pairs. An expert's second product starts when its first one is done, independently of
 * others. */
typedef struct {
    Bank up_bank, down_bank;
    Gate up_gate, down_gate;
    Task up_task, down_task;
    Plan up, down;
    Range *up_ranges, *down_ranges;  /* by place */
    int64_t *up_left, *waits;  /* by group: unfinished items of "up"; 1 until "down" may start */
} Job;

static void take_part(Team *t, int place) {
    Job *j = t->memory;
    Taker up = {j->up_ranges, (int)t->places, place, 0}, down = {j->down_ranges, (int)t->places, place, 0};
    for (int64_t i; (i = take(&up)) >= 0;) {
        const int64_t group = i / j->up.chunks;
        multiply_item(&j->up_bank, &j->up_gate, &j->up_task, &j->up, i);
        if (__atomic_sub_fetch(&j->up_left[group], 1, __ATOMIC_ACQ_REL)) continue;
        const Group *of = j->down.groups + group;
        for (int64_t p = 0; p < of->count; p++) spread(&j->down_bank, &j->down_task, &j->down, j->down.order[of->first + p]);
        __atomic_store_n(&j->waits[group], 0, __ATOMIC_RELEASE);
    }
    for (int64_t i; (i = take(&down)) >= 0;) {
        spin_while(&j->waits[i / j->down.chunks], 1);
        multiply_item(&j->down_bank, &j->down_gate, &j->down_task, &j->down, i);
        tick(t);
    }
}

/* Start W_down g(W_up x) for the pairs whose experts have pages; rows of others are zeroed. `down` has the ids of `up`,
 * one input row per pair, and no x. Returns the job's number, or 0 if out of memory. */
int64_t vbrt_team_experts(Team *t, const Bank *up_bank, const Bank *down_bank, const Gate *gate, const Task *up, const Task *down) {
    static const Gate none;
    const int64_t pairs = up->pairs, groups = most_groups(up_bank, up), h_bytes = pairs * down->inputs * 4;
    const int64_t wanted = sizeof(Job) + plan_bytes(up_bank, up) + plan_bytes(down_bank, down) + h_bytes +
                           2 * t->places * sizeof(Range) + 2 * groups * 8 + 8 * 64;
    int64_t number = 0;
    pthread_mutex_lock(&t->posting);
    Job *j = job_memory(t, wanted);
    if (j) {
        char *at = (char *)j;
        taken(&at, sizeof(Job));
        *j = (Job){*up_bank, *down_bank, *gate, none, *up, *down};
        j->up_task.out = taken(&at, h_bytes), j->down_task.x = j->up_task.out;
        j->up = planned(&j->up_bank, &j->up_gate, &j->up_task, &at);
        j->down = planned(&j->down_bank, &j->down_gate, &j->down_task, &at);
        j->up_ranges = taken(&at, t->places * sizeof(Range)), j->down_ranges = taken(&at, t->places * sizeof(Range));
        j->up_left = taken(&at, groups * 8), j->waits = taken(&at, groups * 8);
        for (int64_t i = 0; i < j->up.count; i++) j->up_left[i] = j->up.chunks, j->waits[i] = 1;
        share_out(j->up_ranges, (int)t->places, j->up.count * j->up.chunks);
        share_out(j->down_ranges, (int)t->places, j->down.count * j->down.chunks);
        for (int64_t r = 0; r < pairs / up->pairs_per_row; r++) spread(&j->up_bank, &j->up_task, &j->up, r);
        memset(down->out, 0, pairs * down_bank->rows * (down->out_type == FP32 ? 4 : 2));
        number = open_job(t, j->down.count * j->down.chunks);
    }
    pthread_mutex_unlock(&t->posting);
    return number;
}

#define PART 256  /* results per work item */

INLINE void sum_part(const void *rows, int type, const int64_t *ids, const float *weights, int64_t experts, int64_t k,
                     int64_t n, int64_t count, float *sum) {
    for (int64_t j = 0; j < k; j++) {
        if (ids[j] < 0 || ids[j] >= experts) continue;
        for (int64_t c = 0; c < count; c++) sum[c] += weights[j] * load(rows, type, j * n + c);
    }
}

/* out [T, N] = sum over j of weights[t, j] * rows[t k + j], in the order of j; ids outside 0 .. experts - 1 are
 * skipped; shape is T, k, N; rows and out have the same type */
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

/* Whether x of a type can be multiplied by pages in tile order directly. */
int vbrt_experts_tiles(int x_type) {
#ifdef TILED
    return tiles_take(x_type);
#else
    return 0;
#endif
}

/* maximum pairs of an expert for which vbrt_experts_product beats decoding and a matmul */
int vbrt_experts_most(void) {
#if defined(WIDE) || defined(AVX2)
    return 16;
#else
    return 4;
#endif
}
