/* Merge of fine planes (formats/fine_plane.py) with coarse ones. Part of linear.c. */

typedef struct {
    const uint8_t *low, *nibbles;  /* [N, columns], [N, ceil(columns / 2)] (fp16 only) */
    const int8_t *side;
    const int16_t *escapes;
    const int32_t *starts;  /* [ceil(N * columns / LISTED), 2]: entries of both lists preceding each span */
    int64_t sides, escaped;  /* entries of the lists */
    int64_t columns;  /* without padding */
    uint32_t wide;  /* bit c: code c is wide */
    int32_t width;  /* in-place bits: 8 for bf16, 12 for fp16 */
} Fine;

/* the next entry of each list */
#define LISTED 4096  /* weights per entry of `starts` */

#include "coded.h"

#define PART 2048  /* columns merged at a time */

static inline int16_t ordinal(int16_t bits) { return bits ^ ((bits >> 15) & 0x7FFF); }

/* ordinals of a block's 16 levels by scale byte; with SPLIT, low and high bytes separately */
typedef struct { uint8_t low[16], high[16]; } Split;
typedef union { int16_t words[16]; Split split; } Near;

#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VBMI2__)
#define WORDS 1
#elif defined(__AVX2__) && defined(__BMI2__)
#define SPLIT 1
#endif

static void fill_near(const Weight *w, int width, Near *near) {
    for (int byte = 0; byte < 256; byte++) {
        const float scale = w->values[byte] * *w->unit;
        int16_t words[16];
        for (int code = 0; code < 16; code++) {
            const float value = w->levels[code] * scale;
            words[code] = ordinal(width == 8 ? bf16_bits(value) : fp16_bits(value));
        }
#ifdef SPLIT
        for (int code = 0; code < 16; code++)
            near[byte].split.low[code] = words[code], near[byte].split.high[code] = words[code] >> 8;
#else
        memcpy(near[byte].words, words, sizeof words);
#endif
    }
}

static inline int16_t near_word(const Near *near, int code) {
#ifdef SPLIT
    return (int16_t)(near->split.low[code] | near->split.high[code] << 8);
#else
    return near->words[code];
#endif
}

/* Each of these merges weights k to `columns` of those from column `first`, a block boundary, of row n, and returns how
 * far it came: it may stop before the end of a list. `width` and `block` are constants after inlining. */

INLINE int64_t merge_plain(const Weight *w, const Fine *f, const Near *near, int64_t n, int64_t first, int64_t k,
                           int64_t columns, Cursor *at, int16_t *out, int width, int block) {
    const uint8_t *codes = w->plane.codes + (n * w->columns + first) / 2, *low = f->low + n * f->columns + first;
    const uint8_t *scales = w->plane.scales + (n * w->columns + first) / block;
    const uint8_t *nibbles = f->nibbles + n * ((f->columns + 1) / 2) + first / 2;
    const int32_t sign = 1 << (width - 1);
    const uint32_t wide_codes = f->wide;
    int64_t side = at->side, escape = at->escape;
    for (; k < columns; k++) {
        const int shift = 4 * (k & 1), code = codes[k / 2] >> shift & 15;
        int32_t delta = low[k];
        if (width == 12) delta |= (nibbles[k / 2] >> shift & 15) << 8;
        if (wide_codes >> code & 1) {
            if (side >= f->sides) break;
            delta |= f->side[side++] * (1 << width);
        } else if (delta == sign) {
            if (escape >= f->escaped) break;
            delta = f->escapes[escape++];
        } else {
            delta = (delta ^ sign) - sign;
        }
        out[k] = ordinal((int16_t)(near_word(near + scales[k / block], code) + delta));
    }
    *at = (Cursor){side, escape};
    return k;
}

#ifdef WORDS
static inline __m512i ordinals(__m512i bits) {
    return _mm512_xor_si512(bits, _mm512_and_si512(_mm512_srai_epi16(bits, 15), _mm512_set1_epi16(0x7FFF)));
}

static inline __m256i words_of(const Near *near) { return _mm256_loadu_si256((const __m256i *)near); }

/* 32 words, one per nibble, the low one first */
static inline __m512i nibble_words(__m128i bytes) {
    const __m512i pair = _mm512_cvtepu8_epi32(bytes);
    return _mm512_and_si512(_mm512_or_si512(pair, _mm512_slli_epi32(pair, 12)), _mm512_set1_epi32(0x000F000F));
}

INLINE int64_t merge_32(const Weight *w, const Fine *f, const Near *near, int64_t n, int64_t first, int64_t columns,
                        Cursor *at, int16_t *out, int width, int block) {
    const uint8_t *codes = w->plane.codes + (n * w->columns + first) / 2, *low = f->low + n * f->columns + first;
    const uint8_t *scales = w->plane.scales + (n * w->columns + first) / block;
    const uint8_t *nibbles = f->nibbles + n * ((f->columns + 1) / 2) + first / 2;
    const __m512i upper = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    const __m512i sign = _mm512_set1_epi16(1 << (width - 1));
    const __m512i wide_codes = _mm512_movm_epi16(f->wide | f->wide << 16);
    __m512i table = sign;
    int64_t side = at->side, escape = at->escape, k = 0;
    for (; k < columns; k += 32) {
        const int64_t left = columns - k;
        const __mmask32 valid = left >= 32 ? ~0u : (1u << left) - 1;
        const __mmask16 bytes = left >= 32 ? 0xFFFF : (1u << (left + 1) / 2) - 1;
        if (block == 16) {  /* two adjacent blocks */
            const __m256i second = words_of(near + scales[left <= 16 ? k / 16 : k / 16 + 1]);
            table = _mm512_inserti64x4(_mm512_castsi256_si512(words_of(near + scales[k / 16])), second, 1);
        } else if (k % block == 0) {
            table = _mm512_broadcast_i64x4(words_of(near + scales[k / block]));
        }
        __m512i code = nibble_words(_mm_maskz_loadu_epi8(bytes, codes + k / 2));
        if (block == 16) code = _mm512_or_si512(code, upper);
        __m512i delta = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(valid, low + k));
        if (width == 12) {
            const __m512i high = nibble_words(_mm_maskz_loadu_epi8(bytes, nibbles + k / 2));
            delta = _mm512_or_si512(delta, _mm512_slli_epi16(high, 8));
        }
        const __mmask32 wide = valid & _mm512_movepi16_mask(_mm512_permutexvar_epi16(code, wide_codes));
        const __mmask32 escaped = _mm512_mask_cmpeq_epi16_mask(valid & ~wide, delta, sign);
        const int sides = _mm_popcnt_u32(wide), escapes = _mm_popcnt_u32(escaped);
        if (side + sides > f->sides || escape + escapes > f->escaped) break;
        /* masked: never reads beyond a list's end */
        const __m256i listed = _mm256_maskz_loadu_epi8(_bzhi_u32(~0u, sides), f->side + side);
        const __m512i high = _mm512_cvtepi8_epi16(_mm256_maskz_expand_epi8(wide, listed));
        const __m512i whole = _mm512_or_si512(delta, _mm512_slli_epi16(high, width));
        delta = _mm512_srai_epi16(_mm512_slli_epi16(delta, 16 - width), 16 - width);
        delta = _mm512_mask_mov_epi16(delta, wide, whole);
        if (escaped) {
            const __m512i list = _mm512_maskz_loadu_epi16(_bzhi_u32(~0u, escapes), f->escapes + escape);
            delta = _mm512_mask_expand_epi16(delta, escaped, list);
        }
        side += sides, escape += escapes;
        const __m512i bits = ordinals(_mm512_add_epi16(_mm512_permutexvar_epi16(code, table), delta));
        _mm512_mask_storeu_epi16(out + k, valid, bits);
    }
    *at = (Cursor){side, escape};
    return k < columns ? k : columns;
}
#endif

#ifdef SPLIT
static inline __m256i ordinals(__m256i bits) {
    return _mm256_xor_si256(bits, _mm256_and_si256(_mm256_srai_epi16(bits, 15), _mm256_set1_epi16(0x7FFF)));
}

/* 32 bytes, one per nibble, the low one first */
static inline __m256i nibble_bytes(const uint8_t *bytes) {
    const __m128i pair = _mm_loadu_si128((const __m128i *)bytes), four = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(pair, four), high = _mm_and_si128(_mm_srli_epi16(pair, 4), four);
    return _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high));
}

static inline __m256i twice(const uint8_t *first, const uint8_t *second) {
    return _mm256_set_m128i(_mm_loadu_si128((const __m128i *)second), _mm_loadu_si128((const __m128i *)first));
}

/* expand the next list entries to the positions of ones in `chosen` */
static inline __m256i expanded(__m256i chosen, const int8_t *list) {
    uint64_t mask[4], entry[4];
    memcpy(mask, &chosen, sizeof mask);
    for (int i = 0; i < 4; i++) {
        memcpy(entry + i, list, 8);
        entry[i] = _pdep_u64(entry[i], mask[i]);
        list += __builtin_popcountll(mask[i]) / 8;
    }
    return _mm256_set_epi64x(entry[3], entry[2], entry[1], entry[0]);
}

/* interleave low and high bytes to words, in order */
static inline void store_words(__m256i low, __m256i high, __m256i near_low, __m256i near_high, int16_t *out) {
    const __m256i a = _mm256_add_epi16(_mm256_unpacklo_epi8(low, high), _mm256_unpacklo_epi8(near_low, near_high));
    const __m256i b = _mm256_add_epi16(_mm256_unpackhi_epi8(low, high), _mm256_unpackhi_epi8(near_low, near_high));
    const __m256i x = ordinals(a), y = ordinals(b);
    _mm256_storeu_si256((__m256i *)out, _mm256_permute2x128_si256(x, y, 0x20));
    _mm256_storeu_si256((__m256i *)(out + 16), _mm256_permute2x128_si256(x, y, 0x31));
}

INLINE int64_t merge_32(const Weight *w, const Fine *f, const Near *near, int64_t n, int64_t first, int64_t columns,
                        Cursor *at, int16_t *out, int width, int block) {
    const uint8_t *codes = w->plane.codes + (n * w->columns + first) / 2, *low = f->low + n * f->columns + first;
    const uint8_t *scales = w->plane.scales + (n * w->columns + first) / block;
    const uint8_t *nibbles = f->nibbles + n * ((f->columns + 1) / 2) + first / 2;
    const __m256i zero = _mm256_setzero_si256(), sign = _mm256_set1_epi8(width == 8 ? -128 : 8);
    uint8_t flags[16];
    for (int code = 0; code < 16; code++) flags[code] = -(f->wide >> code & 1);
    const __m256i wide_codes = twice(flags, flags);
    int64_t side = at->side, escape = at->escape, k = 0;
    for (; k + 32 <= columns; k += 32) {
        const Near *one = near + scales[k / block], *two = block == 16 ? near + scales[k / 16 + 1] : one;
        const __m256i code = nibble_bytes(codes + k / 2), small = _mm256_loadu_si256((const __m256i *)(low + k));
        const __m256i near_low = _mm256_shuffle_epi8(twice(one->split.low, two->split.low), code);
        const __m256i near_high = _mm256_shuffle_epi8(twice(one->split.high, two->split.high), code);
        const __m256i wide = _mm256_shuffle_epi8(wide_codes, code);
        __m256i high, whole = zero, escaped;
        if (width == 8) {
            high = _mm256_cmpgt_epi8(zero, small);
            escaped = _mm256_cmpeq_epi8(small, sign);
        } else {
            whole = nibble_bytes(nibbles + k / 2);
            high = _mm256_sub_epi8(_mm256_xor_si256(whole, sign), sign);
            escaped = _mm256_and_si256(_mm256_cmpeq_epi8(whole, sign), _mm256_cmpeq_epi8(small, zero));
        }
        uint32_t places = _mm256_movemask_epi8(_mm256_andnot_si256(wide, escaped));
        if (escape + __builtin_popcount(places) > f->escaped) break;
        if (f->wide) {
            if (side + 40 > f->sides) break;  /* entries are read in groups of eight */
            __m256i listed = expanded(wide, f->side + side);
            if (width == 12) listed = _mm256_and_si256(_mm256_slli_epi16(listed, 4), _mm256_set1_epi8(-16));
            high = _mm256_blendv_epi8(high, _mm256_or_si256(whole, listed), wide);
            side += __builtin_popcount(_mm256_movemask_epi8(wide));
        }
        store_words(small, high, near_low, near_high, out + k);
        for (; places; places &= places - 1) {
            const int64_t j = k + __builtin_ctz(places);
            const int level = codes[j / 2] >> 4 * (j & 1) & 15;
            out[j] = ordinal((int16_t)(near_word(near + scales[j / block], level) + f->escapes[escape++]));
        }
    }
    *at = (Cursor){side, escape};
    return k;
}
#endif

INLINE int merge_tile(const Weight *w, const Fine *f, const Near *near, int64_t n, int64_t first, int64_t columns,
                      Cursor *at, int16_t *out, int width, int block) {
    int64_t done = 0;
#if defined(WORDS) || defined(SPLIT)
    done = merge_32(w, f, near, n, first, columns, at, out, width, block);
#endif
    return merge_plain(w, f, near, n, first, done, columns, at, out, width, block) == columns;
}

static int merge(const Weight *w, const Fine *f, const Near *near, int64_t n, int64_t first, int64_t columns, Cursor *at,
                 int16_t *out) {
    switch (f->width * 100 + w->block) {
        case 816: return merge_tile(w, f, near, n, first, columns, at, out, 8, 16);
        case 832: return merge_tile(w, f, near, n, first, columns, at, out, 8, 32);
        case 864: return merge_tile(w, f, near, n, first, columns, at, out, 8, 64);
        case 1216: return merge_tile(w, f, near, n, first, columns, at, out, 12, 16);
        case 1232: return merge_tile(w, f, near, n, first, columns, at, out, 12, 32);
        case 1264: return merge_tile(w, f, near, n, first, columns, at, out, 12, 64);
        default: return 0;
    }
}

/* skip the entries of row n, from column k on */
static void skip(const Weight *w, const Fine *f, int64_t n, int64_t k, Cursor *at) {
    const uint8_t *codes = w->plane.codes + n * w->columns / 2, *low = f->low + n * f->columns;
    const uint8_t *nibbles = f->nibbles + n * ((f->columns + 1) / 2);
    for (; k < f->columns; k++) {
        const int shift = 4 * (k & 1), wide = f->wide >> (codes[k / 2] >> shift & 15) & 1;
        const int high = f->width == 12 ? nibbles[k / 2] >> shift & 15 : 0;
        at->side += wide;
        at->escape += !wide && (high << 8 | low[k]) == 1 << (f->width - 1);
    }
}

/* list positions at the start of row n: counted from the start of its span */
static Cursor find(const Weight *w, const Fine *f, int64_t n) {
    if (n == w->rows) return (Cursor){f->sides, f->escaped};
    const int64_t span = n * f->columns / LISTED, first = span * LISTED;
    Cursor at = {f->starts[2 * span], f->starts[2 * span + 1]};
    for (int64_t row = first / f->columns, k = first % f->columns; row < n; row++, k = 0) skip(w, f, row, k, &at);
    return at;
}

static int merge_row(const Weight *w, const Fine *f, const Near *near, int64_t n, Cursor *at, int16_t *out) {
    int whole = 1;
    for (int64_t first = 0; whole && first < f->columns; first += PART) {
        const int64_t left = f->columns - first;
        whole = merge(w, f, near, n, first, left < PART ? left : PART, at, out + first);
    }
    return whole;
}

#define GROUP 32  /* rows transposed at a time: their column is a cache line */

#ifdef __AVX512BW__
/* Transpose GROUP columns of GROUP rows. Interleaving the two halves moves the highest bit of the row index below those
 * of the column index; five times make a row of each column. */
static void turn_block(const int16_t *rows, int64_t pitch, int16_t *out, int64_t all, int large) {
    __m512i a[GROUP], b[GROUP], low, high;
    int16_t order[2 * GROUP];
    for (int i = 0; i < 2 * GROUP; i++) order[i] = i / 2 + (i & 1) * GROUP;
    low = _mm512_loadu_si512(order), high = _mm512_loadu_si512(order + GROUP);
    for (int n = 0; n < GROUP; n++) a[n] = _mm512_loadu_si512(rows + n * pitch);
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < GROUP / 2; i++) {
            b[2 * i] = _mm512_permutex2var_epi16(a[i], low, a[i + GROUP / 2]);
            b[2 * i + 1] = _mm512_permutex2var_epi16(a[i], high, a[i + GROUP / 2]);
        }
        memcpy(a, b, sizeof a);
    }
    const int past = large && !(((uintptr_t)out | 2 * all) & 63);  /* non-temporal stores: no read for ownership */
    for (int k = 0; k < GROUP; k++) {
        if (past) _mm512_stream_si512((__m512i *)(out + k * all), a[k]);
        else _mm512_storeu_si512(out + k * all, a[k]);
    }
}
#endif

/* transpose `count` rows of `pitch` to out [columns, all] */
static void turn(const int16_t *rows, int64_t pitch, int64_t count, int64_t columns, int16_t *out, int64_t all) {
    for (int64_t k = 0; k < columns; k += GROUP) {
#ifdef __AVX512BW__
        if (count == GROUP && k + GROUP <= columns) {
            turn_block(rows + k, pitch, out + k * all, all, all * columns > 1 << 22);
            continue;
        }
#endif
        for (int64_t j = k; j < columns && j < k + GROUP; j++)
            for (int64_t n = 0; n < count; n++) out[j * all + n] = rows[n * pitch + j];
    }
}

/* The original weight in bf16 or fp16 from one of the fine planes, out [N, columns], or [columns, N] if `rows` is memory for GROUP rows per thread
 * of `pitch` weights; 0 if the lists do not match the codes. */
int vbrt_merge(const Weight *w, const Fine *f, const Coded *c, int16_t *out, int16_t *rows, int64_t pitch, int threads) {
    const int64_t columns = c ? c->columns : f->columns, step = rows ? GROUP : 1, steps = (w->rows + step - 1) / step;
    int whole = 1;
    union { Near near[256]; Cells cells; } tables;
    const Near *near = tables.near;
    const Cells *cells = &tables.cells;
    if (c) fill_cells(c, &tables.cells);
    else fill_near(w, f->width, tables.near);
#pragma omp parallel for num_threads(threads) schedule(static) reduction(&& : whole)
    for (int part = 0; part < threads; part++) {
        const int64_t last = steps * (part + 1) / threads * step, end = last < w->rows ? last : w->rows;
        int64_t n = steps * part / threads * step;
        Cursor at = c ? coded_find(w, c, cells, n) : find(w, f, n);
        int fits = at.side >= 0 && at.escape >= 0;
        for (; fits && n < end; n += step) {
            const int64_t count = end - n < step ? end - n : step;
            int16_t *to = rows ? rows + part * GROUP * pitch : out + n * columns;
            for (int64_t r = 0; fits && r < count; r++)
                fits = c ? coded_row(w, c, cells, n + r, &at, to + r * pitch)
                         : merge_row(w, f, near, n + r, &at, to + r * pitch);
            if (rows) turn(to, pitch, count, columns, out + n, w->rows);
        }
        if (c) whole = whole && fits && coded_fits(w, c, cells, end, at);
        else {
            const Cursor next = find(w, f, end);
            whole = whole && fits && at.side == next.side && at.escape == next.escape;
        }
    }
    return whole;
}
