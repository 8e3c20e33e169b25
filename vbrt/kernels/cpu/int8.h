/* Products in int8: inputs in 255 steps of a scale for eight columns, a word of codes, levels in whole steps of one size, and
 * sums of eight products in integers, each of which has the scale of its word. A word with NaN or Inf gives NaN.
 */
#include <math.h>

#define STEPS 127  /* the largest number on both sides */
#define SMALLEST 1.6e-36f  /* inputs below it are taken for zeros */
#define FEWEST 64  /* the fewest that the largest level may have */

/* whole[i] * (what is returned) = levels[i], as nearly as any number of steps for the largest one gives: exactly for E2M1, int4
 * and IQ4_NL; it is 127 for none that 120 or so serves better. */
static float in_whole_steps(const float *levels, int8_t *whole) {
    float top = 0, least = INFINITY, step = NAN;
    for (int i = 0; i < 16; i++) top = fabsf(levels[i]) > top ? fabsf(levels[i]) : top;
    memset(whole, 0, 16);
    if (top == 0) return 0;
    for (int steps = STEPS; steps >= FEWEST && least > 1e-12f; steps--) {
        const float each = top / steps;
        float near[16], error[4] = {0};
        for (int i = 0; i < 16; i++) near[i] = rintf(levels[i] / each);
        for (int i = 0; i < 16; i++) error[i & 3] += (near[i] * each - levels[i]) / top * ((near[i] * each - levels[i]) / top);
        const float sum = error[0] + error[1] + error[2] + error[3];
        if (sum >= least) continue;
        least = sum, step = each;
        for (int i = 0; i < 16; i++) whole[i] = (int8_t)near[i];
    }
    return step;
}

/* What numbers of this largest magnitude are multiplied with to be at most 127. */
INLINE float steps_per_one(float largest) { return largest >= SMALLEST ? STEPS / largest : 0; }
