/* Merge of coded fine planes (formats/fine_coding.py). Part of linear.c, by merge.h. */

typedef struct {
    const uint8_t *fours, *pairs;  /* [N, padded / 2], [N, padded / 4] */
    const uint8_t *extra;  /* the stream of extra bits, `stream` bytes */
    const int16_t *escapes;
    const int32_t *starts;  /* [ceil(N * columns / LISTED), 2]: extra bits and escapes before each span */
    const int32_t *cells;  /* [mantissas, 16] */
    int64_t stream, escaped, columns, mantissas;
} Coded;

typedef struct { int64_t side, escape; } Cursor;  /* next entries of both lists; of a coded plane: next extra bit */

enum { STREAM_UNIT = 16 };  /* bytes; as in fine_coding.py */

typedef struct { int16_t words[16]; } Words;

/* by scale byte: anchors moved by its exponent, and the rest of its cells */
typedef struct { Words anchors[256], rest[256]; int is_signed; } Cells;

static void fill_cells(const Coded *c, Cells *cells) {
    cells->is_signed = 0;
    for (int byte = 0; byte < 256; byte++) {
        for (int code = 0; code < 16; code++) {
            const int32_t cell = c->cells[byte % c->mantissas * 16 + code];
            cells->anchors[byte].words[code] = (int16_t)((cell >> 16) + byte / c->mantissas * 128);
            cells->rest[byte].words[code] = (int16_t)cell;
            cells->is_signed |= cell >> 12 & 1;
        }
    }
}

typedef struct { int32_t symbol, steps, length, is_signed; } Symbol;

static inline Symbol symbol_of(const uint8_t *fours, const uint8_t *pairs, int64_t k, int32_t rest) {
    const int32_t symbol = (fours[k / 2] >> 4 * (k & 1) & 15) << 2 | (pairs[k / 4] >> 2 * (k & 3) & 3);
    const int32_t more = rest >> 9 & 3, is_signed = rest >> 12 & 1;
    if (!symbol) return (Symbol){0, 0, 0, is_signed};
    const int32_t steps = rest & 1 << 11 ? __builtin_clz(symbol) - 26 : (symbol << more) < (rest & 511);
    return (Symbol){symbol, steps, more + steps + is_signed, is_signed};
}

static inline uint64_t bits_from(const uint8_t *stream, int64_t bit) {  /* at least 57 */
    uint64_t word;
    memcpy(&word, stream + (bit >> 3), 8);
    return word >> (bit & 7);
}

/* Each of these merges weights k to `columns` of row n, and returns how far it came: it may stop before the end of a
 * list. */

static int64_t coded_plain(const Weight *w, const Coded *c, const Cells *cells, int64_t n, int64_t k, Cursor *at,
                           int16_t *out) {
    const uint8_t *codes = w->plane.codes + n * w->columns / 2, *scales = w->plane.scales + n * (w->columns / w->block);
    const uint8_t *fours = c->fours + n * w->columns / 2, *pairs = c->pairs + n * w->columns / 4;
    const int64_t last = 8 * c->stream - 64;
    for (; k < c->columns; k++) {
        const int byte = scales[k / w->block], code = codes[k / 2] >> 4 * (k & 1) & 15;
        const int32_t rest = cells->rest[byte].words[code];
        const Symbol s = symbol_of(fours, pairs, k, rest);
        if (s.symbol) {
            if (at->side > last) break;
            const int32_t extra = bits_from(c->extra, at->side) & ((1 << s.length) - 1);
            const int32_t places = (s.symbol << s.length | extra) >> s.is_signed;
            const int32_t word = cells->anchors[byte].words[code] + places - (rest & 511) * s.steps;
            out[k] = (int16_t)(word ^ (s.is_signed & extra) << 15);
            at->side += s.length;
        } else {
            if (at->escape >= c->escaped) break;
            out[k] = c->escapes[at->escape++];
        }
    }
    return k;
}

#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VBMI2__) && defined(__BMI2__)
/* 32 words, one per nibble, the low one first */
static inline __m512i words_of_nibbles(__m128i bytes) {
    const __m512i pair = _mm512_cvtepu8_epi32(bytes);
    return _mm512_and_si512(_mm512_or_si512(pair, _mm512_slli_epi32(pair, 12)), _mm512_set1_epi32(0x000F000F));
}

static inline __m512i two_tables(const Words *first, const Words *second) {
    const __m256i one = _mm256_loadu_si256((const __m256i *)first), two = _mm256_loadu_si256((const __m256i *)second);
    return _mm512_inserti64x4(_mm512_castsi256_si512(one), two, 1);
}

static int64_t coded_32(const Weight *w, const Coded *c, const Cells *cells, int64_t n, Cursor *at, int16_t *out) {
    const int64_t block = w->block, columns = c->columns, last = 8 * c->stream - 64 - 32 * 7;
    const uint8_t *codes = w->plane.codes + n * w->columns / 2, *scales = w->plane.scales + n * (w->columns / block);
    const uint8_t *fours = c->fours + n * w->columns / 2, *pairs = c->pairs + n * w->columns / 4;
    const __m512i one = _mm512_set1_epi16(1), zero = _mm512_setzero_si512();
    const __m512i upper = _mm512_inserti64x4(zero, _mm256_set1_epi16(16), 1);
    const __m512i by_two = _mm512_set1_epi64(0x0006000400020000);
    const __m512i spread = _mm512_set_epi64(0x0808080808080808, 0, 0x0808080808080808, 0, 0x0808080808080808, 0,
                                            0x0808080808080808, 0);
    const __m128i ones = _mm_set_epi64x(0, 0x7F3F1F0F07030100), ones_16 = _mm_insert_epi16(ones, 0xFF, 4);
    int16_t octaves[32];
    for (int s = 0; s < 32; s++) octaves[s] = s ? (int16_t)(__builtin_clz(s) - 26) : 0;
    const __m512i octave_table = _mm512_loadu_si512(octaves);
    int64_t bit = at->side, escape = at->escape, k = 0;
    for (; k < columns; k += 32) {
        if (bit > last) break;
        const int64_t left = columns - k;
        const __mmask32 valid = left >= 32 ? ~0u : (1u << left) - 1;
        const __mmask16 bytes = left > 16 ? 0xFFFF : 0xFF, quads = left > 16 ? 0xFF : 0xF;
        const int first = scales[k / block], second = block == 16 && left > 16 ? scales[k / 16 + 1] : first;
        const __m512i anchors = two_tables(cells->anchors + first, cells->anchors + second);
        const __m512i rests = two_tables(cells->rest + first, cells->rest + second);
        const __m512i code = _mm512_or_si512(words_of_nibbles(_mm_maskz_loadu_epi8(bytes, codes + k / 2)), upper);
        const __m512i anchor = _mm512_permutexvar_epi16(code, anchors), rest = _mm512_permutexvar_epi16(code, rests);
        const __m512i high = words_of_nibbles(_mm_maskz_loadu_epi8(bytes, fours + k / 2));
        const __m512i pair = _mm512_shuffle_epi8(_mm512_cvtepu8_epi64(_mm_maskz_loadu_epi8(quads, pairs + k / 4)), spread);
        const __m512i low = _mm512_and_si512(_mm512_srlv_epi16(pair, by_two), _mm512_set1_epi16(3));
        const __m512i symbol = _mm512_or_si512(_mm512_slli_epi16(high, 2), low);
        const __m512i more = _mm512_and_si512(_mm512_srli_epi16(rest, 9), _mm512_set1_epi16(3));
        const __m512i step = _mm512_and_si512(rest, _mm512_set1_epi16(511));
        const __m512i shifted = _mm512_sllv_epi16(symbol, more);
        const __mmask32 some = _mm512_test_epi16_mask(symbol, symbol);
        const __mmask32 large = _mm512_cmpgt_epi16_mask(symbol, _mm512_set1_epi16(31));
        __m512i o = _mm512_maskz_mov_epi16(_mm512_cmplt_epi16_mask(shifted, step), one);
        const __mmask32 octaves_in = _mm512_test_epi16_mask(rest, _mm512_set1_epi16(1 << 11));
        o = _mm512_mask_permutexvar_epi16(o, octaves_in, symbol, octave_table);
        o = _mm512_mask_mov_epi16(o, octaves_in & large, zero);
        __m512i length = _mm512_add_epi16(more, o);
        const __mmask32 turning = _mm512_test_epi16_mask(rest, _mm512_set1_epi16(1 << 12));
        if (turning) length = _mm512_mask_add_epi16(length, turning, length, one);
        length = _mm512_maskz_mov_epi16(some & valid, length);
        uint64_t mask[4], taken[4];
        const __m256i lengths = _mm512_cvtepi16_epi8(length);
        _mm256_storeu_si256((__m256i *)mask, _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(ones_16), lengths));
        for (int i = 0; i < 4; i++) {
            taken[i] = _pdep_u64(bits_from(c->extra, bit), mask[i]);
            bit += __builtin_popcountll(mask[i]);
        }
        const __m512i extra = _mm512_cvtepu8_epi16(_mm256_set_epi64x(taken[3], taken[2], taken[1], taken[0]));
        __m512i places = _mm512_or_si512(_mm512_sllv_epi16(symbol, length), extra);
        if (turning) places = _mm512_mask_srli_epi16(places, turning, places, 1);
        __m512i word = _mm512_add_epi16(anchor, _mm512_sub_epi16(places, _mm512_mullo_epi16(step, o)));
        if (turning) word = _mm512_xor_si512(word, _mm512_maskz_slli_epi16(turning, extra, 15));
        const __mmask32 escaped = valid & ~some;
        if (escaped) {
            const int count = _mm_popcnt_u32(escaped);
            if (escape + count > c->escaped) break;
            const __m512i list = _mm512_maskz_loadu_epi16(_bzhi_u32(~0u, count), c->escapes + escape);
            word = _mm512_mask_expand_epi16(word, escaped, list);
            escape += count;
        }
        _mm512_mask_storeu_epi16(out + k, valid, word);
        at->side = bit, at->escape = escape;
    }
    return k < columns ? k : columns;
}
#elif defined(__AVX2__) && defined(__BMI2__)
/* 32 bytes, one per nibble, the low one first */
static inline __m256i bytes_of_nibbles(const uint8_t *bytes) {
    const __m128i pair = _mm_loadu_si128((const __m128i *)bytes), four = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(pair, four), high = _mm_and_si128(_mm_srli_epi16(pair, 4), four);
    return _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high));
}

/* bytes of [low, high] halves of 16 words each, as tables of bytes */
static inline void byte_tables(const Words *words, __m128i *low, __m128i *high) {
    const __m128i a = _mm_loadu_si128((const __m128i *)words), b = _mm_loadu_si128((const __m128i *)words + 1);
    const __m128i eight = _mm_set1_epi16(0xFF);
    *low = _mm_packus_epi16(_mm_and_si128(a, eight), _mm_and_si128(b, eight));
    *high = _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8));
}

static int64_t coded_32(const Weight *w, const Coded *c, const Cells *cells, int64_t n, Cursor *at, int16_t *out) {
    const int64_t block = w->block, columns = c->columns, last = 8 * c->stream - 64 - 32 * 7;
    const uint8_t *codes = w->plane.codes + n * w->columns / 2, *scales = w->plane.scales + n * (w->columns / block);
    const uint8_t *fours = c->fours + n * w->columns / 2, *pairs = c->pairs + n * w->columns / 4;
    const __m256i zero = _mm256_setzero_si256(), three = _mm256_set1_epi8(3), one = _mm256_set1_epi8(1);
    const __m256i ones = _mm256_broadcastsi128_si256(_mm_set_epi64x(0xFF, 0x7F3F1F0F07030100));
    const __m256i power_of = _mm256_broadcastsi128_si256(_mm_set_epi64x(0, (int64_t)0x8040201008040201));
    const __m256i octaves_low = _mm256_broadcastsi128_si256(_mm_set_epi64x(0x0202020202020202, 0x0303030304040500));
    int64_t bit = at->side, escape = at->escape, k = 0;
    for (; k + 32 <= columns; k += 32) {
        if (bit > last) break;
        const int first = scales[k / block], second = block == 16 ? scales[k / 16 + 1] : first;
        __m128i a_low, a_high, r_low, r_high, b_low, b_high, q_low, q_high;
        byte_tables(cells->anchors + first, &a_low, &a_high), byte_tables(cells->anchors + second, &b_low, &b_high);
        byte_tables(cells->rest + first, &r_low, &r_high), byte_tables(cells->rest + second, &q_low, &q_high);
        const __m256i code = bytes_of_nibbles(codes + k / 2);
        const __m256i anchor_low = _mm256_shuffle_epi8(_mm256_set_m128i(b_low, a_low), code);
        const __m256i anchor_high = _mm256_shuffle_epi8(_mm256_set_m128i(b_high, a_high), code);
        const __m256i rest_low = _mm256_shuffle_epi8(_mm256_set_m128i(q_low, r_low), code);
        const __m256i rest_high = _mm256_shuffle_epi8(_mm256_set_m128i(q_high, r_high), code);
        uint64_t two, mask[4], taken[4];
        memcpy(&two, pairs + k / 4, 8);
        for (int i = 0; i < 4; i++) taken[i] = _pdep_u64(two >> 16 * i, 0x0303030303030303);
        const __m256i low = _mm256_set_epi64x(taken[3], taken[2], taken[1], taken[0]);
        const __m256i symbol = _mm256_or_si256(_mm256_slli_epi16(bytes_of_nibbles(fours + k / 2), 2), low);
        const __m256i more = _mm256_and_si256(_mm256_srli_epi16(rest_high, 1), three);
        /* whether symbol << more < step, in words: bytes overflow */
        __m256i half[2], steps[2], shifted[2];
        const __m256i power = _mm256_shuffle_epi8(power_of, more), step_high = _mm256_and_si256(rest_high, one);
        for (int i = 0; i < 2; i++) {
            const __m256i s = i ? _mm256_unpackhi_epi8(symbol, zero) : _mm256_unpacklo_epi8(symbol, zero);
            const __m256i p = i ? _mm256_unpackhi_epi8(power, zero) : _mm256_unpacklo_epi8(power, zero);
            steps[i] = i ? _mm256_unpackhi_epi8(rest_low, step_high) : _mm256_unpacklo_epi8(rest_low, step_high);
            shifted[i] = _mm256_mullo_epi16(s, p);
            half[i] = _mm256_cmpgt_epi16(steps[i], shifted[i]);
        }
        __m256i o = _mm256_and_si256(_mm256_packs_epi16(half[0], half[1]), one);
        const __m256i octaves = _mm256_cmpgt_epi8(_mm256_and_si256(rest_high, _mm256_set1_epi8(8)), zero);
        __m256i octave = _mm256_shuffle_epi8(octaves_low, symbol);  /* of symbols below 16 */
        octave = _mm256_blendv_epi8(octave, one, _mm256_cmpgt_epi8(symbol, _mm256_set1_epi8(15)));
        octave = _mm256_andnot_si256(_mm256_cmpgt_epi8(symbol, _mm256_set1_epi8(31)), octave);
        o = _mm256_blendv_epi8(o, octave, octaves);
        const __m256i turning = _mm256_and_si256(_mm256_srli_epi16(rest_high, 4), one), none = _mm256_cmpeq_epi8(symbol, zero);
        const __m256i length = _mm256_andnot_si256(none, _mm256_add_epi8(_mm256_add_epi8(more, o), turning));
        _mm256_storeu_si256((__m256i *)mask, _mm256_shuffle_epi8(ones, length));
        for (int i = 0; i < 4; i++) {
            taken[i] = _pdep_u64(bits_from(c->extra, bit), mask[i]);
            bit += __builtin_popcountll(mask[i]);
        }
        const __m256i extra = _mm256_set_epi64x(taken[3], taken[2], taken[1], taken[0]);
        const __m256i power_o = _mm256_shuffle_epi8(power_of, o);
        const int any = !_mm256_testz_si256(turning, turning);
        __m256i words[2];
        for (int i = 0; i < 2; i++) {
            const __m256i p = i ? _mm256_unpackhi_epi8(power_o, zero) : _mm256_unpacklo_epi8(power_o, zero);
            const __m256i x = i ? _mm256_unpackhi_epi8(extra, zero) : _mm256_unpacklo_epi8(extra, zero);
            const __m256i times = i ? _mm256_unpackhi_epi8(o, zero) : _mm256_unpacklo_epi8(o, zero);
            const __m256i a = i ? _mm256_unpackhi_epi8(anchor_low, anchor_high) : _mm256_unpacklo_epi8(anchor_low, anchor_high);
            __m256i own = x, sign = zero;
            if (any) {  /* the last extra bit of some is a sign */
                const __m256i t = i ? _mm256_unpackhi_epi8(turning, zero) : _mm256_unpacklo_epi8(turning, zero);
                const __m256i chosen = _mm256_sub_epi16(zero, t);
                own = _mm256_blendv_epi8(x, _mm256_srli_epi16(x, 1), chosen);
                sign = _mm256_and_si256(chosen, _mm256_slli_epi16(x, 15));
            }
            const __m256i places = _mm256_add_epi16(_mm256_mullo_epi16(shifted[i], p), own);
            const __m256i word = _mm256_add_epi16(a, _mm256_sub_epi16(places, _mm256_mullo_epi16(steps[i], times)));
            words[i] = _mm256_xor_si256(word, sign);
        }
        uint32_t escaped = _mm256_movemask_epi8(none);
        if (escape + __builtin_popcount(escaped) > c->escaped) break;
        _mm256_storeu_si256((__m256i *)(out + k), _mm256_permute2x128_si256(words[0], words[1], 0x20));
        _mm256_storeu_si256((__m256i *)(out + k + 16), _mm256_permute2x128_si256(words[0], words[1], 0x31));
        for (; escaped; escaped &= escaped - 1) out[k + __builtin_ctz(escaped)] = c->escapes[escape++];
        at->side = bit, at->escape = escape;
    }
    return k;
}
#else
static int64_t coded_32(const Weight *w, const Coded *c, const Cells *cells, int64_t n, Cursor *at, int16_t *out) {
    (void)w, (void)c, (void)cells, (void)n, (void)at, (void)out;
    return 0;
}
#endif

static int coded_row(const Weight *w, const Coded *c, const Cells *cells, int64_t n, Cursor *at, int16_t *out) {
    const int64_t done = coded_32(w, c, cells, n, at, out);
    return coded_plain(w, c, cells, n, done, at, out) == c->columns;
}

/* list positions at the start of row n: counted from the start of its span */
static Cursor coded_find(const Weight *w, const Coded *c, const Cells *cells, int64_t n) {
    const int64_t span = n * c->columns / LISTED, first = span * LISTED;
    Cursor at = {c->starts[2 * span], c->starts[2 * span + 1]};
    for (int64_t row = first / c->columns, k = first % c->columns; row < n; row++, k = 0) {
        const uint8_t *codes = w->plane.codes + row * w->columns / 2;
        const uint8_t *scales = w->plane.scales + row * (w->columns / w->block);
        for (; k < c->columns; k++) {
            const int32_t rest = cells->rest[scales[k / w->block]].words[codes[k / 2] >> 4 * (k & 1) & 15];
            const Symbol s = symbol_of(c->fours + row * w->columns / 2, c->pairs + row * w->columns / 4, k, rest);
            at.side += s.length, at.escape += !s.symbol;
        }
    }
    return at;
}

/* whether a part that ended there, before row n, read all that is its own */
static int coded_fits(const Weight *w, const Coded *c, const Cells *cells, int64_t n, Cursor at) {
    if (n == w->rows) {
        const int64_t bytes = (at.side / 8 + STREAM_UNIT) / STREAM_UNIT * STREAM_UNIT + STREAM_UNIT;
        return bytes == c->stream && at.escape == c->escaped;
    }
    const Cursor next = coded_find(w, c, cells, n);
    return at.side == next.side && at.escape == next.escape;
}
