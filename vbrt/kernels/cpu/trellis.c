/* Viterbi encoder of `t3` on a CPU: `trellis_path` of vbrt/formats/t3.py. Path costs are rounded in another order than
 * torch's, and to 18 bits, so that paths of almost equal error may come out differently.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { PAIRS = 128, NEW = 64, MEMORY = 256, STATES = NEW * MEMORY };

/* of a thread: costs of paths by memory, and the bits that preceded it in each step */
typedef struct {
    float cost[MEMORY];
    uint8_t back[PAIRS][MEMORY];
} Scratch;

/* One step. States that differ in their first bits alone, 256 apart, lead to the same memory. Those six bits ride in
 * the lowest ones of a cost, so that a minimum brings them along; costs keep 18 bits, 4e-6 of their size. */
static void step(Scratch *s, const float *x, const float *table, uint8_t *back) {
    const float *first = table, *second = table + STATES, *norm = table + 2 * STATES;
    const float a = -2 * x[0], b = -2 * x[1];
    float next[MEMORY];
    for (int part = 0; part < MEMORY; part += NEW) {
        float best[NEW];
        for (int i = 0; i < NEW; i++) best[i] = 3e38f;
        for (uint32_t bits = 0; bits < NEW; bits++) {
            const int at = (int)bits * MEMORY + part;
            const float before = s->cost[at / NEW];
            for (int i = 0; i < NEW; i++) {
                union { float value; uint32_t bits; } error;
                error.value = before + norm[at + i] + a * first[at + i] + b * second[at + i];
                error.bits = (error.bits & ~63u) | bits;
                best[i] = error.value < best[i] ? error.value : best[i];
            }
        }
        for (int i = 0; i < NEW; i++) {
            union { float value; uint32_t bits; } error = {best[i]};
            next[part + i] = best[i], back[part + i] = error.bits & 63;
        }
    }
    memcpy(s->cost, next, sizeof next);
}

static void closed_path(Scratch *s, const float *x, const float *table, int warm, int32_t *states) {
    memset(s->cost, 0, sizeof s->cost);
    for (int i = 0; i < 2 * warm; i++) step(s, x + 2 * ((i + PAIRS - warm) % PAIRS), table, s->back[i]);
    int memory = 0;
    for (int i = 1; i < MEMORY; i++)
        if (s->cost[i] < s->cost[memory]) memory = i;
    for (int i = 2 * warm - 1; i >= warm; i--) memory = (s->back[i][memory] * MEMORY + memory) / NEW;
    for (int i = 0; i < MEMORY; i++) s->cost[i] = 1e30f;
    s->cost[memory] = 0;
    for (int i = 0; i < PAIRS; i++) step(s, x + 2 * i, table, s->back[i]);
    for (int i = PAIRS - 1; i >= 0; i--) {
        states[i] = s->back[i][memory] * MEMORY + memory;
        memory = states[i] / NEW;
    }
}

int64_t vbrt_trellis_scratch(void) { return sizeof(Scratch); }

/* x [tiles, PAIRS, 2] to states [tiles, PAIRS]; table [3, STATES]: both values, squared norm; scratch for each thread */
void vbrt_trellis(const float *x, int64_t tiles, const float *table, int warm, int32_t *states, char *scratch,
                  int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int part = 0; part < threads; part++)
        for (int64_t tile = tiles * part / threads; tile < tiles * (part + 1) / threads; tile++) {
            Scratch *own = (Scratch *)(scratch + part * sizeof(Scratch));
            closed_path(own, x + tile * PAIRS * 2, table, warm, states + tile * PAIRS);
        }
}
