/* Work shared out over threads: each has a range of its own, along which memory is read in one stream, and takes from the
 * others' once it is done, so that a thread that waits for a CPU holds nobody up. Taken in turns instead, chunks of 32 rows
 * came at half the rate: what a core reads ahead was another's next chunk. */
#include <stdint.h>
#ifdef _OPENMP
int omp_get_thread_num(void);
#endif

typedef struct { _Alignas(64) int64_t next, end; } Range;  /* a cache line each */

typedef struct { Range *ranges; int threads, first, done; } Taker;  /* `done` ranges are empty, from `first` on */

static void share_out(Range *ranges, int threads, int64_t items) {
    for (int i = 0; i < threads; i++) ranges[i] = (Range){items * i / threads, items * (i + 1) / threads};
}

/* What the calling thread of a team takes from. */
static Taker taker(Range *ranges, int threads) {
#ifdef _OPENMP
    return (Taker){ranges, threads, omp_get_thread_num() % threads, 0};
#else
    return (Taker){ranges, threads, 0, 0};
#endif
}

/* The next item, or -1 when all are taken. */
static int64_t take(Taker *t) {
    for (; t->done < t->threads; t->done++) {
        Range *range = t->ranges + (t->first + t->done) % t->threads;
        const int64_t item = __atomic_fetch_add(&range->next, 1, __ATOMIC_RELAXED);
        if (item < range->end) return item;
    }
    return -1;
}
