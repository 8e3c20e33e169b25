/* Work stealing: each thread has its own range, along which it reads memory sequentially, and steals from others once
 * it is done, so that a descheduled thread delays nobody. Round-robin chunks of 32 rows had half the bandwidth: a
 * core's prefetches were another core's next chunk. */
#include <stdint.h>
#ifdef _OPENMP
int omp_get_thread_num(void);
#endif

typedef struct { _Alignas(64) int64_t next, end; } Range;  /* one cache line each */

typedef struct { Range *ranges; int threads, first, done; } Taker;  /* `done` ranges are empty, from `first` on */

static void share_out(Range *ranges, int threads, int64_t items) {
    for (int i = 0; i < threads; i++) ranges[i] = (Range){items * i / threads, items * (i + 1) / threads};
}

/* State of the calling thread of a team. */
static Taker taker(Range *ranges, int threads) {
#ifdef _OPENMP
    return (Taker){ranges, threads, omp_get_thread_num() % threads, 0};
#else
    return (Taker){ranges, threads, 0, 0};
#endif
}

/* The next item, or -1 if none is left. */
static int64_t take(Taker *t) {
    for (; t->done < t->threads; t->done++) {
        Range *range = t->ranges + (t->first + t->done) % t->threads;
        if (__atomic_load_n(&range->next, __ATOMIC_RELAXED) >= range->end) continue;  /* leaves the line to its owner */
        const int64_t item = __atomic_fetch_add(&range->next, 1, __ATOMIC_RELAXED);
        if (item < range->end) return item;
    }
    return -1;
}
