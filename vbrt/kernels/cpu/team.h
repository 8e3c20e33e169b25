/* Threads that compute what one thread posts, while that one does something else: jobs of many items, one job at a time.
 *
 * A job is done when its items are, not when all threads have come: one that wakes late, or shares its core, holds nobody
 * up, and who waits for the job takes items too. Threads spin after a job for twice as long as the last one let them wait,
 * so that the next one finds them awake, and sleep then; jobs that come seldom find them asleep, as spinning threads slow
 * down whoever else has work. No thread of the team needs Python's lock: in a process whose main thread launches kernels, one
 * that waits for that lock costs it a call of the system at each launch.
 *
 * The threads are those of the caller, which call `serve`. A job lies in memory of the team and is replaced by the next
 * one only when no thread is inside. */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#define LONGEST_NS 3000000  /* that threads spin for, about as long as gcc's OpenMP does */
#define SHORTEST_NS 50000
#define ABANDONED_NS 20000000  /* a job that is done and that nobody has come for by then */
#define SPINS 256  /* between two looks at the clock, and before a thread that waits gives its core away */

typedef struct {
    _Alignas(64) int64_t open;  /* number of the job that threads may join, 0: none */
    _Alignas(64) int64_t inside;  /* threads that have joined it */
    _Alignas(64) int64_t left;  /* of its items */
    _Alignas(64) int64_t sleepers, stop, places, number, fetched, told;
    int64_t begun_ns, done_ns;  /* when the first thread joined the last job, and when its last item was done; 0: not yet */
    int64_t spin_ns;  /* for which threads spin after a job */
    pthread_mutex_t lock, posting;
    pthread_cond_t bell;
    void *memory;  /* of the job */
    int64_t room;
} Team;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static inline void pause_core(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* One turn, from 1 on, of a loop that waits. */
static inline void spin(int64_t turn) {
    pause_core();
    if (turn % SPINS == 0) sched_yield();
}

/* Spin while `*word` has a value. */
static void spin_while(const int64_t *word, int64_t value) {
    for (int64_t i = 1; __atomic_load_n(word, __ATOMIC_ACQUIRE) == value; i++) spin(i);
}

/* Join a job; 0 where it is no longer open. */
static int enter(Team *t, int64_t number) {
    __atomic_add_fetch(&t->inside, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&t->open, __ATOMIC_SEQ_CST) == number) return 1;
    __atomic_sub_fetch(&t->inside, 1, __ATOMIC_SEQ_CST);
    return 0;
}

static void leave(Team *t) { __atomic_sub_fetch(&t->inside, 1, __ATOMIC_SEQ_CST); }

/* One item is done; the last one's time says that the job is. */
static void tick(Team *t) {
    if (__atomic_sub_fetch(&t->left, 1, __ATOMIC_ACQ_REL) == 0) __atomic_store_n(&t->done_ns, now_ns(), __ATOMIC_RELEASE);
}

/* Wake sleepers: each of them wakes two more. */
static void ring(Team *t, int count) {
    if (!__atomic_load_n(&t->sleepers, __ATOMIC_SEQ_CST)) return;
    pthread_mutex_lock(&t->lock);
    for (int i = 0; i < count; i++) pthread_cond_signal(&t->bell);
    pthread_mutex_unlock(&t->lock);
}

/* Take items of the job; the thread is at a place of 0 to places - 1. */
static void take_part(Team *t, int place);

static void close_job(Team *t) {
    __atomic_store_n(&t->open, 0, __ATOMIC_SEQ_CST);
    for (int64_t i = 1; __atomic_load_n(&t->inside, __ATOMIC_SEQ_CST); i++) spin(i);
}

/* Return when a job is done: number, or 0 for the one that is open. Any thread may, again and again. */
void vbrt_team_finish(Team *t, int64_t number) {
    if (!number) number = __atomic_load_n(&t->open, __ATOMIC_SEQ_CST);
    if (!number || !enter(t, number)) return;  /* what is closed is done */
    take_part(t, 0);
    spin_while(&t->done_ns, 0);
    __atomic_store_n(&t->fetched, number, __ATOMIC_RELEASE);
    leave(t);
}

/* Return memory for a job of so many bytes; NULL where there is none. The last job is done and closed then. */
static void *job_memory(Team *t, int64_t bytes) {
    vbrt_team_finish(t, 0);
    close_job(t);
    if (bytes > t->room) {
        free(t->memory);
        t->room = posix_memalign(&t->memory, 64, bytes) ? 0 : bytes;
        if (!t->room) t->memory = NULL;
    }
    return t->memory;
}

/* Have threads join the job that was written into the team's memory; return its number. */
static int64_t open_job(Team *t, int64_t items) {
    const int64_t number = ++t->number, waited = t->done_ns ? now_ns() - t->done_ns : 0;
    __atomic_store_n(&t->spin_ns, 2 * waited > LONGEST_NS ? SHORTEST_NS : 2 * waited + SHORTEST_NS, __ATOMIC_RELAXED);
    __atomic_store_n(&t->begun_ns, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&t->done_ns, items ? 0 : now_ns(), __ATOMIC_RELAXED);
    __atomic_store_n(&t->left, items, __ATOMIC_RELAXED);
    __atomic_store_n(&t->open, number, __ATOMIC_SEQ_CST);
    ring(t, 1);
    return number;
}

/* True, once for each job, if it has been done for long and nobody has come for it. */
static int abandoned(Team *t, int64_t number) {
    const int64_t done = __atomic_load_n(&t->done_ns, __ATOMIC_RELAXED);
    if (!number || !done || now_ns() - done < ABANDONED_NS) return 0;
    if (__atomic_load_n(&t->fetched, __ATOMIC_ACQUIRE) == number) return 0;
    return __atomic_exchange_n(&t->told, number, __ATOMIC_SEQ_CST) != number;
}

/* Sleep until there is another job than one that was seen; for a while only if somebody is still to come for that one. */
static void sleep_after(Team *t, int64_t seen) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += ABANDONED_NS;
    if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
    pthread_mutex_lock(&t->lock);
    __atomic_add_fetch(&t->sleepers, 1, __ATOMIC_SEQ_CST);
    for (int late = 0; !late && !__atomic_load_n(&t->stop, __ATOMIC_SEQ_CST);) {
        const int64_t open = __atomic_load_n(&t->open, __ATOMIC_SEQ_CST);
        if (open && open != seen) break;
        const int awaited = open && __atomic_load_n(&t->fetched, __ATOMIC_ACQUIRE) != open &&
                            __atomic_load_n(&t->told, __ATOMIC_ACQUIRE) != open;
        if (awaited) late = pthread_cond_timedwait(&t->bell, &t->lock, &until) == ETIMEDOUT;
        else pthread_cond_wait(&t->bell, &t->lock);
    }
    __atomic_sub_fetch(&t->sleepers, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&t->lock);
}

/* A thread's life at a place: 0 when the team is stopped, 1 when somebody should look after a job that was abandoned. */
int vbrt_team_serve(Team *t, int place) {
    int64_t seen = 0, last = now_ns();
    while (!__atomic_load_n(&t->stop, __ATOMIC_RELAXED)) {
        const int64_t open = __atomic_load_n(&t->open, __ATOMIC_ACQUIRE);
        if (open && open != seen) {
            seen = open;
            ring(t, 2);
            if (enter(t, open)) {
                int64_t none = 0;  /* if this is the first thread */
                __atomic_compare_exchange_n(&t->begun_ns, &none, now_ns(), 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
                take_part(t, place);
                leave(t);
            }
            last = now_ns();
            continue;
        }
        for (int i = 0; i < SPINS && __atomic_load_n(&t->open, __ATOMIC_RELAXED) == open; i++) pause_core();
        if (now_ns() - last < __atomic_load_n(&t->spin_ns, __ATOMIC_RELAXED)) {
            sched_yield();  /* where cores are few, to those that have work */
            continue;
        }
        sleep_after(t, seen);
        if (abandoned(t, seen)) return 1;
        last = now_ns();
    }
    return 0;
}

/* A team of `places` threads, the one that posts among them; NULL where there is no memory. */
Team *vbrt_team_new(int places) {
    void *memory;
    if (posix_memalign(&memory, 64, sizeof(Team))) return NULL;
    Team *t = memset(memory, 0, sizeof(Team));
    t->places = places;
    pthread_mutex_init(&t->lock, NULL), pthread_mutex_init(&t->posting, NULL);
    pthread_cond_init(&t->bell, NULL);
    return t;
}

/* Finish the job that is open, and have all threads return. */
void vbrt_team_stop(Team *t) {
    vbrt_team_finish(t, 0);
    __atomic_store_n(&t->stop, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&t->lock);
    pthread_cond_broadcast(&t->bell);
    pthread_mutex_unlock(&t->lock);
}

/* Free a team that no thread serves. */
void vbrt_team_free(Team *t) {
    free(t->memory);
    free(t);
}

/* Nanoseconds on the monotonic clock: when a thread of the team joined the last job (0: none did), and when it was done. */
void vbrt_team_times(const Team *t, int64_t *times) {
    times[0] = __atomic_load_n(&t->begun_ns, __ATOMIC_RELAXED);
    times[1] = __atomic_load_n(&t->done_ns, __ATOMIC_RELAXED);
}
