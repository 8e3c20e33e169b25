/* `dots` for rows of 8-bit codes: converted in registers, 32 columns at a time. x is in column order. A scale is applied
 * to the sum of a block's products, or, in blocks of 16 columns or with offsets, to the codes.
 * One implementation for all instruction sets, on the few operations that they name differently. */

#define STEP8 32  /* columns at a time */
#define AHEAD8 8192  /* prefetch distance in bytes of codes, into L2: rows are consecutive */

/* whether bf16 pairs are multiplied: all 8-bit integers are exact in bf16, and so is E4M3 */
#if defined(WIDE) && defined(PAIRS)
#define NARROW8 1
#else
#define NARROW8 0
#endif

#ifdef WIDE
typedef __m512 Lanes;
#define LANES 16

/* 16 codes, E4M3 by 256 and without NaN; `coding` is a constant after inlining, here and below */
INLINE void sixteen(const uint8_t *at, int coding, Lanes *out) {
    const __m128i codes = _mm_loadu_si128((const __m128i *)at);
    if (coding == E4M3) out[0] = e4m3_256ths(codes);
    else out[0] = _mm512_cvtepi32_ps(coding ? _mm512_cvtepu8_epi32(codes) : _mm512_cvtepi8_epi32(codes));
}
typedef uint32_t Found;
INLINE void find_nan(const uint8_t *at, Found *nan) {
    const __m256i size = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)at), _mm256_set1_epi8(0x7F));
    *nan |= _mm256_cmpeq_epi8_mask(size, _mm256_set1_epi8(0x7F));
}
INLINE int is_found(Found nan) { return nan != 0; }
INLINE void to_memory(float *at, Lanes lanes) { _mm512_storeu_ps(at, lanes); }
INLINE Lanes times(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
INLINE Lanes lanes_at(const float *at) { return _mm512_loadu_ps(at); }
INLINE Lanes all_of(float value) { return _mm512_set1_ps(value); }
INLINE Lanes plus_product(Lanes sum, Lanes a, Lanes b) { return _mm512_fmadd_ps(a, b, sum); }
INLINE float sum_of(Lanes lanes) { return _mm512_reduce_add_ps(lanes); }

#elif defined(AVX2)
typedef __m256 Lanes;
#define LANES 8

INLINE void sixteen(const uint8_t *at, int coding, Lanes *out) {
    if (coding == E4M3) {
        const __m256i half = halves_of_e4m3(_mm_loadu_si128((const __m128i *)at));
        out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(half)), out[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
        return;
    }
    for (int i = 0; i < 2; i++) {
        const __m128i codes = _mm_loadl_epi64((const __m128i *)(at + 8 * i));
        out[i] = _mm256_cvtepi32_ps(coding ? _mm256_cvtepu8_epi32(codes) : _mm256_cvtepi8_epi32(codes));
    }
}
typedef __m256i Found;
INLINE void find_nan(const uint8_t *at, Found *nan) {
    const __m256i size = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)at), _mm256_set1_epi8(0x7F));
    *nan = _mm256_or_si256(*nan, _mm256_cmpeq_epi8(size, _mm256_set1_epi8(0x7F)));
}
INLINE int is_found(Found nan) { return !_mm256_testz_si256(nan, nan); }
INLINE void to_memory(float *at, Lanes lanes) { _mm256_storeu_ps(at, lanes); }
INLINE Lanes times(Lanes a, Lanes b) { return _mm256_mul_ps(a, b); }
INLINE Lanes lanes_at(const float *at) { return _mm256_loadu_ps(at); }
INLINE Lanes all_of(float value) { return _mm256_set1_ps(value); }
INLINE Lanes plus_product(Lanes sum, Lanes a, Lanes b) { return _mm256_fmadd_ps(a, b, sum); }
INLINE float sum_of(Lanes lanes) { return total(lanes); }

#elif defined(__ARM_NEON) && defined(__aarch64__)
typedef float32x4_t Lanes;
#define LANES 4

INLINE void sixteen(const uint8_t *at, int coding, Lanes *out) {
    const uint8x16_t bytes = vld1q_u8(at);
    const int8x16_t codes = vreinterpretq_s8_u8(bytes);
    int16x8_t half[2] = {vmovl_s8(vget_low_s8(codes)), vmovl_s8(vget_high_s8(codes))};
    if (coding == E4M3) {  /* bits of halves */
        for (int i = 0; i < 2; i++) {
            const uint16x8_t bits = vandq_u16(vshlq_n_u16(vreinterpretq_u16_s16(half[i]), 7), vdupq_n_u16(0xBF80));
            const float16x8_t value = vreinterpretq_f16_u16(bits);
            out[2 * i] = vcvt_f32_f16(vget_low_f16(value)), out[2 * i + 1] = vcvt_f32_f16(vget_high_f16(value));
        }
        return;
    }
    if (coding) {
        half[0] = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes)));
        half[1] = vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(bytes)));
    }
    for (int i = 0; i < 2; i++) {
        out[2 * i] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(half[i])));
        out[2 * i + 1] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(half[i])));
    }
}
typedef uint8x16_t Found;
INLINE void find_nan(const uint8_t *at, Found *nan) {
    const uint8x16_t most = vdupq_n_u8(0x7F);
    for (int i = 0; i < 32; i += 16) *nan = vorrq_u8(*nan, vceqq_u8(vandq_u8(vld1q_u8(at + i), most), most));
}
INLINE int is_found(Found nan) { return vmaxvq_u8(nan) != 0; }
INLINE void to_memory(float *at, Lanes lanes) { vst1q_f32(at, lanes); }
INLINE Lanes times(Lanes a, Lanes b) { return vmulq_f32(a, b); }
INLINE Lanes lanes_at(const float *at) { return vld1q_f32(at); }
INLINE Lanes all_of(float value) { return vdupq_n_f32(value); }
INLINE Lanes plus_product(Lanes sum, Lanes a, Lanes b) { return vfmaq_f32(sum, a, b); }
INLINE float sum_of(Lanes lanes) { return vaddvq_f32(lanes); }

#else
typedef struct { float lane[4]; } Lanes;
#define LANES 4

INLINE void sixteen(const uint8_t *at, int coding, Lanes *out) {
    for (int j = 0; j < 16; j++) {
        const uint16_t half = (uint16_t)((at[j] & 0x80) << 8 | (at[j] & 0x7F) << 7);
        out[j / 4].lane[j % 4] = coding == E4M3 ? fp16_value(half) : coding ? at[j] : (int8_t)at[j];
    }
}
typedef int Found;
INLINE void find_nan(const uint8_t *at, Found *nan) {
    for (int j = 0; j < 32; j++) *nan |= (at[j] & 0x7F) == 0x7F;
}
INLINE int is_found(Found nan) { return nan; }
INLINE void to_memory(float *at, Lanes lanes) { memcpy(at, lanes.lane, sizeof lanes.lane); }
INLINE Lanes times(Lanes a, Lanes b) {
    for (int j = 0; j < 4; j++) a.lane[j] *= b.lane[j];
    return a;
}
INLINE Lanes lanes_at(const float *at) { return (Lanes){{at[0], at[1], at[2], at[3]}}; }
INLINE Lanes all_of(float value) { return (Lanes){{value, value, value, value}}; }
INLINE Lanes plus_product(Lanes sum, Lanes a, Lanes b) {
    for (int j = 0; j < 4; j++) sum.lane[j] += a.lane[j] * b.lane[j];
    return sum;
}
INLINE float sum_of(Lanes lanes) { return (lanes.lane[0] + lanes.lane[1]) + (lanes.lane[2] + lanes.lane[3]); }
#endif

/* 16 codes; E4M3 with NaN */
INLINE void sixteen_whole(const uint8_t *at, int coding, Lanes *out) {
    sixteen(at, coding, out);
    if (coding != E4M3) return;
    float lanes[16];
    for (int i = 0; i < 16 / LANES; i++) to_memory(lanes + i * LANES, times(out[i], all_of(256)));
    for (int j = 0; j < 16; j++) if ((at[j] & 0x7F) == 0x7F) lanes[j] = __builtin_nanf("");
    for (int i = 0; i < 16 / LANES; i++) out[i] = lanes_at(lanes + i * LANES);
}

/* out = scales of superblocks of a row, of blocks `at` to `at` + `count` - 1 */
INLINE void scales_of_superblocks(const Dots *d, const Row *row, int64_t at, int64_t count, float *out) {
    const int64_t each = SUPERBLOCK >> d->shift;
    for (int64_t i = 0; i < count; i += each) {
        const float whole = load(row->d, FP16, (at + i) / each);
        const uint8_t *stored = row->scales + at + i;
        if (count - i >= 16 && each == 16) for (int j = 0; j < 16; j++) out[i + j] = stored[j] * whole;
        else for (int64_t j = 0; j < each && i + j < count; j++) out[i + j] = stored[j] * whole;
    }
}

/* out = scales of a row's `columns`, from column `first` on, then a zero */
INLINE void scales_of_bytes(const Dots *d, int r, int64_t first, int64_t columns, float *out) {
    const int64_t at = first >> d->shift, count = columns >> d->shift;
    if (d->scale_type == SUPER) scales_of_superblocks(d, d->row + r, at, count, out);
#if defined(WIDE) || defined(AVX2)
    else scales_of(d, r, first, columns, out);
#else
    else for (int64_t i = 0; i < count; i++) out[i] = scale_at(d, r, at + i);
#endif
    if (d->scale_type != BYTE && d->unit != 1) for (int64_t i = 0; i < count; i++) out[i] *= d->unit;
    out[count] = 0;
}

/* out = offsets of a row's `columns`, from column `first` on, then a zero; zeros as they are without `scales` */
static void offsets_of_bytes(const Dots *d, int r, int64_t first, int64_t columns, const float *scales, float *out) {
    const Row *row = d->row + r;
    const int64_t at = first >> d->shift, count = columns >> d->shift;
    for (int64_t i = 0; i < count; i++) {
        if (d->offset_type == VALUE) out[i] = load(row->offsets, d->scale_type, at + i);
        else if (d->offset_type == ZERO) out[i] = scales ? -(row->offsets[at + i] * scales[i]) : row->offsets[at + i];
        else out[i] = -(load(row->dmin, FP16, ((at + i) << d->shift) / SUPERBLOCK) * row->offsets[at + i]);
    }
    out[count] = 0;
}

/* weight of 32 columns *= scale of each half's block, += its offset */
INLINE void finish_weights(Lanes *weight, const float *scales, const float *offsets, int64_t k, int shift, int offset) {
    for (int i = 0; i < STEP8 / LANES; i++) {
        const int64_t block = (k + i * LANES / 16 * 16) >> shift;
        weight[i] = plus_product(all_of(offset ? offsets[block] : 0), weight[i], all_of(scales[block]));
    }
}

/* 32 columns of weights times x of each token, from column k on: in fp32 */
INLINE void parts_of_bytes(const Dots *d, const Lanes *weight, int64_t k, int tokens, Lanes *part) {
    for (int m = 0; m < tokens; m++) {
        part[m] = all_of(0);
        for (int i = 0; i < STEP8 / LANES; i++)
            part[m] = plus_product(part[m], weight[i], lanes_at((const float *)d->x[m] + k + LANES * i));
    }
}

/* or codes as bf16 pairs; `ones`: the sums of x instead */
INLINE void parts_of_pairs(const Dots *d, const Lanes *weight, int64_t k, int tokens, int ones, Lanes *part) {
#if NARROW8
    const __m512bh both = ones ? (__m512bh)_mm512_set1_epi16(0x3F80) : _mm512_cvtne2ps_pbh(weight[1], weight[0]);
    for (int m = 0; m < tokens; m++)
        part[m] = _mm512_dpbf16_ps(all_of(0), both, (__m512bh)_mm512_loadu_si512((const uint16_t *)d->x[m] + k));
#else
    (void)d, (void)weight, (void)k, (void)tokens, (void)ones, (void)part;
#endif
}

/* numbers of the blocks of 32 columns, from column k on, for the sums of pairs */
INLINE Lanes of_pairs(const float *numbers, int64_t k, int shift) {
#if NARROW8
    return _mm512_mask_blend_ps(0xFF00, all_of(numbers[k >> shift]), all_of(numbers[(k + 16) >> shift]));
#else
    return all_of(numbers[k >> shift]);
#endif
}

/* sums[r * TOKENS + m] of rows r with tokens m; all from `rows` to `coding` are constants after inlining. `finish`: a
 * scale is applied to codes, or to halves of pairs; UNSIGNED: there are offsets */
INLINE void dots_of_steps(const Dots *d, int rows, int tokens, int pairs, int finish, int coding, float *sums) {
    float scales[TILE / 16 + 64], offsets[TILE / 16 + 64];
    uint8_t last[STEP8] = {0};
    const int shift = d->shift, offset = coding == UNSIGNED;
    for (int r = 0; r < rows; r++) {
        Lanes sum[TOKENS], part[TOKENS], weight[STEP8 / LANES];
        Found nan;
        memset(&nan, 0, sizeof nan);
        for (int m = 0; m < tokens; m++) sum[m] = all_of(0);
        for (int64_t first = 0; first < d->columns; first += TILE) {
            const int64_t columns = d->columns - first < TILE ? d->columns - first : TILE;
            scales_of_bytes(d, r, first, columns, scales);
            if (offset) offsets_of_bytes(d, r, first, columns, scales, offsets);
            if (coding == E4M3) for (int64_t i = 0; i < columns >> shift; i++) scales[i] *= 256;
            for (int64_t k = 0; k < columns; k += STEP8) {  /* x is zero in the half beyond an odd number of blocks of 16 */
                const uint8_t *codes = d->row[r].codes + first + k;
                __builtin_prefetch(codes + AHEAD8, 0, 2);
                if (finish && columns - k < STEP8) codes = memcpy(last, codes, 16);  /* nothing may lie behind them */
                if (coding == E4M3) find_nan(codes, &nan);
                for (int half = 0; half < 2; half++) sixteen(codes + 16 * half, coding, weight + 16 / LANES * half);
                Lanes scale = finish && !pairs ? all_of(1) : all_of(scales[k >> shift]);
                if (finish && pairs) scale = of_pairs(scales, k, shift);
                if (finish && !pairs) finish_weights(weight, scales, offsets, k, shift, offset);
                if (pairs) parts_of_pairs(d, weight, first + k, tokens, 0, part);
                else parts_of_bytes(d, weight, first + k, tokens, part);
                for (int m = 0; m < tokens; m++) sum[m] = plus_product(sum[m], part[m], scale);
                if (!pairs || !offset) continue;
                parts_of_pairs(d, weight, first + k, tokens, 1, part);
                for (int m = 0; m < tokens; m++) sum[m] = plus_product(sum[m], part[m], of_pairs(offsets, k, shift));
            }
        }
        for (int m = 0; m < tokens; m++) sums[r * TOKENS + m] = sum_of(sum[m]);
        if (coding == E4M3 && is_found(nan)) for (int m = 0; m < tokens; m++) sums[r * TOKENS + m] = __builtin_nanf("");
    }
}

INLINE void dots_of_bytes(const Dots *d, int rows, int tokens, int pairs, float *sums) {
    if (d->coding == UNSIGNED) dots_of_steps(d, rows, tokens, pairs, 1, UNSIGNED, sums);
    else if (d->coding == E4M3 && d->shift < 5) dots_of_steps(d, rows, tokens, pairs, 1, E4M3, sums);
    else if (d->coding == E4M3) dots_of_steps(d, rows, tokens, pairs, 0, E4M3, sums);
    else if (d->shift < 5) dots_of_steps(d, rows, tokens, pairs, 1, SIGNED, sums);
    else dots_of_steps(d, rows, tokens, pairs, 0, SIGNED, sums);
}
