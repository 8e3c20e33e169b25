/* Thread team: threads that compute jobs of many items, posted by one thread, one job at a time, overlapping with its
 * work.
 *
 * A job is done when its items are, not when all threads have joined: a thread that wakes late, or shares its core,
 * delays nobody, and the thread that waits for the job takes items too. After a job, threads spin for twice as long as
 * the last gap between jobs, so that the next one finds them awake, then sleep; infrequent jobs find them asleep, as
 * spinning slows other work down. No team thread needs the GIL: in a process whose main thread launches kernels, a
 * thread that waits for the GIL costs the main thread a system call per launch.
 *
 * The threads are the caller's, which call `serve`. A job is stored in the team's memory and replaced by the next one
 * only when no thread is inside.
 *
 * A library that defines POLLED has jobs from elsewhere, too: idle threads look for them (hosted.c). */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

#define LONGEST_NS 3000000  /* maximum spin time, about that of gcc's OpenMP */
#define SHORTEST_NS 50000
#define ABANDONED_NS 20000000  /* a job that is done but not finished by its owner by then */
#define EXPECTING_NS 2000000  /* spin time while jobs from elsewhere are expected */
#define NAP_NS 30000
#define SPINS 256  /* iterations between clock reads, and before a yield */

typedef struct {
    _Alignas(64) int64_t open;  /* number of the joinable job, 0: none */
    _Alignas(64) int64_t inside;  /* threads in the job */
    _Alignas(64) int64_t left;  /* unfinished items */
    _Alignas(64) int64_t sleepers, stop, places, number, fetched, told;
    int64_t begun_ns, done_ns;  /* first join and last item of the last job; 0: not yet */
    int64_t spin_ns;  /* spin time after a job */
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

/* Iteration `turn`, from 1 on, of a spin loop. */
static inline void spin(int64_t turn) {
    pause_core();
    if (turn % SPINS == 0) sched_yield();
}

/* Spin while `*word` equals a value. */
static void spin_while(const int64_t *word, int64_t value) {
    for (int64_t i = 1; __atomic_load_n(word, __ATOMIC_ACQUIRE) == value; i++) spin(i);
}

/* Join a job; 0 if it is closed. */
static int enter(Team *t, int64_t number) {
    __atomic_add_fetch(&t->inside, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&t->open, __ATOMIC_SEQ_CST) == number) return 1;
    __atomic_sub_fetch(&t->inside, 1, __ATOMIC_SEQ_CST);
    return 0;
}

static void leave(Team *t) { __atomic_sub_fetch(&t->inside, 1, __ATOMIC_SEQ_CST); }

/* Count finished items; the last one records the job's end. */
static void tick(Team *t, int64_t items) {
    if (__atomic_sub_fetch(&t->left, items, __ATOMIC_ACQ_REL) == 0) __atomic_store_n(&t->done_ns, now_ns(), __ATOMIC_RELEASE);
}

/* Wake sleepers in a tree: each wakes two more. */
static void ring(Team *t, int count) {
    if (!__atomic_load_n(&t->sleepers, __ATOMIC_SEQ_CST)) return;
    pthread_mutex_lock(&t->lock);
    for (int i = 0; i < count; i++) pthread_cond_signal(&t->bell);
    pthread_mutex_unlock(&t->lock);
}

/* Take items of the job; `place` is the thread's index, 0 to places - 1. */
static void take_part(Team *t, int place);

#ifdef POLLED
/* Whether there may be a job elsewhere; `place` is the thread's index. */
static int found(Team *t, int place);
/* Run one job from elsewhere; return its number, 0 if there was none. */
static int64_t run_found(Team *t, int place);
/* Whether jobs from elsewhere are expected: threads that have been idle for long nap instead of sleeping. */
static int expecting(Team *t);
/* Let go of all that the team does not own, and find no more jobs. */
static void find_no_more(Team *t);
#else
#define found(t, place) 0
#define run_found(t, place) 0
#define expecting(t) 0
#define find_no_more(t)
#endif

static void close_job(Team *t) {
    __atomic_store_n(&t->open, 0, __ATOMIC_SEQ_CST);
    for (int64_t i = 1; __atomic_load_n(&t->inside, __ATOMIC_SEQ_CST); i++) spin(i);
}

/* Return when a job is done: `number`, or 0 for the open one. Any thread may call it repeatedly. */
void vbrt_team_finish(Team *t, int64_t number) {
    if (!number) number = __atomic_load_n(&t->open, __ATOMIC_SEQ_CST);
    if (!number || !enter(t, number)) return;  /* closed jobs are done */
    take_part(t, 0);
    spin_while(&t->done_ns, 0);
    __atomic_store_n(&t->fetched, number, __ATOMIC_RELEASE);
    leave(t);
}

/* Return memory for a job; NULL if there is none. The last job is then done and closed. */
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

/* Open the job in the team's memory for threads; return its number. */
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

/* True, once per job, if it was done long ago and not finished by its owner. */
static int abandoned(Team *t, int64_t number) {
    const int64_t done = __atomic_load_n(&t->done_ns, __ATOMIC_RELAXED);
    if (!number || !done || now_ns() - done < ABANDONED_NS) return 0;
    if (__atomic_load_n(&t->fetched, __ATOMIC_ACQUIRE) == number) return 0;
    return __atomic_exchange_n(&t->told, number, __ATOMIC_SEQ_CST) != number;
}

/* Sleep until a job newer than `seen`; with a timeout only while that one is unfinished by its owner. */
static void sleep_after(Team *t, int64_t seen) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += ABANDONED_NS;
    if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
    pthread_mutex_lock(&t->lock);
    __atomic_add_fetch(&t->sleepers, 1, __ATOMIC_SEQ_CST);
    for (int late = 0; !late && !__atomic_load_n(&t->stop, __ATOMIC_SEQ_CST);) {
        const int64_t open = __atomic_load_n(&t->open, __ATOMIC_SEQ_CST);
        if ((open && open != seen) || expecting(t)) break;
        const int awaited = open && __atomic_load_n(&t->fetched, __ATOMIC_ACQUIRE) != open &&
                            __atomic_load_n(&t->told, __ATOMIC_ACQUIRE) != open;
        if (awaited) late = pthread_cond_timedwait(&t->bell, &t->lock, &until) == ETIMEDOUT;
        else pthread_cond_wait(&t->bell, &t->lock);
    }
    __atomic_sub_fetch(&t->sleepers, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&t->lock);
}

static void nap(void) {
#ifdef __linux__
    prctl(PR_SET_TIMERSLACK, 1UL);  /* of this thread; 50 us otherwise */
#endif
    nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
}

/* A thread's loop: returns 0 when the team is stopped, 1 when an abandoned job should be looked after. */
int vbrt_team_serve(Team *t, int place) {
    int64_t seen = 0, last = now_ns();
    while (!__atomic_load_n(&t->stop, __ATOMIC_RELAXED)) {
        const int64_t open = __atomic_load_n(&t->open, __ATOMIC_ACQUIRE);
        if (open && open != seen) {
            seen = open;
            ring(t, 2);
            if (enter(t, open)) {
                int64_t none = 0;  /* the first thread sets it */
                __atomic_compare_exchange_n(&t->begun_ns, &none, now_ns(), 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
                take_part(t, place);
                leave(t);
            }
            last = now_ns();
            continue;
        }
        const int64_t own = run_found(t, place);
        if (own) {
            seen = own, last = now_ns();
            continue;
        }
        for (int i = 0; i < SPINS && __atomic_load_n(&t->open, __ATOMIC_RELAXED) == open && !found(t, place); i++) pause_core();
        const int64_t idle = now_ns() - last;
        if (idle < __atomic_load_n(&t->spin_ns, __ATOMIC_RELAXED) || (idle < EXPECTING_NS && expecting(t))) {
            sched_yield();  /* with few cores, let working threads run */
            continue;
        }
        if (expecting(t)) {
            nap();
            continue;
        }
        sleep_after(t, seen);
        if (expecting(t)) ring(t, 2);
        if (abandoned(t, seen)) return 1;
        last = now_ns();
    }
    return 0;
}

/* A team of `places` threads, including the posting one; NULL if out of memory. */
Team *vbrt_team_new(int places) {
    void *memory;
    if (posix_memalign(&memory, 64, sizeof(Team))) return NULL;
    Team *t = memset(memory, 0, sizeof(Team));
    t->places = places;
    pthread_mutex_init(&t->lock, NULL), pthread_mutex_init(&t->posting, NULL);
    pthread_cond_init(&t->bell, NULL);
    return t;
}

/* Finish the open job, and make all threads return. */
void vbrt_team_stop(Team *t) {
    find_no_more(t);
    vbrt_team_finish(t, 0);
    __atomic_store_n(&t->stop, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&t->lock);
    pthread_cond_broadcast(&t->bell);
    pthread_mutex_unlock(&t->lock);
}

/* Free a team without serving threads. */
void vbrt_team_free(Team *t) {
    free(t->memory);
    free(t);
}

/* Monotonic nanoseconds: first join of the last job by a team thread (0: none), and its end. */
void vbrt_team_times(const Team *t, int64_t *times) {
    times[0] = __atomic_load_n(&t->begun_ns, __ATOMIC_RELAXED);
    times[1] = __atomic_load_n(&t->done_ns, __ATOMIC_RELAXED);
}
