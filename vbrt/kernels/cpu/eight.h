/* `dots` for rows of 8-bit codes, and of 4-bit ones under a FLOAT_ZERO: converted in registers, 32 columns at a time. x is
 * in column order. A scale is applied to the sum of a block's products, or, in blocks of 16 columns or with offsets that
 * are added, to the codes.
 * One implementation for all instruction sets, on the few operations that they name differently. */

#define STEP8 32  /* columns at a time */
#define AHEAD8 8192  /* prefetch distance in bytes of codes, into L2: rows are consecutive */

/* whether bf16 pairs are multiplied: all 8-bit integers are exact in bf16, and so is E4M3 */
#if defined(WIDE) && defined(PAIRS)
#define NARROW8 1
#else
#define NARROW8 0
#endif

#if defined(WIDE) || defined(AVX2)
/* 16 codes of 4 bits, as bytes */
INLINE __m128i nibbles(const uint8_t *at) {
    const __m128i codes = _mm_loadl_epi64((const __m128i *)at), four = _mm_set1_epi8(15);
    return _mm_unpacklo_epi8(_mm_and_si128(codes, four), _mm_and_si128(_mm_srli_epi16(codes, 4), four));
}
#endif

#ifdef WIDE
typedef __m512 Lanes;
#define LANES 16

/* 16 codes, E4M3 by 256 and without NaN; `coding` is a constant after inlining, here and below */
INLINE void sixteen(const uint8_t *at, int coding, Lanes *out) {
    const __m128i codes = coding == NIBBLES ? nibbles(at) : _mm_loadu_si128((const __m128i *)at);
    if (coding == E4M3) out[0] = e4m3_256ths(codes);
    else out[0] = _mm512_cvtepi32_ps(coding == SIGNED ? _mm512_cvtepi8_epi32(codes) : _mm512_cvtepu8_epi32(codes));
}
typedef uint32_t Found;
INLINE void find_nan(const uint8_t *at, Found *nan) {
    const __m256i size = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)at), _mm256_set1_epi8(0x7F));
    *nan |= _mm256_cmpeq_epi8_mask(size, _mm256_set1_epi8(0x7F));
}
INLINE int is_found(Found nan) { return nan != 0; }
INLINE void to_memory(float *at, Lanes lanes) { _mm512_storeu_ps(at, lanes); }
INLINE Lanes times(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
INLINE Lanes minus(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
INLINE Lanes to_fp16(Lanes lanes) { return _mm512_cvtph_ps(_mm512_cvtps_ph(lanes, _MM_FROUND_TO_NEAREST_INT)); }
INLINE Lanes to_bf16(Lanes lanes) {
    const __m512i bits = _mm512_castps_si512(lanes), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i near = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    return _mm512_castsi512_ps(_mm512_and_si512(near, _mm512_set1_epi32((int)0xFFFF0000)));
}
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
    const __m128i both = coding == NIBBLES ? nibbles(at) : _mm_setzero_si128();
    for (int i = 0; i < 2; i++) {
        const __m128i codes = coding != NIBBLES ? _mm_loadl_epi64((const __m128i *)(at + 8 * i)) : i ? _mm_srli_si128(both, 8) : both;
        out[i] = _mm256_cvtepi32_ps(coding == SIGNED ? _mm256_cvtepi8_epi32(codes) : _mm256_cvtepu8_epi32(codes));
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
INLINE Lanes minus(Lanes a, Lanes b) { return _mm256_sub_ps(a, b); }
INLINE Lanes to_fp16(Lanes lanes) { return _mm256_cvtph_ps(_mm256_cvtps_ph(lanes, _MM_FROUND_TO_NEAREST_INT)); }
INLINE Lanes to_bf16(Lanes lanes) {
    const __m256i bits = _mm256_castps_si256(lanes), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i near = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    return _mm256_castsi256_ps(_mm256_and_si256(near, _mm256_set1_epi32((int)0xFFFF0000)));
}
INLINE Lanes lanes_at(const float *at) { return _mm256_loadu_ps(at); }
INLINE Lanes all_of(float value) { return _mm256_set1_ps(value); }
INLINE Lanes plus_product(Lanes sum, Lanes a, Lanes b) { return _mm256_fmadd_ps(a, b, sum); }
INLINE float sum_of(Lanes lanes) { return total(lanes); }

#elif defined(__ARM_NEON) && defined(__aarch64__)
typedef float32x4_t Lanes;
#define LANES 4

INLINE void sixteen(const uint8_t *at, int coding, Lanes *out) {
    const uint8x8_t two = vld1_u8(at), low = vand_u8(two, vdup_n_u8(15)), high = vshr_n_u8(two, 4);
    const uint8x16_t bytes = coding == NIBBLES ? vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high)) : vld1q_u8(at);
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
    if (coding != SIGNED) {
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
INLINE Lanes minus(Lanes a, Lanes b) { return vsubq_f32(a, b); }
INLINE Lanes to_fp16(Lanes lanes) { return vcvt_f32_f16(vcvt_f16_f32(lanes)); }
INLINE Lanes to_bf16(Lanes lanes) {
    const uint32x4_t bits = vreinterpretq_u32_f32(lanes), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t near = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd);
    return vreinterpretq_f32_u32(vandq_u32(near, vdupq_n_u32(0xFFFF0000)));
}
INLINE Lanes lanes_at(const float *at) { return vld1q_f32(at); }
INLINE Lanes all_of(float value) { return vdupq_n_f32(value); }
INLINE Lanes plus_product(Lanes sum, Lanes a, Lanes b) { return vfmaq_f32(sum, a, b); }
INLINE float sum_of(Lanes lanes) { return vaddvq_f32(lanes); }

#else
typedef struct { float lane[4]; } Lanes;
#define LANES 4

INLINE void sixteen(const uint8_t *at, int coding, Lanes *out) {
    for (int j = 0; j < 16; j++) {
        const uint8_t code = coding == NIBBLES ? at[j / 2] >> j % 2 * 4 & 15 : at[j];
        const uint16_t half = (uint16_t)((code & 0x80) << 8 | (code & 0x7F) << 7);
        out[j / 4].lane[j % 4] = coding == E4M3 ? fp16_value(half) : coding == SIGNED ? (int8_t)code : code;
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
INLINE Lanes minus(Lanes a, Lanes b) {
    for (int j = 0; j < 4; j++) a.lane[j] -= b.lane[j];
    return a;
}
INLINE Lanes to_fp16(Lanes lanes) {
    for (int j = 0; j < 4; j++) lanes.lane[j] = fp16_value((uint16_t)fp16_bits(lanes.lane[j]));
    return lanes;
}
INLINE Lanes to_bf16(Lanes lanes) {
    for (int j = 0; j < 4; j++) lanes.lane[j] = bf16_value((uint16_t)bf16_bits(lanes.lane[j]));
    return lanes;
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

/* codes minus a zero point, rounded to a type of numbers */
INLINE Lanes difference(Lanes codes, float zero, int type) {
    const Lanes exact = minus(codes, all_of(zero));
    return type == FP16 ? to_fp16(exact) : type == BF16 ? to_bf16(exact) : exact;
}

INLINE void sixteen_differences(const uint8_t *at, int coding, float zero, int type, Lanes *out) {
    sixteen(at, coding, out);
    for (int i = 0; i < 16 / LANES; i++) out[i] = difference(out[i], zero, type);
}

/* -- Table: the differences of the codes 0 to 15 and a zero point, rounded to FP16 or BF16; looked up by 32 codes */

#ifdef WIDE
typedef __m512 Table;
INLINE Table differences_of(float zero, int type) {
    return difference(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), zero, type);
}
INLINE void look_up_differences(Table table, const uint8_t *at, int type, Lanes *out) {
    for (int i = 0; i < 2; i++) out[i] = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(nibbles(at + 8 * i)), table);
}

#elif defined(AVX2)
typedef struct { __m128i low, high; } Table;  /* bytes of 16-bit numbers */
INLINE Table differences_of(float zero, int type) {
    const int fifth = type == FP16 ? 4 : 8;  /* two vectors of floats are packed by lanes of 128 bits */
    const Lanes codes = _mm256_setr_ps(0, 1, 2, 3, fifth, fifth + 1, fifth + 2, fifth + 3);
    const Lanes one = minus(codes, all_of(zero)), two = minus(_mm256_add_ps(codes, all_of(12 - fifth)), all_of(zero));
    const __m256i words = type == FP16 ? _mm256_set_m128i(_mm256_cvtps_ph(two, 0), _mm256_cvtps_ph(one, 0))
                          : _mm256_packus_epi32(_mm256_srli_epi32(_mm256_castps_si256(to_bf16(one)), 16),
                                                _mm256_srli_epi32(_mm256_castps_si256(to_bf16(two)), 16));
    const __m256i low = _mm256_and_si256(words, _mm256_set1_epi16(0xFF)), high = _mm256_srli_epi16(words, 8);
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0xD8);
    return (Table){_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)};
}
INLINE void look_up_differences(Table table, const uint8_t *at, int type, Lanes *out) {
    /* bytes of columns 0 to 7 and 16 to 23, then the others; or 0 to 3, 8 to 11, 16 to 19 and 24 to 27, then the others */
    const __m256i halves = _mm256_setr_epi8(0, -1, 1, -1, 2, -1, 3, -1, 8, -1, 9, -1, 10, -1, 11, -1,
                                            4, -1, 5, -1, 6, -1, 7, -1, 12, -1, 13, -1, 14, -1, 15, -1);
    const __m256i quarters = _mm256_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1,
                                              2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1);
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)at)), none = _mm256_setzero_si256();
    const __m256i two = _mm256_shuffle_epi8(both, type == FP16 ? halves : quarters);
    const __m256i codes = _mm256_and_si256(_mm256_or_si256(two, _mm256_slli_epi16(two, 4)), _mm256_set1_epi8(15));
    const __m256i low = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table.low), codes);
    const __m256i high = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table.high), codes);
    for (int i = 0; i < 2; i++, out += 2) {
        const __m256i words = i ? _mm256_unpackhi_epi8(low, high) : _mm256_unpacklo_epi8(low, high);
        if (type == FP16) {
            out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(words)), out[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1));
        } else {
            out[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(none, words));
            out[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, words));
        }
    }
}

#else
typedef float Table;  /* the zero point: differences are computed for each code */
INLINE Table differences_of(float zero, int type) {
    (void)type;
    return zero;
}
INLINE void look_up_differences(Table table, const uint8_t *at, int type, Lanes *out) {
    for (int i = 0; i < 2; i++) sixteen_differences(at + 8 * i, NIBBLES, table, type, out + 16 / LANES * i);
}
#endif

static void fill_tables_of(const float *zeros, int64_t count, int type, Table *tables) {
    if (type == FP16) for (int64_t i = 0; i < count; i++) tables[i] = differences_of(zeros[i], FP16);
    else for (int64_t i = 0; i < count; i++) tables[i] = differences_of(zeros[i], BF16);
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
        if (d->offset_type == VALUE || d->offset_type == FLOAT_ZERO) out[i] = load(row->offsets, d->scale_type, at + i);
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
 * scale is applied to codes, or to halves of pairs; UNSIGNED: there are offsets, from DIFFERENCES on: zero points */
INLINE void dots_of_steps(const Dots *d, int rows, int tokens, int pairs, int finish, int coding, float *sums) {
    float scales[TILE / 16 + 64], offsets[TILE / 16 + 64];
    uint8_t last[STEP8] = {0};
    Table tables[TILE / STEP8];
    const int shift = d->shift, offset = coding == UNSIGNED, zero = coding >= DIFFERENCES;
    const int bits = coding == NIBBLES ? 4 : 8, tabled = coding == NIBBLES && !finish, type = d->scale_type;
    for (int r = 0; r < rows; r++) {
        Lanes sum[TOKENS], part[TOKENS], weight[STEP8 / LANES];
        Found nan;
        memset(&nan, 0, sizeof nan);
        for (int m = 0; m < tokens; m++) sum[m] = all_of(0);
        for (int64_t first = 0; first < d->columns; first += TILE) {
            const int64_t columns = d->columns - first < TILE ? d->columns - first : TILE;
            scales_of_bytes(d, r, first, columns, scales);
            if (offset || zero) offsets_of_bytes(d, r, first, columns, scales, offsets);
            if (tabled) fill_tables_of(offsets, columns >> shift, type, tables);
            if (coding == E4M3) for (int64_t i = 0; i < columns >> shift; i++) scales[i] *= 256;
            for (int64_t k = 0; k < columns; k += STEP8) {  /* x is zero in the half beyond an odd number of blocks of 16 */
                const uint8_t *codes = d->row[r].codes + code_bytes(first + k, bits);
                __builtin_prefetch(codes + AHEAD8, 0, 2);
                if (finish && columns - k < STEP8) codes = memcpy(last, codes, 2 * bits);  /* nothing may lie behind them */
                if (coding == E4M3) find_nan(codes, &nan);
                if (tabled) look_up_differences(tables[k >> shift], codes, type, weight);
                for (int half = 0; half < 2 && !tabled; half++) {
                    const uint8_t *at = codes + code_bytes(16 * half, bits);
                    Lanes *here = weight + 16 / LANES * half;
                    if (zero) sixteen_differences(at, coding, offsets[(k + 16 * half) >> shift], type, here);
                    else sixteen(at, coding, here);
                }
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

/* the same under a FLOAT_ZERO, in functions of their own: inlined with all others, sums are not in registers */
#define DIFFERENCES_OF(tokens) \
    static __attribute__((noinline)) void dots_of_differences_##tokens(const Dots *d, int rows, float *sums) { \
        const int small = d->shift < 5; \
        if (d->coding == DIFFERENCES && small) dots_of_steps(d, rows, tokens, 0, 1, DIFFERENCES, sums); \
        else if (d->coding == DIFFERENCES) dots_of_steps(d, rows, tokens, 0, 0, DIFFERENCES, sums); \
        else if (small || d->scale_type == FP32) dots_of_steps(d, rows, tokens, 0, 1, NIBBLES, sums); \
        else dots_of_steps(d, rows, tokens, 0, 0, NIBBLES, sums); \
    }
DIFFERENCES_OF(1)
DIFFERENCES_OF(2)
DIFFERENCES_OF(4)

INLINE void dots_of_bytes(const Dots *d, int rows, int tokens, int pairs, float *sums) {
    if (d->coding == UNSIGNED) dots_of_steps(d, rows, tokens, pairs, 1, UNSIGNED, sums);
    else if (d->coding >= DIFFERENCES && tokens == 4) dots_of_differences_4(d, rows, sums);
    else if (d->coding >= DIFFERENCES && tokens == 2) dots_of_differences_2(d, rows, sums);
    else if (d->coding >= DIFFERENCES) dots_of_differences_1(d, rows, sums);
    else if (d->coding == E4M3 && d->shift < 5) dots_of_steps(d, rows, tokens, pairs, 1, E4M3, sums);
    else if (d->coding == E4M3) dots_of_steps(d, rows, tokens, pairs, 0, E4M3, sums);
    else if (d->shift < 5) dots_of_steps(d, rows, tokens, pairs, 1, SIGNED, sums);
    else dots_of_steps(d, rows, tokens, pairs, 0, SIGNED, sums);
}
