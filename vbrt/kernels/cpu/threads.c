/* OpenMP entry points that gcc's `#pragma omp` calls, forwarded to torch's OpenMP runtime: the process keeps one thread
 * pool, and libraries link no runtime, which other machines may lack. Linked with each source.
 * If torch has none, the work runs in the calling thread.
 */
#include <stdbool.h>
#include <stddef.h>

#define HIDDEN __attribute__((visibility("hidden")))

/* in the order of `_OPENMP` in build.py; all or none are set */
static struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*threads)(void), (*number)(void);
    bool (*dynamic_start)(long, long, long, long, long *, long *), (*dynamic_next)(long *, long *);
    bool (*free_start)(long, long, long, long, long *, long *), (*free_next)(long *, long *);
    void (*end_nowait)(void), (*end)(void), (*barrier)(void), (*atomic_start)(void), (*atomic_end)(void);
} openmp;

void vbrt_openmp(void *const *functions) {
    __builtin_memcpy(&openmp, functions, sizeof openmp);
}

HIDDEN void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags) {
    if (openmp.parallel) openmp.parallel(body, data, threads, flags);
    else body(data);
}

HIDDEN int omp_get_num_threads(void) { return openmp.threads ? openmp.threads() : 1; }

HIDDEN int omp_get_thread_num(void) { return openmp.number ? openmp.number() : 0; }

static bool all(long start, long end, long step, long *first, long *last) {
    *first = start, *last = end;
    return step > 0 ? start < end : start > end;
}

HIDDEN bool GOMP_loop_dynamic_start(long start, long end, long step, long chunk, long *first, long *last) {
    if (openmp.dynamic_start) return openmp.dynamic_start(start, end, step, chunk, first, last);
    return all(start, end, step, first, last);
}

HIDDEN bool GOMP_loop_dynamic_next(long *first, long *last) {
    return openmp.dynamic_next && openmp.dynamic_next(first, last);
}

HIDDEN bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long chunk, long *first, long *last) {
    if (openmp.free_start) return openmp.free_start(start, end, step, chunk, first, last);
    return all(start, end, step, first, last);
}

HIDDEN bool GOMP_loop_nonmonotonic_dynamic_next(long *first, long *last) {
    return openmp.free_next && openmp.free_next(first, last);
}

HIDDEN void GOMP_loop_end_nowait(void) { if (openmp.end_nowait) openmp.end_nowait(); }

HIDDEN void GOMP_loop_end(void) { if (openmp.end) openmp.end(); }

HIDDEN void GOMP_barrier(void) { if (openmp.barrier) openmp.barrier(); }

HIDDEN void GOMP_atomic_start(void) { if (openmp.atomic_start) openmp.atomic_start(); }

HIDDEN void GOMP_atomic_end(void) { if (openmp.atomic_end) openmp.atomic_end(); }
