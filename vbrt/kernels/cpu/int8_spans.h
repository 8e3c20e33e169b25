/* int8 dot products for NEON and plain C. x is in spans of 32 columns, 64 bytes each: 16 even columns, 16 odd
 * ones, and the scales of the four words. */
#define SPAN8 32

/* Quantize a span of x; words = sums of what was quantized. */
INLINE void round_span(const float *span, void *to, float *words) {
    for (int first = 0; first < SPAN; first += 8) {
        int8_t *bytes = (int8_t *)to + first / SPAN8 * 64;
        float largest = 0, zero = 0;
        for (int k = first; k < first + 8; k++) {
            if (fabsf(span[k]) > largest) largest = fabsf(span[k]);
            zero += span[k] * 0;  /* NaN if one is not finite */
        }
        const float per_one = zero == 0 ? steps_per_one(largest) : 0;
        int sum = 0;
        for (int k = first; k < first + 8; k++) {
            const int8_t near = per_one > 0 ? (int8_t)rintf(span[k] * per_one) : 0;
            bytes[k % 2 * 16 + k % SPAN8 / 2] = near, sum += near;
        }
        const float scale = ((float *)(bytes + SPAN8))[first % SPAN8 / 8] = largest / STEPS + zero;
        words[first / 8] = sum * scale;
    }
}

#if defined(__ARM_NEON) && defined(__aarch64__)

/* Sums of each word's eight products. */
INLINE int32x4_t sums_of_int8(int8x16_t even, int8x16_t odd, const int8_t *x) {
    const int8x16_t x0 = vld1q_s8(x), x1 = vld1q_s8(x + 16);
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(vdotq_s32(vdupq_n_s32(0), even, x0), odd, x1);
#else
    /* pairs of products are below 2^15: both operands are at most 127 */
    const int16x8_t low = vmlal_s8(vmull_s8(vget_low_s8(even), vget_low_s8(x0)), vget_low_s8(odd), vget_low_s8(x1));
    const int16x8_t high = vmlal_s8(vmull_s8(vget_high_s8(even), vget_high_s8(x0)), vget_high_s8(odd), vget_high_s8(x1));
    return vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#endif
}

INLINE void dots_in_int8(const Dots *d, int rows, int tokens, float *sums) {
    const int8x16_t whole = vld1q_s8(d->whole);
    for (int r = 0; r < rows; r++) {
        float32x4_t sum[TOKENS];
        for (int m = 0; m < tokens; m++) sum[m] = vdupq_n_f32(0);
        for (int64_t k = 0; k < d->columns; k += SPAN8) {
            const int64_t left = d->columns - k;  /* at least 16 */
            const uint8_t *at = d->row[r].codes + k / 2;
            const uint8x16_t codes = left >= SPAN8 ? vld1q_u8(at) : vcombine_u8(vld1_u8(at), vdup_n_u8(0));
            const int8x16_t even = vqtbl1q_s8(whole, vandq_u8(codes, vdupq_n_u8(15)));
            const int8x16_t odd = vqtbl1q_s8(whole, vshrq_n_u8(codes, 4));
            const float one = scale_at(d, r, k >> d->shift);
            const float two = d->shift == 4 && left >= SPAN8 ? scale_at(d, r, (k >> 4) + 1) : one;
            const float32x4_t scale = vcombine_f32(vdup_n_f32(one), vdup_n_f32(two));
            for (int m = 0; m < tokens; m++) {
                const int8_t *x = (const int8_t *)d->x[m] + 2 * k;
                const float32x4_t parts = vcvtq_f32_s32(sums_of_int8(even, odd, x));
                sum[m] = vfmaq_f32(sum[m], parts, vmulq_f32(scale, vld1q_f32((const float *)(x + SPAN8))));
            }
        }
        for (int m = 0; m < tokens; m++) sums[r * TOKENS + m] = vaddvq_f32(sum[m]) * d->step;
        if (d->offset_type) add_offsets(d, r, tokens, sums);
    }
}

#else

INLINE void dots_in_int8(const Dots *d, int rows, int tokens, float *sums) {
    for (int r = 0; r < rows; r++) {
        float sum[TOKENS][4] = {{0}};
        for (int64_t k = 0; k < d->columns; k += SPAN8) {
            const int64_t left = d->columns - k;
            const uint8_t *codes = d->row[r].codes + k / 2;
            int8_t even[16] = {0}, odd[16] = {0};
            for (int j = 0; j < 16 && 2 * j < left; j++) even[j] = d->whole[codes[j] & 15], odd[j] = d->whole[codes[j] >> 4];
            for (int m = 0; m < tokens; m++) {
                const int8_t *x = (const int8_t *)d->x[m] + 2 * k;
                const float *scales = (const float *)(x + SPAN8);
                for (int word = 0; word < 4 && 8 * word < left; word++) {
                    int part = 0;
                    for (int j = 4 * word; j < 4 * word + 4; j++) part += even[j] * x[j] + odd[j] * x[16 + j];
                    sum[m][word] += part * (scale_at(d, r, (k + 8 * word) >> d->shift) * scales[word]);
                }
            }
        }
        for (int m = 0; m < tokens; m++)
            sums[r * TOKENS + m] = (sum[m][0] + sum[m][1] + (sum[m][2] + sum[m][3])) * d->step;
        if (d->offset_type) add_offsets(d, r, tokens, sums);
    }
}

#endif
