/* `dots` in plain C. A span is 16 even columns, then 16 odd ones. */
#include "dots_spans.h"
#define SPAN 32

/* Convert a span of x to fp32; words = sums of words. */
INLINE void spread_span(const float *span, int form, void *to, float *words) {
    (void)form;
    sum_words(span, SPAN / 8, words);
    for (int k = 0; k < SPAN; k++) ((float *)to)[k % 2 * 16 + k / 2] = span[k];
}

INLINE void dots(const Dots *d, int rows, int tokens, float *sums) {
    for (int r = 0; r < rows; r++) {
        float sum[TOKENS][16] = {{0}}, weight[16];
        for (int64_t k = 0; k < d->columns; k += SPAN / 2) {
            const uint8_t *codes = d->row[r].codes + k / 2;
            const float scale = scale_at(d, r, k >> d->shift);
            const int64_t at = k / SPAN * SPAN + (k / 16 & 1) * 8;
            for (int j = 0; j < 8; j++) {
                weight[j] = d->levels[codes[j] & 15] * scale;
                weight[j + 8] = d->levels[codes[j] >> 4] * scale;
            }
            for (int m = 0; m < tokens; m++)
                for (int j = 0; j < 16; j++) sum[m][j] += weight[j] * ((const float *)d->x[m])[at + j + (j & 8)];
        }
        for (int m = 0; m < tokens; m++) {
            for (int half = 8; half; half /= 2)
                for (int j = 0; j < half; j++) sum[m][j] += sum[m][j + half];
            sums[r * TOKENS + m] = sum[m][0];
        }
        if (d->offset_type) add_offsets(d, r, tokens, sums);
    }
}

#include "int8_spans.h"
