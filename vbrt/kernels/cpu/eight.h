/* `dots` for rows of 8-bit integers: converted in registers, one scale per block of 32 columns. x is in column order.
 * One implementation for all instruction sets, on the few operations that they name differently. */

#define BLOCK8 32  /* columns per block */
#define AHEAD8 8192  /* prefetch distance in bytes of codes, into L2: rows are consecutive */

/* whether bf16 pairs are multiplied: all 8-bit integers are exact in bf16 */
#if defined(WIDE) && defined(PAIRS)
#define NARROW8 1
#else
#define NARROW8 0
#endif

#ifdef WIDE
typedef __m512 Lanes;
#define LANES 16

INLINE void sixteen(const uint8_t *at, Lanes *out) {
    out[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
}
INLINE Lanes lanes_at(const float *at) { return _mm512_loadu_ps(at); }
INLINE Lanes all_of(float value) { return _mm512_set1_ps(value); }
INLINE Lanes plus_product(Lanes sum, Lanes a, Lanes b) { return _mm512_fmadd_ps(a, b, sum); }
INLINE float sum_of(Lanes lanes) { return _mm512_reduce_add_ps(lanes); }

#elif defined(AVX2)
typedef __m256 Lanes;
#define LANES 8

INLINE void sixteen(const uint8_t *at, Lanes *out) {
    for (int i = 0; i < 2; i++)
        out[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(at + 8 * i))));
}
INLINE Lanes lanes_at(const float *at) { return _mm256_loadu_ps(at); }
INLINE Lanes all_of(float value) { return _mm256_set1_ps(value); }
INLINE Lanes plus_product(Lanes sum, Lanes a, Lanes b) { return _mm256_fmadd_ps(a, b, sum); }
INLINE float sum_of(Lanes lanes) { return total(lanes); }

#elif defined(__ARM_NEON) && defined(__aarch64__)
typedef float32x4_t Lanes;
#define LANES 4

INLINE void sixteen(const uint8_t *at, Lanes *out) {
    const int8x16_t codes = vld1q_s8((const int8_t *)at);
    const int16x8_t half[2] = {vmovl_s8(vget_low_s8(codes)), vmovl_s8(vget_high_s8(codes))};
    for (int i = 0; i < 2; i++) {
        out[2 * i] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(half[i])));
        out[2 * i + 1] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(half[i])));
    }
}
INLINE Lanes lanes_at(const float *at) { return vld1q_f32(at); }
INLINE Lanes all_of(float value) { return vdupq_n_f32(value); }
INLINE Lanes plus_product(Lanes sum, Lanes a, Lanes b) { return vfmaq_f32(sum, a, b); }
INLINE float sum_of(Lanes lanes) { return vaddvq_f32(lanes); }

#else
typedef struct { float lane[4]; } Lanes;
#define LANES 4

INLINE void sixteen(const uint8_t *at, Lanes *out) {
    for (int j = 0; j < 16; j++) out[j / 4].lane[j % 4] = (int8_t)at[j];
}
INLINE Lanes lanes_at(const float *at) { return (Lanes){{at[0], at[1], at[2], at[3]}}; }
INLINE Lanes all_of(float value) { return (Lanes){{value, value, value, value}}; }
INLINE Lanes plus_product(Lanes sum, Lanes a, Lanes b) {
    for (int j = 0; j < 4; j++) sum.lane[j] += a.lane[j] * b.lane[j];
    return sum;
}
INLINE float sum_of(Lanes lanes) { return (lanes.lane[0] + lanes.lane[1]) + (lanes.lane[2] + lanes.lane[3]); }
#endif

/* out = scales of a row's `columns`, from column `first` on */
INLINE void scales_of_bytes(const Dots *d, int r, int64_t first, int64_t columns, float *out) {
#if defined(WIDE) || defined(AVX2)
    scales_of(d, r, first, columns, out);
#else
    for (int64_t k = 0; k < columns; k += BLOCK8) out[k / BLOCK8] = scale_at(d, r, (first + k) / BLOCK8);
#endif
}

/* A block of weights times a block of each token's x, from column k on: in fp32 */
INLINE void parts_of_bytes(const Dots *d, const Lanes *weight, int64_t k, int tokens, Lanes *part) {
    for (int m = 0; m < tokens; m++) {
        part[m] = all_of(0);
        for (int i = 0; i < BLOCK8 / LANES; i++)
            part[m] = plus_product(part[m], weight[i], lanes_at((const float *)d->x[m] + k + LANES * i));
    }
}

/* or as bf16 pairs */
INLINE void parts_of_pairs(const Dots *d, const Lanes *weight, int64_t k, int tokens, Lanes *part) {
#if NARROW8
    const __m512bh both = _mm512_cvtne2ps_pbh(weight[1], weight[0]);
    for (int m = 0; m < tokens; m++)
        part[m] = _mm512_dpbf16_ps(all_of(0), both, (__m512bh)_mm512_loadu_si512((const uint16_t *)d->x[m] + k));
#else
    (void)d, (void)weight, (void)k, (void)tokens, (void)part;
#endif
}

/* sums[r * TOKENS + m] of rows r with tokens m; `rows`, `tokens` and `pairs` are constants after inlining */
INLINE void dots_of_bytes(const Dots *d, int rows, int tokens, int pairs, float *sums) {
    float scales[TILE / BLOCK8 + 64];
    for (int r = 0; r < rows; r++) {
        Lanes sum[TOKENS], part[TOKENS], weight[BLOCK8 / LANES];
        for (int m = 0; m < tokens; m++) sum[m] = all_of(0);
        for (int64_t first = 0; first < d->columns; first += TILE) {
            const int64_t columns = d->columns - first < TILE ? d->columns - first : TILE;
            scales_of_bytes(d, r, first, columns, scales);
            for (int64_t k = 0; k < columns; k += BLOCK8) {
                const uint8_t *codes = d->row[r].codes + first + k;
                __builtin_prefetch(codes + AHEAD8, 0, 2);
                for (int half = 0; half < 2; half++) sixteen(codes + 16 * half, weight + 16 / LANES * half);
                const Lanes scale = all_of(scales[k / BLOCK8]);
                if (pairs) parts_of_pairs(d, weight, first + k, tokens, part);
                else parts_of_bytes(d, weight, first + k, tokens, part);
                for (int m = 0; m < tokens; m++) sum[m] = plus_product(sum[m], part[m], scale);
            }
        }
        for (int m = 0; m < tokens; m++) sums[r * TOKENS + m] = sum_of(sum[m]);
    }
}
