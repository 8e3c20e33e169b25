/* `dots` for AVX2 with FMA. A level's upper two bytes, which are all of E2M1's, are two lookups by 32 codes; two more
 * give the lower bytes of others. Lookups and unpacking work within 128-bit lanes: the lower lane has columns 0 to 31.
 */
#include <immintrin.h>

/* 32 bytes of codes. As fp32, x is dealt to eight vectors: vector 4 h + 2 o + e has column 16 h + 8 e + 2 j + o of each
 * lane in element j, so a lane has one scale. As int8, to 32 even columns, 32 odd ones, and per word of eight columns, which is
 * one 32-bit lane, the initial sum and the scale. As fixed point of 16 bits to the upper bytes of even columns and of odd
 * ones, the lower bytes of both, initial sums and scales: a step is 2^-15 of the largest of a word's columns, so results
 * differ by about 1e-5 of their size, where bf16 and fp16 round by 2e-3 and 3e-4. */
#define SPAN 64
#define WORD 8
#define ROWS 4  /* rows of a linear layer together: their scales are stored first, since loads just behind would wait */
#define AHEAD 4096  /* prefetch distance in bytes of codes, into L2: rows are consecutive */

/* int8 levels are looked up as unsigned numbers, compensated in the initial sums: products need no signs then */
#ifdef __AVXVNNI__
#define OFFSET STEPS
#else
#define OFFSET SMALL
#endif
/* of levels: those that are their codes; offset ones; others */
enum { CODES, SMALL_LEVELS, ANY_LEVELS };
#define SMALL 16  /* offset of small levels, -16 to 15: two pairs of products with 128 fit 16 bits */
#define FIXED_STEPS 32639  /* largest number of two signed bytes: 127 * 256 + 127 */
#define FIXED_BYTES 3  /* per column */

typedef struct { uint8_t bytes[4][16]; } Scales;  /* of the levels, the highest last */

typedef struct {
    Row row[ROWS];
    const float *levels;  /* [16] */
    int scale_type, offset_type, coding, shift;  /* a block has 1 << shift columns */
    const float *values;  /* [256] by scale byte */
    float unit;
    int e4m3;  /* values are E4M3, computed faster than looked up */
    const uint8_t (*bytes)[16];
    const void *x[TOKENS];  /* in spans */
    int64_t x_bytes;  /* of a row of them; sums by block follow */
    int64_t columns;
    int upper;  /* levels are exact in bf16: the upper two bytes suffice */
    int form;  /* layout of x */
    int8_t whole[16];  /* integer levels, for int8 inputs */
    float step;
} Dots;

/* values / 256 of 16 E4M3 bytes except NaN, as fp16: their bits are those of a half */
INLINE __m256i halves_of_e4m3(__m128i bytes) {
    return _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7), _mm256_set1_epi16((short)0xBF80));
}

static int are_e4m3(const float *values) {
    const __m128i iota = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    int differ = 0;
    for (int i = 0; i < 256; i += 16) {
        const __m256i halves = halves_of_e4m3(_mm_add_epi8(iota, _mm_set1_epi8((char)i)));
        const __m128i half[2] = {_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)};
        for (int j = 0; j < 2; j++) {
            const __m256 computed = _mm256_mul_ps(_mm256_cvtph_ps(half[j]), _mm256_set1_ps(256));
            const __m256 other = _mm256_cmp_ps(computed, _mm256_loadu_ps(values + i + 8 * j), _CMP_NEQ_UQ);
            differ |= _mm256_movemask_ps(other) & (i % 128 == 112 && j ? 0x7F : 0xFF);  /* except NaN */
        }
    }
    return !differ;
}

static void fill_scales(Dots *d, const float *values, float unit, Scales *scales) {
    d->upper = 1;
    for (int code = 0; code < 16; code++) {
        uint32_t bits;
        memcpy(&bits, d->levels + code, 4);
        for (int i = 0; i < 4; i++) scales->bytes[i][code] = (uint8_t)(bits >> 8 * i);
        d->upper = d->upper && !(bits & 0xFFFF);
    }
    d->bytes = (const uint8_t(*)[16])scales->bytes;
    d->values = values, d->unit = unit, d->e4m3 = d->scale_type == BYTE && are_e4m3(values);
}

/* out = value * unit for a multiple of 16 E4M3 bytes; false if one of them is NaN */
INLINE int compute(const uint8_t *bytes, int64_t count, float unit, float *out) {
    const __m256 factor = _mm256_set1_ps(256 * unit);
    const __m128i nan = _mm_set1_epi8(0x7F);
    __m128i found = _mm_setzero_si128();
    for (int64_t i = 0; i < count; i += 16) {
        const __m128i all = _mm_loadu_si128((const __m128i *)(bytes + i));
        const __m256i halves = halves_of_e4m3(all);
        found = _mm_or_si128(found, _mm_cmpeq_epi8(_mm_and_si128(all, nan), nan));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), factor));
        _mm256_storeu_ps(out + i + 8, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), factor));
    }
    return _mm_testz_si128(found, found);
}

/* Where eight of `count` numbers, at least eight, are converted in turn: the last ones overlap. */
INLINE int64_t eight_at(int64_t i, int64_t count) { return i + 8 <= count ? i : count - 8; }

/* eight numbers of 16 or 32 bits, or bytes, from number `at` on */
INLINE __m256 eight_of(const uint8_t *stored, int type, int64_t at) {
    stored += at * SCALE_BYTES[type];
    if (type == FP32) return _mm256_loadu_ps((const float *)stored);
    if (type == BYTE) return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)stored)));
    const __m128i words = _mm_loadu_si128((const __m128i *)stored);
    return type == FP16 ? _mm256_cvtph_ps(words) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

/* out = `count` numbers of 16 or 32 bits */
static void convert(const uint8_t *stored, int64_t count, int type, float *out) {
    for (int64_t i = 0; i < count && count < 8; i++) out[i] = load(stored, type, i);
    for (int64_t i = 0; i < count && count >= 8; i += 8) {
        const int64_t at = eight_at(i, count);
        _mm256_storeu_ps(out + at, eight_of(stored, type, at));
    }
}

/* out = bytes times the halves of their superblocks, of 32 columns each */
static void convert_bytes(const uint8_t *bytes, const uint8_t *halves, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i += 8) {
        const float half = load(halves, FP16, i / 8);
        if (i + 8 <= count) _mm256_storeu_ps(out + i, _mm256_mul_ps(eight_of(bytes, BYTE, i), _mm256_set1_ps(half)));
        else for (int64_t j = i; j < count; j++) out[j] = bytes[j] * half;
    }
}

/* out = scales of a row's `columns`, from column `first` on, then zeros for the rest of a span; prefetches those of
 * later rows, like their codes. */
static __attribute__((noinline)) void scales_of(const Dots *d, int r, int64_t first, int64_t columns, float *out) {
    const int type = d->scale_type;
    const int64_t count = columns >> d->shift, width = SCALE_BYTES[type];
    const uint8_t *stored = d->row[r].scales + (first >> d->shift) * width;
    const uint8_t *ahead = stored + (2 * AHEAD >> d->shift) * width;
    for (int64_t i = 0; i < count * width; i += 64) _mm_prefetch((const char *)ahead + i, _MM_HINT_T1);
    const int64_t begin = d->e4m3 && compute(stored, count & -16, d->unit, out) ? count & -16 : 0;
    if (type == SUPER) convert_bytes(stored, d->row[r].d + first / SUPERBLOCK * 2, count, out);
    else if (type != BYTE) convert(stored, count, type, out);
    else for (int64_t i = begin; i < count; i++) out[i] = d->values[stored[i]] * d->unit;
    _mm256_storeu_ps(out + count, _mm256_setzero_ps());
}

/* Offset of block i after column `first` of row r; zeros as they are for panels, which have no `scales`. */
INLINE float offset_at(const Dots *d, int r, int64_t first, const float *scales, int64_t i) {
    const Row *row = d->row + r;
    const int64_t block = (first >> d->shift) + i;
    if (d->offset_type == VALUE) return load(row->offsets, d->scale_type, block);
    if (d->offset_type == ZERO) return scales ? -(row->offsets[block] * scales[i]) : row->offsets[block];
    return -(load(row->dmin, FP16, (block << d->shift) / SUPERBLOCK) * row->offsets[block]);
}

/* Eight of them from block `at` on, all of one superblock. */
INLINE __m256 offsets_at(const Dots *d, int r, int64_t first, const float *scales, int64_t at) {
    const Row *row = d->row + r;
    const int64_t block = (first >> d->shift) + at;
    if (d->offset_type == VALUE) return eight_of(row->offsets, d->scale_type, block);
    const __m256 number = eight_of(row->offsets, BYTE, block);
    if (d->offset_type == MIN) return _mm256_mul_ps(number, _mm256_set1_ps(-load(row->dmin, FP16, (block << d->shift) / SUPERBLOCK)));
    return scales ? _mm256_mul_ps(number, _mm256_sub_ps(_mm256_setzero_ps(), _mm256_loadu_ps(scales + at))) : number;
}

/* Blocks whose offsets are converted one by one: fewer than eight, or those of a superblock's beginning. */
INLINE int64_t single_offsets(const Dots *d, int64_t count) { return count < 8 ? count : d->offset_type == MIN ? count % 8 : 0; }

/* out = offsets of a row's `columns`, from column `first` on, then zeros, for panels */
static void offsets_of(const Dots *d, int r, int64_t first, int64_t columns, float *out) {
    const int64_t all = columns >> d->shift, count = all - single_offsets(d, all);
    for (int64_t i = 0; i < count; i += 8) {
        const int64_t at = eight_at(i, count);
        _mm256_storeu_ps(out + at, offsets_at(d, r, first, NULL, at));
    }
    for (int64_t i = count; i < all; i++) out[i] = offset_at(d, r, first, NULL, i);
    _mm256_storeu_ps(out + all, _mm256_setzero_ps());
}

/* sum += offsets of a row's `columns`, from column `first` on, times sums of each token's x; prefetches those of later rows */
INLINE void add_offsets(const Dots *d, int r, int64_t first, int64_t columns, const float *scales, int tokens, __m256 *sum) {
    const int64_t all = columns >> d->shift, count = all - single_offsets(d, all);
    const int64_t width = d->offset_type == VALUE ? SCALE_BYTES[d->scale_type] : 1;
    const uint8_t *ahead = d->row[r].offsets + ((first + 2 * AHEAD) >> d->shift) * width;
    const float *sums[TOKENS];
    for (int64_t i = 0; i < all * width; i += 64) _mm_prefetch((const char *)ahead + i, _MM_HINT_T1);
    for (int m = 0; m < tokens; m++) sums[m] = (const float *)((const char *)d->x[m] + d->x_bytes) + (first >> d->shift);
    for (int64_t i = 0; i < count; i += 8) {
        const int64_t at = eight_at(i, count);
        const __m256i iota = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), before = _mm256_set1_epi32((int)(i - at));
        /* those that overlap have been added */
        const __m256 offset = _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(before, iota)), offsets_at(d, r, first, scales, at));
        for (int m = 0; m < tokens; m++) sum[m] = _mm256_fmadd_ps(offset, _mm256_loadu_ps(sums[m] + at), sum[m]);
    }
    for (int64_t i = count; i < all; i++) {
        const __m256 offset = _mm256_zextps128_ps256(_mm_set_ss(offset_at(d, r, first, scales, i)));
        for (int m = 0; m < tokens; m++) sum[m] = _mm256_fmadd_ps(offset, _mm256_set1_ps(sums[m][i]), sum[m]);
    }
}

/* Fewer codes than a span's, and zeros. */
INLINE __m256i codes_at(const uint8_t *at, int64_t columns) {
    uint8_t rest[SPAN / 2] = {0};
    memcpy(rest, at, columns / 2);
    return _mm256_loadu_si256((const __m256i *)rest);
}

INLINE float total(__m256 v) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

/* -- fp32 --------------------------------------------------------------------------------------------------------- */

/* Lookup tables of levels, and the element of a span's scales for each lane: of the first halves, of the second. */
typedef struct { __m256i bytes[4], order[2]; } Lookup;

INLINE Lookup lookup_of(const Dots *d) {
    Lookup of;
    for (int i = 0; i < 4; i++)
        of.bytes[i] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)d->bytes[i]));
    for (int half = 0; half < 2; half++) {
        const int low = 16 * half >> d->shift, high = (16 * half + 32) >> d->shift;
        of.order[half] = _mm256_setr_epi32(low, low, low, low, high, high, high, high);
    }
    return of;
}

/* Half a span's levels, from codes of even columns and of odd ones; `upper`, a constant after inlining: the upper two
 * bytes suffice. */
INLINE void levels_of(const __m256i *bytes, const __m256i *code, int half, int upper, __m256 *level) {
    for (int odd = 0; odd < 2; odd++) {
        __m256i words[2] = {_mm256_setzero_si256()};
        for (int pair = upper; pair < 2; pair++) {
            const __m256i low = _mm256_shuffle_epi8(bytes[2 * pair], code[odd]);
            const __m256i high = _mm256_shuffle_epi8(bytes[2 * pair + 1], code[odd]);
            words[pair] = half ? _mm256_unpackhi_epi8(low, high) : _mm256_unpacklo_epi8(low, high);
        }
        level[2 * odd] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(words[0], words[1]));
        level[2 * odd + 1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(words[0], words[1]));
    }
}

/* Codes of even columns, and of odd ones. */
INLINE void halves_of(__m256i codes, __m256i *code) {
    const __m256i four = _mm256_set1_epi8(15);
    code[0] = _mm256_and_si256(codes, four), code[1] = _mm256_and_si256(_mm256_srli_epi16(codes, 4), four);
}

/* sum += a span of codes times a span of each token's x */
INLINE void add_span(const Lookup *of, __m256i codes, __m256 scale, const float *const *x, int64_t at, int tokens, int upper,
                     __m256 *sum) {
    __m256i code[2];
    __m256 half[TOKENS], level[4];
    halves_of(codes, code);
    for (int i = 0; i < 2; i++) {
        levels_of(of->bytes, code, i, upper, level);
        const __m256 factor = _mm256_permutevar8x32_ps(scale, of->order[i]);
        for (int m = 0; m < tokens; m++) {
            const float *here = x[m] + at + 32 * i;
            __m256 part = _mm256_mul_ps(level[0], _mm256_loadu_ps(here));
            for (int c = 1; c < 4; c++) part = _mm256_fmadd_ps(level[c], _mm256_loadu_ps(here + 8 * c), part);
            if (i == 0) half[m] = _mm256_mul_ps(part, factor);
            else sum[m] = _mm256_add_ps(sum[m], _mm256_fmadd_ps(part, factor, half[m]));
        }
    }
}

INLINE void dots_as(const Dots *d, int rows, int tokens, int upper, float *sums) {
    const Lookup of = lookup_of(d);
    const int shift = d->shift;
    float scales[ROWS][TILE / 16 + WORD];
    __m256 sum[ROWS][TOKENS];  /* one per token: there are 16 registers */
    const float *x[TOKENS];
    for (int m = 0; m < tokens; m++) {
        x[m] = d->x[m];
        for (int r = 0; r < rows; r++) sum[r][m] = _mm256_setzero_ps();
    }
    for (int64_t first = 0; first < d->columns; first += TILE) {
        const int64_t columns = d->columns - first < TILE ? d->columns - first : TILE, whole = columns & -SPAN;
        for (int r = 0; r < rows; r++) scales_of(d, r, first, columns, scales[r]);
        for (int r = 0; r < rows; r++) {
            const uint8_t *codes = d->row[r].codes + first / 2;
            __m256 part[TOKENS];
            for (int m = 0; m < tokens; m++) part[m] = sum[r][m];
            for (int64_t k = 0; k < whole; k += SPAN) {
                _mm_prefetch((const char *)codes + k / 2 + AHEAD, _MM_HINT_T1);
                const __m256i span = _mm256_loadu_si256((const __m256i *)(codes + k / 2));
                add_span(&of, span, _mm256_loadu_ps(scales[r] + (k >> shift)), x, first + k, tokens, upper, part);
            }
            if (columns > whole)
                add_span(&of, codes_at(codes + whole / 2, columns - whole), _mm256_loadu_ps(scales[r] + (whole >> shift)),
                         x, first + whole, tokens, upper, part);
            if (d->offset_type) add_offsets(d, r, first, columns, scales[r], tokens, part);
            for (int m = 0; m < tokens; m++) sum[r][m] = part[m];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int m = 0; m < tokens; m++) sums[r * TOKENS + m] = total(sum[r][m]);
}

/* Deal a span of x to vectors of the levels' order. */
INLINE void deal_span(const float *span, float *to) {
    for (int half = 0; half < 2; half++, to += 32)
        for (int eight = 0; eight < 2; eight++) {
            __m256 four[2];
            for (int i = 0; i < 2; i++) {
                const float *at = span + 16 * half + 8 * eight + 4 * i;
                four[i] = _mm256_set_m128(_mm_loadu_ps(at + 32), _mm_loadu_ps(at));
            }
            _mm256_storeu_ps(to + 8 * eight, _mm256_shuffle_ps(four[0], four[1], 0x88));
            _mm256_storeu_ps(to + 16 + 8 * eight, _mm256_shuffle_ps(four[0], four[1], 0xDD));
        }
}

/* -- integers ----------------------------------------------------------------------------------------------------- */

/* sum += of a word's eight products of unsigned levels and signed bytes, of even columns and of odd ones; without VNNI
 * levels must be small */
INLINE __m256i plus_products_of_bytes(__m256i sum, const __m256i *level, const char *x) {
    const __m256i x0 = _mm256_loadu_si256((const __m256i *)x), x1 = _mm256_loadu_si256((const __m256i *)(x + 32));
#ifdef __AVXVNNI__
    return _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(sum, level[0], x0), level[1], x1);
#else
    const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(level[0], x0), _mm256_maddubs_epi16(level[1], x1));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

/* Sums of a word's eight products. `form` and `kind` are constants after inlining: levels are CODES, or SMALL_LEVELS that
 * are offset by SMALL. */
INLINE __m256i sums_of_words(const __m256i *level, const char *x, int form, int kind) {
    const __m256i *initial = (const __m256i *)(x + (form == AS_FIXED ? 128 : 64));
    const __m256i begin = kind == CODES ? _mm256_setzero_si256() : _mm256_loadu_si256(initial);
    if (form == AS_FIXED) {
#ifdef __AVXVNNI__
        const __m256i upper = plus_products_of_bytes(_mm256_setzero_si256(), level, x);
        return plus_products_of_bytes(_mm256_add_epi32(_mm256_slli_epi32(upper, 8), begin), level, x + 64);
#else
        const __m256i *at = (const __m256i *)x;
        const __m256i upper = _mm256_add_epi16(_mm256_maddubs_epi16(level[0], _mm256_loadu_si256(at)),
                                               _mm256_maddubs_epi16(level[1], _mm256_loadu_si256(at + 1)));
        const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(upper, _mm256_set1_epi16(256)), begin);
        return plus_products_of_bytes(sum, level, x + 64);
#endif
    }
#ifndef __AVXVNNI__
    if (kind == ANY_LEVELS) {  /* signed levels: pairs of products are below 2^15, as both operands are at most 127 */
        const __m256i *at = (const __m256i *)x, ones = _mm256_set1_epi16(1);
        const __m256i signs[2] = {_mm256_sign_epi8(_mm256_loadu_si256(at), level[0]),
                                  _mm256_sign_epi8(_mm256_loadu_si256(at + 1), level[1])};
        const __m256i even = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(level[0]), signs[0]), ones);
        const __m256i odd = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(level[1]), signs[1]), ones);
        return _mm256_add_epi32(even, odd);
    }
#endif
    return plus_products_of_bytes(begin, level, x);
}

/* sum += a span of codes times a span of each token's x */
INLINE void add_words(__m256i table, __m256i codes, __m256 scale, const char *const *x, int64_t at, int tokens, int form,
                      int kind, __m256 *sum) {
    const int scales = form == AS_FIXED ? 160 : 96;
    __m256i level[2];
    halves_of(codes, level);
    for (int i = 0; i < 2 && kind != CODES; i++) level[i] = _mm256_shuffle_epi8(table, level[i]);
    for (int m = 0; m < tokens; m++) {
        const char *here = x[m] + at;
        const __m256 part = _mm256_cvtepi32_ps(sums_of_words(level, here, form, kind));
        sum[m] = _mm256_fmadd_ps(_mm256_mul_ps(part, _mm256_loadu_ps((const float *)(here + scales))), scale, sum[m]);
    }
}

INLINE void dots_of_words(const Dots *d, int rows, int tokens, int form, int kind, float *sums) {
    const __m256i iota = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), order = _mm256_srli_epi32(iota, d->shift - 3);
    const __m256i whole = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)d->whole));
    const int offset = kind == ANY_LEVELS ? 0 : form == AS_FIXED ? SMALL : OFFSET;
    const __m256i table = _mm256_add_epi8(whole, _mm256_set1_epi8(offset));
    const int shift = d->shift, width = form == AS_FIXED ? FIXED_BYTES : 2;
    float scales[ROWS][TILE / 16 + WORD];
    __m256 sum[ROWS][TOKENS];
    const char *x[TOKENS];
    for (int m = 0; m < tokens; m++) {
        x[m] = d->x[m];
        for (int r = 0; r < rows; r++) sum[r][m] = _mm256_setzero_ps();
    }
    for (int64_t first = 0; first < d->columns; first += TILE) {
        const int64_t columns = d->columns - first < TILE ? d->columns - first : TILE, spans = columns & -SPAN;
        for (int r = 0; r < rows; r++) scales_of(d, r, first, columns, scales[r]);
        for (int r = 0; r < rows; r++) {
            const uint8_t *codes = d->row[r].codes + first / 2;
            __m256 part[TOKENS];
            for (int m = 0; m < tokens; m++) part[m] = sum[r][m];
            for (int64_t k = 0; k < spans; k += SPAN) {
                _mm_prefetch((const char *)codes + k / 2 + AHEAD, _MM_HINT_T1);
                const __m256i span = _mm256_loadu_si256((const __m256i *)(codes + k / 2));
                const __m256 scale = _mm256_permutevar8x32_ps(_mm256_loadu_ps(scales[r] + (k >> shift)), order);
                add_words(table, span, scale, x, (first + k) * width, tokens, form, kind, part);
            }
            if (columns > spans) {
                const __m256 scale = _mm256_permutevar8x32_ps(_mm256_loadu_ps(scales[r] + (spans >> shift)), order);
                const __m256i rest = codes_at(codes + spans / 2, columns - spans);
                add_words(table, rest, scale, x, (first + spans) * width, tokens, form, kind, part);
            }
            if (d->offset_type) add_offsets(d, r, first, columns, scales[r], tokens, part);
            for (int m = 0; m < tokens; m++) sum[r][m] = part[m];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int m = 0; m < tokens; m++) sums[r * TOKENS + m] = total(sum[r][m]) * d->step;
}

/* The step of which levels are small multiples, exact in fixed-point products: 1/2, as E2M1's and int4's, or 1, as those
 * of affine weights; 0 if neither. */
static float small_step(const float *levels) {
    for (float step = 0.5f; step <= 1; step *= 2) {
        int small = 1;
        for (int i = 0; i < 16; i++) {
            const float times = levels[i] / step;
            small = small && times >= -SMALL && times < SMALL && rintf(times) == times;
        }
        if (small) return step;
    }
    return 0;
}

INLINE int are_codes(const Dots *d) { return d->offset_type && !d->whole[0]; }  /* else signed: -8 to 7 */

INLINE void dots(const Dots *d, int rows, int tokens, float *sums) {
    if (d->form == AS_FIXED && are_codes(d)) dots_of_words(d, rows, tokens, AS_FIXED, CODES, sums);
    else if (d->form == AS_FIXED) dots_of_words(d, rows, tokens, AS_FIXED, SMALL_LEVELS, sums);
    else if (d->upper) dots_as(d, rows, tokens, 1, sums);
    else dots_as(d, rows, tokens, 0, sums);
}

INLINE void dots_in_int8(const Dots *d, int rows, int tokens, float *sums) {
    int kind = are_codes(d) ? CODES : SMALL_LEVELS;
#ifndef __AVXVNNI__
    const __m128i size = _mm_abs_epi8(_mm_loadu_si128((const __m128i *)d->whole));
    if (_mm_movemask_epi8(_mm_cmpgt_epi8(size, _mm_set1_epi8(SMALL - 1)))) kind = ANY_LEVELS;
#endif
    if (kind == CODES) dots_of_words(d, rows, tokens, AS_INT8, CODES, sums);
    else if (kind == SMALL_LEVELS) dots_of_words(d, rows, tokens, AS_INT8, SMALL_LEVELS, sums);
    else dots_of_words(d, rows, tokens, AS_INT8, ANY_LEVELS, sums);
}

/* Lower bytes of a word's columns: even ones, then odd ones. */
INLINE int64_t bytes_of(__m256i word) {
    const __m256i order = _mm256_setr_epi8(0, 8, -1, -1, 4, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                           -1, -1, 0, 8, -1, -1, 4, 12, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i four = _mm256_shuffle_epi8(word, order);
    return _mm_cvtsi128_si64(_mm_or_si128(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1)));
}

INLINE void store_bytes(int64_t bytes, int word, char *to) {
    memcpy(to + 4 * word, &bytes, 4), memcpy(to + 32 + 4 * word, (char *)&bytes + 4, 4);
}

/* Quantize a span of x to int8, or to fixed point; words = sums of what was quantized. */
INLINE void quantize_span(const float *span, int form, char *to, float *words) {
    const float steps = form == AS_FIXED ? FIXED_STEPS : STEPS;
    const int begins = form == AS_FIXED ? 128 : 64, offset = form == AS_FIXED ? SMALL : OFFSET;
    for (int word = 0; word < SPAN / WORD; word++) {
        const __m256 v = _mm256_loadu_ps(span + WORD * word);
        const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v);
        const __m128 four = _mm_max_ps(_mm256_castps256_ps128(size), _mm256_extractf128_ps(size, 1));
        const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        const float largest = _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
        /* v - v is NaN for NaN and Inf; the maximum of a NaN need not be */
        const __m256 zero = _mm256_cmp_ps(_mm256_sub_ps(v, v), _mm256_setzero_ps(), _CMP_EQ_OQ);
        const int finite = _mm256_movemask_ps(zero) == 0xFF;
        const __m256 per_one = _mm256_set1_ps(finite && largest >= SMALLEST * steps / STEPS ? steps / largest : 0);
        __m256i near = _mm256_and_si256(_mm256_cvtps_epi32(_mm256_mul_ps(v, per_one)), _mm256_castps_si256(zero));
        const __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(near), _mm256_extracti128_si256(near, 1));
        const __m128i pair = _mm_add_epi32(sums, _mm_unpackhi_epi64(sums, sums));
        const int sum = _mm_cvtsi128_si32(pair) + _mm_extract_epi32(pair, 1), begin = -offset * sum;
        const float scale = finite ? largest / steps : NAN;
        words[word] = sum * scale;
        if (form == AS_FIXED) {
            store_bytes(bytes_of(near), word, to + 64);
            near = _mm256_srai_epi32(_mm256_add_epi32(near, _mm256_set1_epi32(128)), 8);
        }
        store_bytes(bytes_of(near), word, to);
        memcpy(to + begins + 4 * word, &begin, 4), memcpy(to + begins + 32 + 4 * word, &scale, 4);
    }
}

INLINE void round_span(const float *span, void *to, float *words) { quantize_span(span, AS_INT8, to, words); }

INLINE void spread_span(const float *span, int form, void *to, float *words) {
    if (form == AS_FIXED) {
        quantize_span(span, AS_FIXED, to, words);
        return;
    }
    deal_span(span, to);
    for (int word = 0; word < SPAN / WORD; word++) words[word] = total(_mm256_loadu_ps(span + WORD * word));
}
