/* Products of a few tokens with matrices of banks: pages of the same form, of which each token takes some. Codes of 4
 * or 8 bits are decoded in registers and multiplied there, with the gate as epilogue.
 * A result is computed by one thread, in an order that depends on the matrix alone: neither on work items nor on other
 * tokens.
 * Legend: T tokens, k experts per token, P = T k pairs, E experts, N rows, K columns padded to the block.
 */
#include <math.h>
#include "dots.h"
#include "tiled.h"
enum { NONE, RELU, RELU2, GELU, GELU_TANH, SILU };

/* One matrix of each expert. */
typedef struct {
    const uint8_t *const *pages;  /* [E] */
    const float *levels, *values;  /* [E or 1, 16], [256]; values for byte scales only */
    int64_t level_step;  /* 16 if each expert has its own levels, else 0 */
    int64_t codes, scales, offsets, d, dmin, unit;  /* offsets in a page, in bytes; unit: -1 if it is 1 */
    int64_t experts, rows, columns, block, scale_type, offset_type, bits, coding;
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
    int64_t chunk, chunks;  /* results per work item, work items per group */
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

/* Columns per sum of x that products need; 0: none. */
static int64_t summed(const Bank *b) { return b->offset_type && b->coding == LEVELS ? b->block : 0; }

/* convert row r of x to the layout of the products */
static void spread(const Bank *b, const Task *t, const Plan *plan, int64_t r) {
#ifdef TILED
    if (b->tiled) {
        spread_tiles(t->x, t->x_type, r * t->inputs, t->inputs, tiles_across(b->columns), plan->x + r * plan->pitch);
        return;
    }
#endif
    spread_row(t->x, t->x_type, r * t->inputs, t->inputs, b->columns, plan->form, summed(b),
               plan->x + r * plan->pitch);
}

static void fill_tables(const Bank *b, const Plan *plan) {
    for (int64_t i = 0; i < plan->count && !b->tiled; i++) {
        const int64_t expert = plan->groups[i].expert;
        float unit = 1;
        if (b->unit >= 0) memcpy(&unit, b->pages[expert] + b->unit, 4);
        Tables *of = plan->tables + i;
        of->dots = dots_with(b->levels + b->level_step * expert, b->values, unit, b->scale_type, b->offset_type, b->coding, b->block,
                             b->columns, plan->form, &of->scales);
    }
}

static int64_t most_groups(const Bank *b, const Task *t) { return t->pairs < b->experts ? t->pairs : b->experts; }

/* Bytes of a row of x in the layout of the products. */
static int64_t x_bytes(const Bank *b) {
#ifdef TILED
    if (b->tiled) return tiled_row_bytes(b->columns);
#endif
    return row_bytes(b->columns, summed(b));
}

/* Bytes of a plan. */
static int64_t plan_bytes(const Bank *b, const Task *t) {
    return t->pairs / t->pairs_per_row * x_bytes(b) + t->pairs * 8 + (b->experts + 1) * 8 +
           most_groups(b, t) * (sizeof(Group) + sizeof(Tables)) + 6 * 64;
}

/* All of a plan except the rows of x; `memory` is cache-line aligned.
 * chunk: results per work item, an even number; of pages in tile order, items are rows of tiles. */
static Plan planned(const Bank *b, const Gate *g, const Task *t, int64_t chunk, char **memory) {
    const int64_t pitch = x_bytes(b), most = most_groups(b, t);
    const int64_t results = g->gated ? b->rows / 2 : b->rows;
    Plan plan = {.x = taken(memory, t->pairs / t->pairs_per_row * pitch), .pitch = pitch, .chunk = b->tiled ? TILE_ROWS : chunk};
    plan.form = form_of(b->levels, b->level_step ? 16 * b->experts : 16, b->coding, t->x_type, t->rounded);
    plan.order = taken(memory, t->pairs * 8);
    plan.groups = taken(memory, most * sizeof(Group));
    plan.tables = taken(memory, most * sizeof(Tables));
    plan.chunks = (results + plan.chunk - 1) / plan.chunk;
    sort_pairs(b, t, &plan, taken(memory, (b->experts + 1) * 8));
    fill_tables(b, &plan);
    return plan;
}

/* results first to last - 1 for the pairs of a group */
static void multiply(const Bank *b, const Gate *g, const Task *t, const Plan *plan, const Group *group, int64_t first,
                     int64_t last) {
    const uint8_t *page = b->pages[group->expert];
    const Row plane = {page + b->codes, page + b->scales, page + b->offsets, page + b->d, page + b->dmin};
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
            d.row[r] = row_at(plane, row[r], b->columns, b->block, b->bits, (int)b->scale_type, (int)b->offset_type);
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
    const int64_t first = i % plan->chunks * plan->chunk, end = first + plan->chunk;
    multiply(b, g, t, plan, group, first, end < results ? end : results);
}

/* -- weighted sums -------------------------------------------------------------------------------------------------- */

/* sum [count] += weights[j] * row j of some rows of n numbers, in the order of j; ids of no expert are skipped. */
INLINE void sum_part(const void *rows, int type, const int64_t *ids, const float *weights, int64_t experts, int64_t k,
                     int64_t n, int64_t count, float *sum) {
    for (int64_t j = 0; j < k; j++) {
        if (ids[j] < 0 || ids[j] >= experts) continue;
        for (int64_t c = 0; c < count; c++) sum[c] += weights[j] * load(rows, type, j * n + c);
    }
}
