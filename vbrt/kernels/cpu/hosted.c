/* Products with weights where they lie in host memory, asked for by a device through mailboxes in page-locked memory.
 * A step that runs on the device, recorded or not, writes its inputs and a post; threads of a team (team.h) that poll
 * the mailboxes compute the products, and answer. Neither side runs Python. Compiled by build.py.
 *
 * A mailbox has one cache line per word, as each has one writer:
 *
 *     0    post      device: number << 16 | entry, after x
 *     64   answer    host: the number, after y; -number if nothing was computed
 *     128  gave up   device: a post that nobody waits for anymore
 *     192  x         device: [tokens, K], then, where the entry has it: y of each part, [tokens, N]
 *
 * An entry is a job prepared once: parts, which are products of one x with a page each; or a layer of routed experts,
 * of which a post names some, with ids int64 and weights fp32 [tokens, k] behind x, for one y in fp32. A post of the
 * entry NOTHING has no job and no answer.
 * One thread at a time holds `busy`: it serves a post or changes the boxes. The others see the open job.
 */
#define POLLED
#include "banks.h"
#include "shares.h"
#include "team.h"
#include "routed.h"
enum { POST = 0, ANSWER = 64, GAVE_UP = 128, ENTRY_BITS = 16, NOTHING = (1 << ENTRY_BITS) - 1 };
#define BOXES 64
#define FORGOTTEN_NS 30000000000  /* after so long without a post, none is expected */
#define FULLEST 32   /* rows per work item, if that makes enough items */
#define LEAST 4
#define ITEMS 16     /* per thread: the last ones of a job leave threads idle for half an item */

typedef struct {
    Bank bank;
    Task task;
    Plan plan;
    int64_t first, end;  /* work items */
    int same;  /* x is that of the part before, in the same form */
} Part;

/* Routed experts of an entry, prepared anew for each post. */
typedef struct {
    Routed both;  /* first: sums are of one */
    int64_t *ids;  /* copies: those of a device that has given up may change */
    float *weights;
    const int64_t *posted_ids;  /* in the mailbox, as the next two */
    const float *posted_weights;
    float *y;
    int64_t chunk;
    char *room;  /* of the job */
} Experts;

typedef struct {
    Experts *experts;  /* NULL: parts */
    Range *ranges;  /* by thread */
    int64_t items, parts;
    Part part[];
} Job;

typedef struct {
    _Alignas(64) char *memory;  /* NULL: not attached */
    int64_t last;  /* number of the last post that was taken */
    int64_t passed, expected, computed, failed;
    Job **jobs;  /* by entry */
    int64_t entries;
} Box;

typedef struct { _Alignas(64) int64_t busy; } Look;  /* a thread reads mailboxes without the lock */

typedef struct {
    _Alignas(64) int64_t busy;
    _Alignas(64) int64_t used;  /* boxes below may be attached */
    int64_t first;  /* box looked at first: the one after the last that was served */
    int64_t heard_ns;  /* last post, or expectation */
    Job *job;
    Box box[BOXES];
    Look looks[];  /* by place */
} Boxes;

static int64_t word(const char *memory, int at) { return __atomic_load_n((int64_t *)(memory + at), __ATOMIC_ACQUIRE); }

static const char *memory_of(const Box *b) { return __atomic_load_n(&b->memory, __ATOMIC_SEQ_CST); }

static int is_new(const Box *b) {
    const char *memory = memory_of(b);
    return memory && word(memory, POST) >> ENTRY_BITS != __atomic_load_n(&b->last, __ATOMIC_RELAXED);
}

static int try_lock(Boxes *o) {
    return !__atomic_load_n(&o->busy, __ATOMIC_RELAXED) && !__atomic_exchange_n(&o->busy, 1, __ATOMIC_ACQUIRE);
}

static void unlock(Boxes *o) { __atomic_store_n(&o->busy, 0, __ATOMIC_RELEASE); }

/* Wait until no thread serves, and none is still inside a job that is done. */
static Boxes *lock(Team *t) {
    Boxes *o = t->memory;
    for (int64_t i = 1; !try_lock(o); i++) spin(i);
    close_job(t);
    return o;
}

static int found(Team *t, int place) {
    Boxes *o = t->memory;
    if (__atomic_load_n(&o->busy, __ATOMIC_RELAXED)) return 0;
    int some = 0;
    __atomic_store_n(&o->looks[place].busy, 1, __ATOMIC_SEQ_CST);
    for (int64_t i = 0; i < __atomic_load_n(&o->used, __ATOMIC_RELAXED) && !some; i++) some = is_new(o->box + i);
    __atomic_store_n(&o->looks[place].busy, 0, __ATOMIC_RELEASE);
    return some;
}

/* -- products ------------------------------------------------------------------------------------------------------ */

static void sum_chunk(const Routed *j, int64_t first, int64_t end) {
    const Experts *e = (const Experts *)j;
    const int64_t k = j->up_task.pairs_per_row, n = j->down_bank.rows, count = end - first;
    for (int64_t t = 0; t < j->up_task.pairs / k; t++) {
        float sum[FULLEST] = {0};
        sum_part((float *)j->down_task.out + t * k * n + first, FP32, e->ids + t * k, e->weights + t * k,
                 j->down_bank.experts, k, n, count, sum);
        memcpy(e->y + t * n + first, sum, count * 4);
    }
}

static int64_t prepare_experts(Experts *e) {
    const int64_t pairs = e->both.up_task.pairs, tokens = pairs / e->both.up_task.pairs_per_row;
    memcpy(e->ids, e->posted_ids, pairs * 8), memcpy(e->weights, e->posted_weights, pairs * 4);
    prepare_routed(&e->both, e->room, e->chunk);
    if (!routed_items(&e->both)) memset(e->y, 0, tokens * e->both.down_bank.rows * 4);
    return routed_items(&e->both);
}

static void take_part(Team *t, int place) {
    static const Gate none;
    const Job *j = ((Boxes *)t->memory)->job;
    const int threads = (int)t->places - 1, thread = (place + threads - 1) % threads;  /* place 0 is that of `finish` */
    if (j->experts) {
        take_routed(t, &j->experts->both, thread, sum_chunk);
        return;
    }
    Taker mine = {j->ranges, threads, thread, 0};
    int64_t done = 0;
    for (int64_t i; (i = take(&mine)) >= 0; done++) {
        const Part *p = j->part;
        while (i >= p->end) p++;
        multiply_item(&p->bank, &none, &p->task, &p->plan, i - p->first);
    }
    if (done) tick(t, done);
}

static int64_t compute_job(Team *t, Boxes *o, Job *j, int place) {
    close_job(t);
    o->job = j;
    if (j->experts) j->items = prepare_experts(j->experts);
    else share_out(j->ranges, (int)t->places - 1, j->items);
    for (const Part *p = j->part; p < j->part + j->parts; p++)
        for (int64_t r = 0; r < p->task.pairs && !p->same; r++) spread(&p->bank, &p->task, &p->plan, r);
    __atomic_store_n(&t->fetched, t->number + 1, __ATOMIC_RELEASE);  /* this thread does: nobody else looks after it */
    const int64_t number = open_job(t, j->items);
    take_part(t, place);
    spin_while(&t->done_ns, 0);
    return number;
}

static void answer(Box *b, int64_t number, int computed) {
    __atomic_add_fetch(computed ? &b->computed : &b->failed, 1, __ATOMIC_RELAXED);
    __atomic_store_n((int64_t *)(b->memory + ANSWER), computed ? number : -number, __ATOMIC_RELEASE);
}

/* Take the box's post, if it has one: its job, NULL where there is none. */
static Job *taken_post(Box *b, int64_t *number, int64_t *entry) {
    const int64_t post = word(b->memory, POST);
    *entry = post & NOTHING, *number = post >> ENTRY_BITS;
    const int64_t since = *number - b->last;  /* posts, with those that were replaced unseen */
    __atomic_add_fetch(&b->passed, since > 0 ? since : 1, __ATOMIC_SEQ_CST);
    __atomic_store_n(&b->last, *number, __ATOMIC_RELAXED);
    return *entry < b->entries && word(b->memory, GAVE_UP) >> ENTRY_BITS != *number ? b->jobs[*entry] : NULL;
}

static int64_t run_found(Team *t, int place) {
    Boxes *o = t->memory;
    int64_t job = 0;
    if (!found(t, place) || !try_lock(o)) return 0;
    for (int64_t i = 0; i < o->used && !job; i++) {
        const int64_t at = (o->first + i) % o->used;
        Box *b = o->box + at;
        int64_t number, entry;
        if (!is_new(b)) continue;
        Job *j = taken_post(b, &number, &entry);
        if (j) job = compute_job(t, o, j, place), o->first = at + 1;
        if (entry != NOTHING) answer(b, number, j != NULL);
        __atomic_store_n(&o->heard_ns, now_ns(), __ATOMIC_RELAXED);
    }
    unlock(o);
    return job;
}

/* Memory for a job of products, and the job in it. Tasks: ids are zeros, one pair per row.
 * memory: aligned to cache lines; NULL to learn its size. */
int64_t vbrt_hosted_job(const Bank *banks, const Task *tasks, int64_t parts, int threads, char *memory) {
    static const Gate none;
    int64_t bytes = sizeof(Job) + parts * sizeof(Part) + threads * sizeof(Range) + 2 * 64, rows = 0, chunk = FULLEST;
    for (int64_t i = 0; i < parts; i++) bytes += plan_bytes(banks + i, tasks + i), rows += banks[i].rows;
    if (!memory) return bytes;
    while (chunk > LEAST && rows < chunk * ITEMS * threads) chunk /= 2;
    Job *j = taken(&memory, sizeof(Job) + parts * sizeof(Part));
    *j = (Job){.ranges = taken(&memory, threads * sizeof(Range)), .parts = parts};
    for (int64_t i = 0; i < parts; i++) {
        Part *p = j->part + i;
        *p = (Part){.bank = banks[i], .task = tasks[i], .first = j->items};
        p->plan = planned(&p->bank, &none, &p->task, chunk, &memory);
        p->end = j->items += p->plan.count * p->plan.chunks;
        p->same = i && p->plan.form == p[-1].plan.form && p->bank.tiled == p[-1].bank.tiled &&
                  p->bank.columns == p[-1].bank.columns && p->task.rounded == p[-1].task.rounded &&
                  summed(&p->bank) == summed(&p[-1].bank);
        if (p->same) p->plan.x = p[-1].plan.x;
    }
    return bytes;
}

/* `vbrt_hosted_job` of routed experts. Tasks: `up` has x and posted ids in the mailbox, one row of x for its pairs of a
 * token; `down` has no x, one row per pair, and y [tokens, N] in fp32 as its results. weights: as posted. */
int64_t vbrt_hosted_experts(const Bank *up_bank, const Bank *down_bank, const Gate *gate, const Task *up, const Task *down,
                            const float *weights, int threads, char *memory) {
    static const Gate none;
    const int64_t pairs = up->pairs, rows = down_bank->rows, results = up_bank->rows / (gate->gated ? 2 : 1);
    const int64_t bytes = sizeof(Job) + sizeof(Experts) + pairs * 12 + pairs * rows * 4 + 5 * 64 +
                          routed_bytes(up_bank, down_bank, up, down, threads);
    if (!memory) return bytes;
    Job *j = taken(&memory, sizeof(Job));
    Experts *e = taken(&memory, sizeof(Experts));
    *j = (Job){.experts = e};
    *e = (Experts){.both = {*up_bank, *down_bank, *gate, none, *up, *down, .threads = threads},
                   .posted_ids = up->ids, .posted_weights = weights, .y = down->out, .chunk = FULLEST};
    e->ids = taken(&memory, pairs * 8), e->weights = taken(&memory, pairs * 4);
    e->both.up_task.ids = e->both.down_task.ids = e->ids;
    e->both.down_task.out = taken(&memory, pairs * rows * 4), e->both.down_task.out_type = FP32;
    e->room = memory;
    while (e->chunk > LEAST && results < e->chunk * ITEMS * threads) e->chunk /= 2;
    return bytes;
}

/* -- mailboxes ----------------------------------------------------------------------------------------------------- */

static int is_expecting(const Box *b) {
    return memory_of(b) && __atomic_load_n(&b->passed, __ATOMIC_SEQ_CST) < __atomic_load_n(&b->expected, __ATOMIC_SEQ_CST);
}

static int expecting(Team *t) {
    Boxes *o = t->memory;
    int some = 0;
    for (int64_t i = 0; i < __atomic_load_n(&o->used, __ATOMIC_RELAXED); i++) some |= is_expecting(o->box + i);
    if (!some || now_ns() - __atomic_load_n(&o->heard_ns, __ATOMIC_RELAXED) < FORGOTTEN_NS) return some;
    for (Box *b = o->box; b < o->box + BOXES; b++) {
        int64_t expected = __atomic_load_n(&b->expected, __ATOMIC_SEQ_CST);
        if (now_ns() - __atomic_load_n(&o->heard_ns, __ATOMIC_SEQ_CST) < FORGOTTEN_NS) return 1;
        __atomic_compare_exchange_n(&b->expected, &expected, __atomic_load_n(&b->passed, __ATOMIC_SEQ_CST), 0,
                                    __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    }
    return 0;
}

/* Expect posts, and wake threads. Returns 0 if the box is not attached. */
int vbrt_hosted_expect(Team *t, int slot, int64_t posts) {
    Boxes *o = t->memory;
    Box *b = o->box + slot;
    if (slot < 0 || !memory_of(b)) return 0;
    __atomic_store_n(&o->heard_ns, now_ns(), __ATOMIC_SEQ_CST);
    const int64_t passed = __atomic_load_n(&b->passed, __ATOMIC_SEQ_CST);
    int64_t expected = __atomic_load_n(&b->expected, __ATOMIC_SEQ_CST);
    while (!__atomic_compare_exchange_n(&b->expected, &expected, (expected > passed ? expected : passed) + posts, 0,
                                        __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    ring(t, 1);
    return 1;
}

/* Poll a mailbox; returns its slot, -1 if there is none left, -2 if out of memory. The first call precedes the threads. */
int vbrt_hosted_attach(Team *t, char *memory) {
    pthread_mutex_lock(&t->posting);
    const int64_t bytes = sizeof(Boxes) + t->places * sizeof(Look);
    if (!t->memory && job_memory(t, bytes)) memset(t->memory, 0, bytes);
    pthread_mutex_unlock(&t->posting);
    if (!t->memory) return -2;
    Boxes *o = lock(t);
    int slot = 0;
    while (slot < BOXES && o->box[slot].memory) slot++;
    if (slot < BOXES) {
        const int64_t number = *(int64_t *)(memory + ANSWER);  /* of an earlier team */
        Box *b = o->box + slot;
        __atomic_store_n(&b->last, number < 0 ? -number : number, __ATOMIC_RELAXED);
        __atomic_store_n(&b->expected, b->passed, __ATOMIC_RELAXED);
        __atomic_store_n(&b->computed, 0, __ATOMIC_RELAXED), __atomic_store_n(&b->failed, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&b->memory, memory, __ATOMIC_SEQ_CST);  /* last: threads look at once */
        if (slot >= o->used) __atomic_store_n(&o->used, slot + 1, __ATOMIC_RELAXED);
    }
    unlock(o);
    return slot < BOXES ? slot : -1;
}

/* Set or remove (NULL) the job of an entry; afterwards no thread uses the one before. Returns 0 if out of memory. */
int vbrt_hosted_set(Team *t, int slot, int64_t entry, Job *job) {
    Boxes *o = lock(t);
    Box *b = o->box + slot;
    if (b->memory && job && entry >= b->entries) {
        const int64_t entries = 2 * entry + 16;
        Job **jobs = realloc(b->jobs, entries * sizeof *jobs);
        if (jobs) {
            memset(jobs + b->entries, 0, (entries - b->entries) * sizeof *jobs);
            b->jobs = jobs, b->entries = entries;
        }
    }
    const int fits = entry < b->entries;
    if (fits) b->jobs[entry] = job;
    unlock(o);
    return fits || !job;
}

static void detach(Team *t, Box *b) {
    if (is_new(b)) answer(b, word(b->memory, POST) >> ENTRY_BITS, 0);  /* a device waits */
    __atomic_store_n(&b->memory, NULL, __ATOMIC_SEQ_CST);
    for (int place = 0; place < t->places; place++) spin_while(&((Boxes *)t->memory)->looks[place].busy, 1);
    free(b->jobs);
    b->jobs = NULL, b->entries = 0;
}

/* Poll a mailbox no longer; afterwards no thread touches it. */
void vbrt_hosted_detach(Team *t, int slot) {
    Boxes *o = lock(t);
    detach(t, o->box + slot);
    unlock(o);
}

static void find_no_more(Team *t) {
    if (!t->memory) return;
    Boxes *o = lock(t);
    for (int i = 0; i < BOXES; i++) detach(t, o->box + i);
    unlock(o);
}

/* Posts of a box that were computed, and that were not; all that were taken, and how many those will be as announced. */
void vbrt_hosted_counts(Team *t, int slot, int64_t *counts) {
    const Box *b = ((Boxes *)t->memory)->box + slot;
    counts[0] = __atomic_load_n(&b->computed, __ATOMIC_RELAXED), counts[1] = __atomic_load_n(&b->failed, __ATOMIC_RELAXED);
    counts[2] = __atomic_load_n(&b->passed, __ATOMIC_SEQ_CST), counts[3] = __atomic_load_n(&b->expected, __ATOMIC_SEQ_CST);
}
