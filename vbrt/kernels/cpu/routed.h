/* Both products of routed experts, W_down g(W_up x), as work items of a team's threads. An expert's second product
 * starts when its first one is done, independently of others. Needs banks.h, shares.h and team.h. */
typedef struct {
    Bank up_bank, down_bank;
    Gate up_gate, down_gate;
    Task up_task, down_task;
    Plan up, down;
    Range *up_ranges, *down_ranges;  /* by thread */
    int64_t *up_left, *waits;  /* by group: unfinished items of "up"; 1 until "down" may start */
    int64_t *down_left;  /* by chunk of results: groups whose rows are unfinished */
    int threads;
} Routed;

/* Bytes of a job, itself included. */
static int64_t routed_bytes(const Bank *up_bank, const Bank *down_bank, const Task *up, const Task *down, int threads) {
    const int64_t groups = most_groups(up_bank, up), chunks = (down_bank->rows + 1) / 2;
    return sizeof(Routed) + plan_bytes(up_bank, up) + plan_bytes(down_bank, down) + up->pairs * down->inputs * 4 +
           2 * threads * sizeof(Range) + (2 * groups + chunks) * 8 + 10 * 64;
}

/* Make a job ready for threads; `at`: memory behind it. `down` has the ids of `up`, one input row per pair, and no x. */
static void prepare_routed(Routed *j, char *at, int64_t chunk) {
    const int64_t pairs = j->up_task.pairs;
    j->up_task.out = taken(&at, pairs * j->down_task.inputs * 4), j->down_task.x = j->up_task.out;
    j->up = planned(&j->up_bank, &j->up_gate, &j->up_task, chunk, &at);
    j->down = planned(&j->down_bank, &j->down_gate, &j->down_task, chunk, &at);
    j->up_ranges = taken(&at, j->threads * sizeof(Range)), j->down_ranges = taken(&at, j->threads * sizeof(Range));
    j->up_left = taken(&at, j->up.count * 8), j->waits = taken(&at, j->up.count * 8);
    j->down_left = taken(&at, j->down.chunks * 8);
    for (int64_t i = 0; i < j->up.count; i++) j->up_left[i] = j->up.chunks, j->waits[i] = 1;
    for (int64_t i = 0; i < j->down.chunks; i++) j->down_left[i] = j->down.count;
    share_out(j->up_ranges, j->threads, j->up.count * j->up.chunks);
    share_out(j->down_ranges, j->threads, j->down.count * j->down.chunks);
    for (int64_t r = 0; r < pairs / j->up_task.pairs_per_row; r++) spread(&j->up_bank, &j->up_task, &j->up, r);
}

static int64_t routed_items(const Routed *j) { return j->down.count * j->down.chunks; }

/* Take items until none is left; `thread` is the caller's index. After the last expert's, `sum_chunk` takes results
 * first to end - 1 of all rows. */
static void take_routed(Team *t, Routed *j, int thread, void (*sum_chunk)(const Routed *, int64_t first, int64_t end)) {
    Taker up = {j->up_ranges, j->threads, thread, 0}, down = {j->down_ranges, j->threads, thread, 0};
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
        const int64_t chunk = i % j->down.chunks, first = chunk * j->down.chunk, end = first + j->down.chunk;
        if (sum_chunk && !__atomic_sub_fetch(&j->down_left[chunk], 1, __ATOMIC_ACQ_REL))
            sum_chunk(j, first, end < j->down_bank.rows ? end : j->down_bank.rows);
        tick(t, 1);
    }
}
