/* Products of tokens with routed experts' matrices, for few tokens per expert (banks.h): by OpenMP's threads, or by a
 * team (team.h) that overlaps with the caller's work. Compiled by build.py.
 */
#include "banks.h"
#include "shares.h"
#include "team.h"
#define CHUNK 32  /* results per work item */

/* Returns 0 if out of memory. Does not write rows of sentinels, of experts without a page, and of those with more than
 * `most` pairs. */
int vbrt_experts_product(const Bank *b, const Gate *g, const Task *t, int threads) {
    char *memory = malloc(plan_bytes(b, t)), *at = (char *)(((uintptr_t)memory + 63) / 64 * 64);
    if (!memory) return 0;
    const Plan plan = planned(b, g, t, CHUNK, &at);
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
        tick(t, 1);
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
        j->up = planned(&j->up_bank, &j->up_gate, &j->up_task, CHUNK, &at);
        j->down = planned(&j->down_bank, &j->down_gate, &j->down_task, CHUNK, &at);
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
