/* `dots` for NEON, on bf16 pairs where the CPU supports them. Two lookups by 16 codes give the upper bytes of their
 * levels, which is all of E2M1's; two more give the lower bytes of others. */
#include <arm_neon.h>
#include "dots_spans.h"
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define PAIRS 1  /* bf16 dot products */
#endif

/* 16 bytes of codes. For each half, which has one scale, the even columns, then the odd ones. */
#define SPAN 32

/* Convert a span of x to bf16 or fp32; words = sums of words. */
INLINE void spread_span(const float *span, int form, void *to, float *words) {
    sum_words(span, SPAN / 8, words);
    for (int k = 0; k < SPAN; k++) {
        const int place = k / 16 * 16 + k % 2 * 8 + k % 16 / 2;
        if (form == AS_BF16) ((int16_t *)to)[place] = bf16_bits(span[k]);
        else ((float *)to)[place] = span[k];
    }
}

/* words[half] of bytes `place` and `place + 1` of 16 codes' levels */
INLINE void words_of(const Dots *d, int place, uint8x16_t code, uint16x8_t *words) {
    const uint8x16_t low = vqtbl1q_u8(vld1q_u8(d->bytes[place]), code);
    const uint8x16_t high = vqtbl1q_u8(vld1q_u8(d->bytes[place + 1]), code);
    words[0] = vreinterpretq_u16_u8(vzip1q_u8(low, high));
    words[1] = vreinterpretq_u16_u8(vzip2q_u8(low, high));
}

/* Eight levels times eight of x; `upper`: the lower words are zero. */
INLINE float32x4_t plus_products(float32x4_t part, uint16x8_t high, uint16x8_t low, int upper, const float *x) {
    if (upper) low = vdupq_n_u16(0);
    const float32x4_t first = vreinterpretq_f32_u16(vzip1q_u16(low, high));
    const float32x4_t second = vreinterpretq_f32_u16(vzip2q_u16(low, high));
    return vfmaq_f32(vfmaq_f32(part, first, vld1q_f32(x)), second, vld1q_f32(x + 4));
}

/* `narrow` and `upper` are constants after inlining. */
INLINE void dots_as(const Dots *d, int rows, int tokens, int narrow, int upper, float *sums) {
    for (int r = 0; r < rows; r++) {
        float32x4_t sum[TOKENS][2];
        for (int m = 0; m < tokens; m++) sum[m][0] = sum[m][1] = vdupq_n_f32(0);
        for (int64_t k = 0; k < d->columns; k += SPAN) {
            const int whole = d->columns - k >= SPAN;
            const uint8_t *at = d->row[r].codes + k / 2;
            const uint8x16_t codes = whole ? vld1q_u8(at) : vcombine_u8(vld1_u8(at), vdup_n_u8(0));
            const float scale[2] = {scale_at(d, r, k >> d->shift), whole ? scale_at(d, r, (k + 16) >> d->shift) : 0};
            const uint8x16_t code[2] = {vandq_u8(codes, vdupq_n_u8(15)), vshrq_n_u8(codes, 4)};  /* even, odd */
            uint16x8_t high[2][2], low[2][2];
            for (int odd = 0; odd < 2; odd++) {
                words_of(d, 2, code[odd], high[odd]);
                if (!upper) words_of(d, 0, code[odd], low[odd]);
            }
            for (int m = 0; m < tokens; m++)
                for (int half = 0; half < 2; half++) {
                    float32x4_t part = vdupq_n_f32(0);
                    for (int odd = 0; odd < 2; odd++) {
                        const int64_t from = k + 16 * half + 8 * odd;
#ifdef PAIRS
                        if (narrow) {
                            const bfloat16x8_t x = vld1q_bf16((const bfloat16_t *)d->x[m] + from);
                            part = vbfdotq_f32(part, vreinterpretq_bf16_u16(high[odd][half]), x);
                            continue;
                        }
#endif
                        part = plus_products(part, high[odd][half], low[odd][half], upper, (const float *)d->x[m] + from);
                    }
                    sum[m][half] = vfmaq_n_f32(sum[m][half], part, scale[half]);
                }
        }
        for (int m = 0; m < tokens; m++) sums[r * TOKENS + m] = vaddvq_f32(vaddq_f32(sum[m][0], sum[m][1]));
        if (d->offset_type) add_offsets(d, r, tokens, sums);
    }
}

INLINE void dots(const Dots *d, int rows, int tokens, float *sums) {
    if (d->form == AS_BF16) dots_as(d, rows, tokens, 1, 1, sums);
    else if (d->upper) dots_as(d, rows, tokens, 0, 1, sums);
    else dots_as(d, rows, tokens, 0, 0, sums);
}

#include "int8_spans.h"
