/* Products of tokens with routed experts' matrices, for few tokens per expert (banks.h): by OpenMP's threads, or by a
 * team (team.h) that overlaps with the caller's work. Compiled by build.py.
 */
#include "banks.h"
#include "shares.h"
#include "team.h"
#include "routed.h"
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

static void take_part(Team *t, int place) { take_routed(t, t->memory, place, NULL); }

/* Start W_down g(W_up x) for the pairs whose experts have pages; rows of others are zeroed. `down` has the ids of `up`,
 * one input row per pair, and no x. Returns the job's number, or 0 if out of memory. */
int64_t vbrt_team_experts(Team *t, const Bank *up_bank, const Bank *down_bank, const Gate *gate, const Task *up, const Task *down) {
    static const Gate none;
    int64_t number = 0;
    pthread_mutex_lock(&t->posting);
    Routed *j = job_memory(t, routed_bytes(up_bank, down_bank, up, down, (int)t->places));
    if (j) {
        char *at = (char *)j;
        taken(&at, sizeof *j);
        *j = (Routed){*up_bank, *down_bank, *gate, none, *up, *down, .threads = (int)t->places};
        prepare_routed(j, at, CHUNK);
        memset(down->out, 0, up->pairs * down_bank->rows * (down->out_type == FP32 ? 4 : 2));
        number = open_job(t, routed_items(j));
    }
    pthread_mutex_unlock(&t->posting);
    return number;
}

#define PART 256  /* results per work item */

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
