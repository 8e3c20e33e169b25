/* int8 products: inputs quantized to 255 steps with a scale per word of eight columns, levels as multiples of one step,
 * and integer sums of eight products, scaled per word. A word with NaN or Inf gives NaN.
 */
#include <math.h>

#define STEPS 127  /* largest integer of both operands */
#define SMALLEST 1.6e-36f  /* smaller inputs count as zero */
#define FEWEST 64  /* minimum steps of the largest level */

/* whole[i] * (return value) = levels[i], with the best number of steps for the largest level: exact for E2M1, int4 and
 * IQ4_NL; 127 unless another number, down to FEWEST, is better. */
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

/* Divide by the greatest common divisor: E2M1 needs 12 steps, int4 8. Returns the step. */
INLINE float in_fewest_steps(float step, int8_t *whole) {
    int common = 0;
    for (int i = 0; i < 16; i++)
        for (int rest = abs(whole[i]); rest;) {
            const int next = common % rest;
            common = rest, rest = next;
        }
    for (int i = 0; i < 16 && common; i++) whole[i] /= common;
    return common ? common * step : step;
}

/* Factor that maps numbers of this largest magnitude to at most 127. */
INLINE float steps_per_one(float largest) { return largest >= SMALLEST ? STEPS / largest : 0; }
