/* Coder of fine planes (formats/fine_coding.py) from a weight and its coarse plane. Part of encode.c. */

typedef struct {
    const uint16_t *weight;  /* bf16 [rows, columns] */
    const uint8_t *codes, *bytes;  /* [rows, per_row * block / 2], [rows, per_row] */
    const int32_t *cells;  /* [mantissas, 16] */
    uint8_t *fours, *pairs;  /* [rows, per_row * block / 2], [rows, per_row * block / 4] */
    uint8_t *extra;  /* room for a byte a weight, and SLACK for each part */
    int16_t *escapes;  /* room for all weights in a call's rows, and SLACK per part */
    int32_t *counts;  /* [ceil(rows * columns / SPAN), 2]: extra bits and escapes per span, zeroed before */
    int64_t columns, per_row, mantissas;
    int32_t block;
} Coding;

typedef struct { uint8_t *at; uint64_t word; int count; } Bits;  /* next byte; bits that fill no byte yet */

static inline void put(Bits *bits, uint64_t value, int count) {  /* 56 at most */
    bits->word |= value << bits->count;
    memcpy(bits->at, &bits->word, 8);
    bits->count += count;
    bits->at += bits->count >> 3;
    bits->word >>= bits->count & 56;
    bits->count &= 7;
}

/* by scale byte: what tells a weight's symbol, as words */
typedef struct { int16_t anchors[256][16], rest[256][16]; } CodingCells;

/* Each of these codes weights of row n from column k to `end`. */

static void code_plain(const Coding *c, const CodingCells *cells, int64_t n, int64_t k, int64_t end, Bits *bits,
                       int16_t **escape) {
    const int64_t padded = c->per_row * c->block;
    const uint16_t *weight = c->weight + n * c->columns;
    const uint8_t *codes = c->codes + n * padded / 2, *bytes = c->bytes + n * c->per_row;
    uint8_t *fours = c->fours + n * padded / 2, *pairs = c->pairs + n * padded / 4;
    while (k < end) {
        const int64_t stop = end - k < 8 ? end : k + 8;
        uint64_t word = 0;
        int filled = 0;
        for (; k < stop; k++) {
            const int byte = bytes[k / c->block], code = codes[k / 2] >> 4 * (k & 1) & 15;
            const int32_t rest = cells->rest[byte][code], step = rest & 511, is_signed = rest >> 12 & 1;
            int32_t offset = (int16_t)(weight[k] - (uint16_t)cells->anchors[byte][code]);
            const int32_t turned = is_signed & (offset + (1 << 14)) >> 15;
            offset = (int16_t)(offset - (int32_t)((uint32_t)turned << 15));
            const int32_t below = (255 - offset) >> 7, octave = below < 0 ? 0 : below;
            const int32_t o = rest & 1 << 11 ? octave : offset < step;
            const int32_t places = offset + step * o, length = (rest >> 9 & 3) + (o < 6 ? o : 6), high = places >> length;
            const int fits = ((uint32_t)(high - 1) < 63) & (o < 6 - is_signed);
            const uint32_t symbol = fits ? high : 0, own = places & ((1 << length) - 1);
            **escape = (int16_t)weight[k];  /* kept only if it is one */
            *escape += !fits;
            word |= (uint64_t)(fits ? own << is_signed | turned : 0) << filled;
            filled += fits ? length + is_signed : 0;
            fours[k / 2] = (uint8_t)(k & 1 ? fours[k / 2] | symbol >> 2 << 4 : symbol >> 2);
            pairs[k / 4] = (uint8_t)(k & 3 ? pairs[k / 4] | (symbol & 3) << 2 * (k & 3) : symbol & 3);
        }
        put(bits, word, filled);
    }
}

#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VBMI2__) && defined(__BMI2__)
static inline __m512i two_rows(const int16_t *first, const int16_t *second) {
    const __m256i one = _mm256_loadu_si256((const __m256i *)first), two = _mm256_loadu_si256((const __m256i *)second);
    return _mm512_inserti64x4(_mm512_castsi256_si512(one), two, 1);
}

/* k is a multiple of 32 */
static int64_t code_32(const Coding *c, const CodingCells *cells, int64_t n, int64_t k, int64_t end, Bits *bits,
                       int16_t **escape) {
    const int64_t block = c->block, padded = c->per_row * block;
    const uint16_t *weight = c->weight + n * c->columns;
    const uint8_t *codes = c->codes + n * padded / 2, *bytes = c->bytes + n * c->per_row;
    uint8_t *fours = c->fours + n * padded / 2, *pairs = c->pairs + n * padded / 4;
    const __m512i upper = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    const __m512i one = _mm512_set1_epi16(1), zero = _mm512_setzero_si512(), six = _mm512_set1_epi16(6);
    const __m256i ones = _mm256_broadcastsi128_si256(_mm_set_epi64x(0xFF, 0x7F3F1F0F07030100));
    for (; k + 32 <= end; k += 32) {
        const int first = bytes[k / block], second = block == 16 ? bytes[k / 16 + 1] : first;
        const __m512i code = _mm512_or_si512(nibble_words(_mm_loadu_si128((const __m128i *)(codes + k / 2))), upper);
        const __m512i anchor = _mm512_permutexvar_epi16(code, two_rows(cells->anchors[first], cells->anchors[second]));
        const __m512i rest = _mm512_permutexvar_epi16(code, two_rows(cells->rest[first], cells->rest[second]));
        const __m512i given = _mm512_loadu_si512(weight + k), step = _mm512_and_si512(rest, _mm512_set1_epi16(511));
        const __mmask32 octaves = _mm512_test_epi16_mask(rest, _mm512_set1_epi16(1 << 11));
        const __mmask32 is_signed = _mm512_test_epi16_mask(rest, _mm512_set1_epi16(1 << 12));
        __m512i offset = _mm512_sub_epi16(given, anchor), turned = zero;
        if (is_signed) {
            turned = _mm512_maskz_add_epi16(is_signed, offset, _mm512_set1_epi16(1 << 14));
            turned = _mm512_srli_epi16(turned, 15);
            offset = _mm512_sub_epi16(offset, _mm512_slli_epi16(turned, 15));
        }
        /* 255 - offset wraps for offsets that no symbol has */
        const __m512i below = _mm512_srai_epi16(_mm512_subs_epi16(_mm512_set1_epi16(255), offset), 7);
        __m512i o = _mm512_maskz_mov_epi16(_mm512_cmplt_epi16_mask(offset, step), one);
        o = _mm512_mask_max_epi16(o, octaves, below, zero);
        const __m512i places = _mm512_add_epi16(offset, _mm512_mullo_epi16(step, _mm512_min_epi16(o, six)));
        const __m512i more = _mm512_and_si512(_mm512_srli_epi16(rest, 9), _mm512_set1_epi16(3));
        __m512i length = _mm512_add_epi16(more, _mm512_min_epi16(o, six));
        const __m512i high = _mm512_srav_epi16(places, length);
        const __m512i most = _mm512_mask_sub_epi16(six, is_signed, six, one);
        const __mmask32 fits = _mm512_cmplt_epu16_mask(_mm512_sub_epi16(high, one), _mm512_set1_epi16(63)) &
                               _mm512_cmplt_epi16_mask(o, most);
        const __m512i symbol = _mm512_maskz_mov_epi16(fits, high);
        __m512i own = _mm512_andnot_si512(_mm512_sllv_epi16(_mm512_set1_epi16(-1), length), places);
        if (is_signed) {
            own = _mm512_mask_slli_epi16(own, is_signed, own, 1);
            own = _mm512_or_si512(own, turned);
            length = _mm512_mask_add_epi16(length, is_signed, length, one);
        }
        const __m256i lengths = _mm512_cvtepi16_epi8(_mm512_maskz_mov_epi16(fits, length));
        const __m256i masks = _mm256_shuffle_epi8(ones, lengths), owns = _mm512_cvtepi16_epi8(own);
        const uint64_t mask[4] = {_mm256_extract_epi64(masks, 0), _mm256_extract_epi64(masks, 1),
                                  _mm256_extract_epi64(masks, 2), _mm256_extract_epi64(masks, 3)};
        const uint64_t word[4] = {_mm256_extract_epi64(owns, 0), _mm256_extract_epi64(owns, 1),
                                  _mm256_extract_epi64(owns, 2), _mm256_extract_epi64(owns, 3)};
        for (int i = 0; i < 4; i++) put(bits, _pext_u64(word[i], mask[i]), __builtin_popcountll(mask[i]));
        if (fits != ~0u) {
            _mm512_storeu_si512(*escape, _mm512_maskz_compress_epi16(~fits, given));
            *escape += __builtin_popcount(~fits);
        }
        const __m512i four = _mm512_madd_epi16(_mm512_srli_epi16(symbol, 2), _mm512_set1_epi32(0x00100001));
        _mm_storeu_si128((__m128i *)(fours + k / 2), _mm512_cvtepi32_epi8(four));
        const __m512i two = _mm512_madd_epi16(_mm512_and_si512(symbol, _mm512_set1_epi16(3)), _mm512_set1_epi32(0x00040001));
        const __m128i quads = _mm512_cvtepi64_epi8(_mm512_or_si512(two, _mm512_srli_epi64(two, 28)));
        _mm_storel_epi64((__m128i *)(pairs + k / 4), quads);
    }
    return k;
}
#else
static int64_t code_32(const Coding *c, const CodingCells *cells, int64_t n, int64_t k, int64_t end, Bits *bits,
                       int16_t **escape) {
    (void)c, (void)cells, (void)n, (void)end, (void)bits, (void)escape;
    return k;
}
#endif

/* Code weights of row n from column k to `end`, which lie in one span. */
static void code_some(const Coding *c, const CodingCells *cells, int64_t n, int64_t k, int64_t end, Bits *bits,
                      int16_t **escape) {
    const int64_t even = (k + 31) / 32 * 32;
    if (k < even) {
        code_plain(c, cells, n, k, even < end ? even : end, bits, escape);
        k = even;
    }
    if (k < end) k = code_32(c, cells, n, k, end, bits, escape);
    if (k < end) code_plain(c, cells, n, k, end, bits, escape);
}

/* Code rows `first` to `last` in parts. found [parts, 4] gets where each one's stream begins and its bits, and where its
 * escapes begin and how many: (byte, bits, entry, entries). */
void vbrt_code_fine(const Coding *c, int64_t first, int64_t last, int64_t *found, int parts) {
    CodingCells cells;
    for (int byte = 0; byte < 256; byte++) {
        for (int code = 0; code < 16; code++) {
            const int32_t cell = c->cells[byte % c->mantissas * 16 + code];
            cells.anchors[byte][code] = (int16_t)((cell >> 16) + byte / c->mantissas * 128);
            cells.rest[byte][code] = (int16_t)cell;
        }
    }
#pragma omp parallel for num_threads(parts) schedule(static)
    for (int part = 0; part < parts; part++) {
        const int64_t count = last - first, begin = count * part / parts, end = count * (part + 1) / parts;
        const int64_t padded = c->per_row * c->block, at = begin * c->columns;
        Bits bits = {c->extra + at + SLACK * part, 0, 0};
        int16_t *escape = c->escapes + at + SLACK * part;
        for (int64_t n = first + begin; n < first + end; n++) {
            for (int64_t k = 0; k < c->columns;) {
                const int64_t span = (n * c->columns + k) / SPAN, left = (span + 1) * SPAN - n * c->columns - k;
                const int64_t stop = c->columns - k < left ? c->columns : k + left;
                const Bits before = bits;
                const int16_t *escaped = escape;
                code_some(c, &cells, n, k, stop, &bits, &escape);
#pragma omp atomic
                c->counts[2 * span] += (int32_t)(8 * (bits.at - before.at) + bits.count - before.count);
#pragma omp atomic
                c->counts[2 * span + 1] += (int32_t)(escape - escaped);
                k = stop;
            }
            const int64_t used = (c->columns + 1) / 2, quads = (c->columns + 3) / 4;
            memset(c->fours + n * padded / 2 + used, 0, padded / 2 - used);
            memset(c->pairs + n * padded / 4 + quads, 0, padded / 4 - quads);
        }
        found[4 * part] = at + SLACK * part, found[4 * part + 1] = 8 * (bits.at - c->extra - at - SLACK * part) + bits.count;
        found[4 * part + 2] = at + SLACK * part, found[4 * part + 3] = escape - (c->escapes + at + SLACK * part);
    }
}

/* Append `bits` of a stream to one that has `bit` already; all memory after those is zero, and 8 bytes longer. */
void vbrt_append_bits(const uint8_t *from, int64_t bits, uint8_t *to, int64_t bit) {
    const int shift = bit & 7;
    to += bit >> 3;
    for (int64_t at = 0; at < bits; at += 56, from += 7, to += 7) {
        uint64_t word, there;
        memcpy(&word, from, 8), memcpy(&there, to, 8);
        const int64_t left = bits - at;
        word &= ((uint64_t)1 << (left < 56 ? left : 56)) - 1;
        there |= word << shift;
        memcpy(to, &there, 8);
    }
}
