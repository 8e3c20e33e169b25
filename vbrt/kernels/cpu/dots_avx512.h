/* `dots` for AVX-512, on bf16 pairs where the CPU supports them. */
#include <immintrin.h>
#ifdef __AVX512BF16__
#define PAIRS 1  /* bf16 dot products (vdpbf16ps) */
#endif

/* The codes of 128 columns are 16 words of eight; shifted by 4 j bits their lowest four bits are the codes of columns
 * j, 8 + j, 16 + j, ... A block consists of whole words, so a word has one scale. */
#define SPAN 128
#define WORD 8
/* Prefetch distance in bytes of codes, into L2: the few line fill buffers of L1 limit it to half of the memory
 * bandwidth. Rows are consecutive. */
#define AHEAD 8192

/* Values by scale byte: only their upper halves, as they have few significant bits. */
typedef struct { uint16_t halves[256]; } Scales;

typedef struct {
    Row row[2];
    const float *levels;  /* [16] */
    int scale_type, offset_type, coding, shift;  /* a block has 1 << shift columns */
    const uint16_t *halves;  /* [256] by scale byte */
    int e4m3;  /* values are E4M3, computed faster than looked up */
    float unit;
    const void *x[TOKENS];  /* in spans */
    int64_t x_bytes;  /* of a row of them; sums by block follow */
    int64_t columns;
    int form;  /* layout of x */
    int8_t whole[16];  /* integer levels, for int8 inputs */
    float step;
} Dots;

/* out [count, rounded up to 32] = value * unit for `count` scale bytes */
INLINE void look_up(const uint8_t *bytes, int64_t count, const uint16_t *halves, float unit, float *out) {
    __m512i table[8];
    for (int i = 0; i < 8; i++) table[i] = _mm512_loadu_si512(halves + 32 * i);
    for (int64_t i = 0; i < count; i += 32) {
        const __mmask32 here = count - i >= 32 ? ~0u : (1u << (count - i)) - 1;
        const __m512i byte = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(here, bytes + i));
        const __mmask32 bit6 = _mm512_test_epi16_mask(byte, _mm512_set1_epi16(64));
        const __mmask32 bit7 = _mm512_test_epi16_mask(byte, _mm512_set1_epi16(128));
        __m512i quarter[4];
        for (int q = 0; q < 4; q++) quarter[q] = _mm512_permutex2var_epi16(table[2 * q], byte, table[2 * q + 1]);
        const __m512i low = _mm512_mask_mov_epi16(quarter[0], bit6, quarter[1]);
        const __m512i high = _mm512_mask_mov_epi16(quarter[2], bit6, quarter[3]);
        const __m512i half = _mm512_mask_mov_epi16(low, bit7, high);
        const __m256i first = _mm512_castsi512_si256(half), second = _mm512_extracti64x4_epi64(half, 1);
        const __m512 one = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(first), 16));
        const __m512 two = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
        _mm512_storeu_ps(out + i, _mm512_mul_ps(one, _mm512_set1_ps(unit)));
        _mm512_storeu_ps(out + i + 16, _mm512_mul_ps(two, _mm512_set1_ps(unit)));
    }
}

/* values / 256 of 16 E4M3 bytes except NaN: their bits are those of a half */
INLINE __m512 e4m3_256ths(__m128i bytes) {
    const __m256i bits = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7), _mm256_set1_epi16((short)0xBF80));
    return _mm512_cvtph_ps(bits);
}

/* out [count, rounded up to 64] = value * unit for `count` E4M3 bytes; false if one of them is NaN */
INLINE int compute(const uint8_t *bytes, int64_t count, float unit, float *out) {
    const __m512 factor = _mm512_set1_ps(256 * unit);
    const __m512i nan = _mm512_set1_epi8(0x7F);
    __mmask64 found = 0;
    for (int64_t i = 0; i < count; i += 64) {
        const __m512i all = count - i >= 64 ? _mm512_loadu_si512(bytes + i)
                                            : _mm512_maskz_loadu_epi8((1ull << (count - i)) - 1, bytes + i);
        found |= _mm512_cmpeq_epi8_mask(_mm512_and_si512(all, nan), nan);
        _mm512_storeu_ps(out + i, _mm512_mul_ps(e4m3_256ths(_mm512_castsi512_si128(all)), factor));
        _mm512_storeu_ps(out + i + 16, _mm512_mul_ps(e4m3_256ths(_mm512_extracti32x4_epi32(all, 1)), factor));
        _mm512_storeu_ps(out + i + 32, _mm512_mul_ps(e4m3_256ths(_mm512_extracti32x4_epi32(all, 2)), factor));
        _mm512_storeu_ps(out + i + 48, _mm512_mul_ps(e4m3_256ths(_mm512_extracti32x4_epi32(all, 3)), factor));
    }
    return !found;
}

/* 16 numbers of 16 or 32 bits, or bytes, from number `at` on: those that are `here`, and zeros. */
INLINE __m512 sixteen_of(const uint8_t *stored, int type, int64_t at, __mmask16 here) {
    stored += at * SCALE_BYTES[type];
    if (type == FP32) return _mm512_maskz_loadu_ps(here, stored);
    if (type == BYTE) return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(here, stored)));
    const __m256i half = _mm256_maskz_loadu_epi16(here, stored);
    return type == FP16 ? _mm512_cvtph_ps(half) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* The halves of 16 blocks of 32 columns: two superblocks', or the first one's where fewer than nine blocks are `here`. */
INLINE __m512 superblocks_of(const uint8_t *halves, int64_t at, __mmask16 here) {
    const __m512i each = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m128 both = _mm_cvtph_ps(_mm_maskz_loadu_epi16(here >> 8 ? 3 : 1, halves + at / 8 * 2));
    return _mm512_permutexvar_ps(each, _mm512_castps128_ps512(both));
}

INLINE __mmask16 first_of(int64_t count) { return count >= 16 ? 0xFFFF : (1u << count) - 1; }

/* out = scales of a row's `columns`, from column `first` on; prefetches those of later rows, like their codes */
static __attribute__((noinline)) void scales_of(const Dots *d, int r, int64_t first, int64_t columns, float *out) {
    const int type = d->scale_type;
    const int64_t count = columns >> d->shift, width = SCALE_BYTES[type];
    const uint8_t *stored = d->row[r].scales + (first >> d->shift) * width;
    const uint8_t *ahead = stored + (2 * AHEAD >> d->shift) * width;
    for (int64_t i = 0; i < count * width; i += 64) _mm_prefetch((const char *)ahead + i, _MM_HINT_T1);
    if (type == BYTE) {
        if (!d->e4m3 || !compute(stored, count, d->unit, out)) look_up(stored, count, d->halves, d->unit, out);
        return;
    }
    for (int64_t i = 0; i < count; i += 16) {
        const __mmask16 here = first_of(count - i);
        __m512 scale = sixteen_of(stored, type == SUPER ? BYTE : type, i, here);
        if (type == SUPER) scale = _mm512_mul_ps(scale, superblocks_of(d->row[r].d + first / SUPERBLOCK * 2, i, here));
        _mm512_storeu_ps(out + i, scale);
    }
}

/* Offsets of 16 blocks of row r from block `at` on, `scales` being theirs; zeros as they are for panels, which have none. */
INLINE __m512 offsets_at(const Dots *d, int r, int64_t at, __mmask16 here, const float *scales) {
    const Row *row = d->row + r;
    if (d->offset_type == VALUE) return sixteen_of(row->offsets, d->scale_type, at, here);
    const __m512 number = sixteen_of(row->offsets, BYTE, at, here), none = _mm512_setzero_ps();
    if (d->offset_type == MIN) return _mm512_mul_ps(number, _mm512_sub_ps(none, superblocks_of(row->dmin, at, here)));
    return scales ? _mm512_mul_ps(number, _mm512_sub_ps(none, _mm512_maskz_loadu_ps(here, scales))) : number;
}

/* out [count, rounded up to 16] = offsets of a row's `columns`, from column `first` on, for panels */
static void offsets_of(const Dots *d, int r, int64_t first, int64_t columns, float *out) {
    const int64_t count = columns >> d->shift;
    for (int64_t i = 0; i < count; i += 16)
        _mm512_storeu_ps(out + i, offsets_at(d, r, (first >> d->shift) + i, first_of(count - i), NULL));
}

/* sum += offsets of a row's `columns`, from column `first` on, times sums of each token's x; prefetches those of later rows */
INLINE void add_offsets(const Dots *d, int r, int64_t first, int64_t columns, const float *scales, int tokens, __m512 *sum) {
    const int64_t count = columns >> d->shift, from = first >> d->shift;
    const int width = d->offset_type == VALUE ? SCALE_BYTES[d->scale_type] : 1;
    const uint8_t *ahead = d->row[r].offsets + (from + (2 * AHEAD >> d->shift)) * width;
    for (int64_t i = 0; i < count * width; i += 64) _mm_prefetch((const char *)ahead + i, _MM_HINT_T1);
    for (int64_t i = 0; i < count; i += 16) {
        const __m512 offset = offsets_at(d, r, from + i, first_of(count - i), scales + i);
        for (int m = 0; m < tokens; m++) {
            const float *sums = (const float *)((const char *)d->x[m] + d->x_bytes) + from + i;
            sum[m] = _mm512_fmadd_ps(offset, _mm512_loadu_ps(sums), sum[m]);
        }
    }
}

/* Sums of a word's eight products, of levels and inputs of even columns and of odd ones. */
INLINE __m512i sums_of_int8(__m512i even, __m512i odd, const char *x) {
    const __m512i x0 = _mm512_loadu_si512(x), x1 = _mm512_loadu_si512(x + 64);
#ifdef __AVX512VNNI__
    /* vpdpbusd needs one unsigned operand: levels are offset by 127, compensated in the initial sums */
    return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_loadu_si512(x + 128), even, x0), odd, x1);
#else
    /* pairs of products are below 2^15: both operands are at most 127 */
    const __m512i zero = _mm512_setzero_si512(), ones = _mm512_set1_epi16(1);
    const __m512i signs0 = _mm512_mask_sub_epi8(x0, _mm512_movepi8_mask(even), zero, x0);
    const __m512i signs1 = _mm512_mask_sub_epi8(x1, _mm512_movepi8_mask(odd), zero, x1);
    const __m512i sum0 = _mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_abs_epi8(even), signs0), ones);
    return _mm512_add_epi32(sum0, _mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_abs_epi8(odd), signs1), ones));
#endif
}

/* Lookup table of levels by code for a layout: in 128-bit lanes, or in 256-bit halves for bf16 pairs. */
INLINE __m512i table_of(const Dots *d, int form) {
    if (form == AS_INT8) {
        const __m128i whole = _mm_loadu_si128((const __m128i *)d->whole);
#ifdef __AVX512VNNI__
        return _mm512_broadcast_i32x4(_mm_add_epi8(whole, _mm_set1_epi8(STEPS)));
#else
        return _mm512_broadcast_i32x4(whole);
#endif
    }
    const __m512i upper = _mm512_srli_epi32(_mm512_loadu_si512(d->levels), 16);
    const __m512i halves = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(upper));
    return _mm512_shuffle_i64x2(halves, halves, 0x44);  /* twice */
}

/* Products of a span of codes with one span of each token's x: a lane sums a word's eight columns. `form` is a constant
 * after inlining. */
INLINE void parts_of(const Dots *d, __m512i codes, int64_t at, int tokens, int form, __m512 levels, __m512i table,
                     __m512 *part) {
    if (form == AS_INT8) {
        const __m512i four = _mm512_set1_epi8(15);
        const __m512i even = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, four));
        const __m512i odd = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(codes, 4), four));
        for (int m = 0; m < tokens; m++) {
            const char *x = (const char *)d->x[m] + 2 * at;
            const __m512 sums = _mm512_cvtepi32_ps(sums_of_int8(even, odd, x));
            part[m] = _mm512_mul_ps(sums, _mm512_loadu_ps((const float *)(x + 192)));
        }
    }
    if (form == AS_FP32) {
        __m512 level[WORD];
        /* vpermps uses only the lowest four bits of an index */
        for (int j = 0; j < WORD; j++) level[j] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4 * j), levels);
        for (int m = 0; m < tokens; m++) {
            const float *x = (const float *)d->x[m] + at;
            __m512 other = _mm512_mul_ps(level[1], _mm512_loadu_ps(x + 16));  /* two chains halve the latency */
            part[m] = _mm512_mul_ps(level[0], _mm512_loadu_ps(x));
            for (int j = 2; j < WORD; j += 2) {
                part[m] = _mm512_fmadd_ps(level[j], _mm512_loadu_ps(x + 16 * j), part[m]);
                other = _mm512_fmadd_ps(level[j + 1], _mm512_loadu_ps(x + 16 * j + 16), other);
            }
            part[m] = _mm512_add_ps(part[m], other);
        }
    }
#ifdef PAIRS
    if (form == AS_BF16) {
        __m512i level[WORD / 2];  /* vpermw uses five bits: two copies of the levels */
        for (int j = 0; j < WORD / 2; j++) level[j] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * j), table);
        for (int m = 0; m < tokens; m++) {
            const uint16_t *x = (const uint16_t *)d->x[m] + at;
            part[m] = _mm512_setzero_ps();
            for (int j = 0; j < WORD / 2; j++)
                part[m] = _mm512_dpbf16_ps(part[m], (__m512bh)level[j], (__m512bh)_mm512_loadu_si512(x + 32 * j));
        }
    }
#endif
}

INLINE void dots_as(const Dots *d, int rows, int tokens, int form, float *sums) {
    const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i block_of = _mm512_srli_epi32(iota, d->shift - 3);
    const __m512 levels = _mm512_loadu_ps(d->levels);
    const __m512i by_code = table_of(d, form);
    __m512 sum[2][TOKENS], part[TOKENS];
    _Alignas(64) float scales[2][TILE / 16 + 64];
    const int shift = d->shift;
    for (int r = 0; r < rows; r++)
        for (int m = 0; m < tokens; m++) sum[r][m] = _mm512_setzero_ps();
    for (int64_t first = 0; first < d->columns; first += TILE) {
        const int64_t columns = d->columns - first < TILE ? d->columns - first : TILE;
        for (int r = 0; r < rows; r++) scales_of(d, r, first, columns, scales[r]);
        const int64_t spans = columns / SPAN;
        for (int64_t i = 0; i < spans + (columns % SPAN > 0); i++) {
            const int64_t k = i * SPAN;
            for (int r = 0; r < rows; r++) {
                const uint8_t *at = d->row[r].codes + (first + k) / 2;
                _mm_prefetch((const char *)at + AHEAD, _MM_HINT_T1);
                const __m512i codes = i < spans ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi32((1 << columns % SPAN / WORD) - 1, at);
                /* loaded as they were stored, 16 scales at a time: other loads would wait for the stores */
                const __m512i order = _mm512_add_epi32(block_of, _mm512_set1_epi32((int)(k >> shift)));
                const __m512 scale = _mm512_permutexvar_ps(order, _mm512_load_ps(scales[r] + (k >> shift & -16)));
                parts_of(d, codes, first + k, tokens, form, levels, by_code, part);
                for (int m = 0; m < tokens; m++) sum[r][m] = _mm512_fmadd_ps(part[m], scale, sum[r][m]);
            }
        }
        for (int r = 0; r < rows && d->offset_type; r++) add_offsets(d, r, first, columns, scales[r], tokens, sum[r]);
    }
    for (int r = 0; r < rows; r++)
        for (int m = 0; m < tokens; m++)
            sums[r * TOKENS + m] = _mm512_reduce_add_ps(sum[r][m]) * (form == AS_INT8 ? d->step : 1);
}

INLINE void dots(const Dots *d, int rows, int tokens, float *sums) {
    if (d->form == AS_INT8) dots_as(d, rows, tokens, AS_INT8, sums);
    else if (d->form == AS_BF16) dots_as(d, rows, tokens, AS_BF16, sums);
    else dots_as(d, rows, tokens, AS_FP32, sums);
}

static int are_e4m3(const float *values) {
    int same = 1;
    for (int i = 0; i < 256; i += 16) {
        const __m512i bytes = _mm512_add_epi32(_mm512_set1_epi32(i), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
        const __m512 computed = _mm512_mul_ps(e4m3_256ths(_mm512_cvtepi32_epi8(bytes)), _mm512_set1_ps(256));
        const __mmask16 looked_at = i % 128 == 112 ? 0x7FFF : 0xFFFF;  /* except NaN */
        same = same && _mm512_cmp_ps_mask(computed, _mm512_loadu_ps(values + i), _CMP_EQ_OQ) >= looked_at;
    }
    return same;
}

static void fill_scales(Dots *d, const float *values, float unit, Scales *scales) {
    const int bytes = d->scale_type == BYTE;
    for (int i = 0; i < 256 && bytes; i += 16)
        _mm256_storeu_si256((__m256i *)(scales->halves + i),
                            _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_loadu_si512(values + i), 16)));
    d->halves = scales->halves, d->unit = unit, d->e4m3 = bytes && are_e4m3(values);
}

/* transpose to v[j] = columns j, 8 + j, 16 + j, ... of 128 */
INLINE void deal(__m512 *v) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (int step = 0; step < 3; step++) {
        __m512 to[WORD];
        for (int i = 0; i < WORD / 2; i++) {
            to[i] = _mm512_permutex2var_ps(v[2 * i], even, v[2 * i + 1]);
            to[WORD / 2 + i] = _mm512_permutex2var_ps(v[2 * i], odd, v[2 * i + 1]);
        }
        for (int i = 0; i < WORD; i++) v[i] = to[i];
    }
}

/* Quantize a transposed span of x to int8: 64 even columns, 64 odd ones, the initial sums of words, and their scales;
 * words = sums of what was quantized. */
INLINE void round_span(const __m512 *v, char *to, float *words) {
    __m512 largest = _mm512_setzero_ps(), zero = largest;
    for (int j = 0; j < WORD; j++) {
        largest = _mm512_max_ps(largest, _mm512_abs_ps(v[j]));
        zero = _mm512_fmadd_ps(v[j], _mm512_setzero_ps(), zero);  /* NaN if one is not finite */
    }
    const __mmask16 finite = _mm512_cmp_ps_mask(zero, zero, _CMP_ORD_Q)
        & _mm512_cmp_ps_mask(largest, _mm512_set1_ps(SMALLEST), _CMP_GE_OQ);
    const __m512 per_one = _mm512_maskz_div_ps(finite, _mm512_set1_ps(STEPS), largest);
    __m512i bytes[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()}, sum = bytes[0];
    for (int j = 0; j < WORD; j++) {
        const __m512i near = _mm512_maskz_cvtps_epi32(finite, _mm512_mul_ps(v[j], per_one));
        const __m512i byte = _mm512_and_si512(near, _mm512_set1_epi32(255));
        bytes[j & 1] = _mm512_or_si512(bytes[j & 1], _mm512_slli_epi32(byte, j / 2 * 8));
        sum = _mm512_sub_epi32(sum, near);
    }
    _mm512_storeu_si512(to, bytes[0]);
    _mm512_storeu_si512(to + 64, bytes[1]);
    _mm512_storeu_si512(to + 128, _mm512_sub_epi32(_mm512_slli_epi32(sum, 7), sum));  /* 127 times */
    const __m512 scale = _mm512_fmadd_ps(largest, _mm512_set1_ps(1.0f / STEPS), zero);
    _mm512_storeu_ps(to + 192, scale);
    _mm512_storeu_ps(words, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_setzero_si512(), sum)), scale));
}

/* Convert a span of x: to int8, to bf16 (if exact), or to fp32; words = sums of words. */
INLINE void spread_span(const float *span, int form, void *to, float *words) {
    __m512 v[WORD];
    for (int j = 0; j < WORD; j++) v[j] = _mm512_loadu_ps(span + 16 * j);
    deal(v);
    if (form == AS_INT8) {
        round_span(v, to, words);
        return;
    }
    __m512 sum = v[0];
    for (int j = 1; j < WORD; j++) sum = _mm512_add_ps(sum, v[j]);
    _mm512_storeu_ps(words, sum);
    if (form == AS_FP32)
        for (int j = 0; j < WORD; j++) _mm512_storeu_ps((float *)to + 16 * j, v[j]);
    else
        for (int j = 0; j < WORD / 2; j++) {
            const __m512i low = _mm512_srli_epi32((__m512i)v[j], 16);
            _mm512_storeu_si512((char *)to + 64 * j, _mm512_mask_mov_epi16(low, 0xAAAAAAAA, (__m512i)v[j + 4]));
        }
}
