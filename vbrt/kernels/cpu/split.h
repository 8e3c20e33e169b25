/* Split of fine planes (formats/fine_plane.py) from a weight and its coarse plane. Part of encode.c. */

enum { SPAN = 4096 };  /* weights per entry of `starts` */
enum { SLACK = 64 };  /* entries written beyond a list's end */

typedef struct { int8_t *side; int16_t *escape; } Lists;  /* next entry of each */

typedef struct {
    const uint16_t *weight;  /* bf16 or fp16 [rows, columns] */
    const uint8_t *codes, *bytes;  /* [rows, per_row * block / 2], [rows, per_row] */
    const float *levels, *values;  /* [16], [256] by scale byte */
    uint8_t *low, *nibbles;  /* [rows, columns], [rows, ceil(columns / 2)] (fp16 only) */
    int8_t *side;  /* room for all weights in a call's rows, plus SLACK per thread */
    int16_t *escapes;
    int32_t *counts;  /* [ceil(rows * columns / SPAN), 2]: entries of both lists per span, zeroed before */
    int64_t columns, per_row;
    uint32_t wide;  /* bit c: code c is wide */
    int32_t block, width;  /* in-place bits: 8 for bf16, 12 for fp16 */
    float unit;
} Splitting;

static inline int16_t ordinal(int16_t bits) { return bits ^ ((bits >> 15) & 0x7FFF); }

/* ordinals of a block's 16 levels by scale byte */
static void fill_near(const Splitting *s, int16_t (*near)[16]) {
    for (int byte = 0; byte < 256; byte++) {
        const float scale = s->values[byte] * s->unit;
        for (int code = 0; code < 16; code++) {
            const float value = s->levels[code] * scale;
            near[byte][code] = ordinal(s->width == 8 ? bf16_bits(value) : fp16_bits(value));
        }
    }
}

/* Each of these splits weights from column k of row n on, appends to both lists, and returns how far it came. `width`
 * is a constant after inlining. */

INLINE int64_t split_plain(
    const Splitting *s, const int16_t (*near)[16], int64_t n, int64_t k, int64_t end, Lists *lists, int width) {
    const int64_t block = s->block;
    const uint16_t *restrict weight = s->weight + n * s->columns;
    const uint8_t *restrict codes = s->codes + n * s->per_row * block / 2, *restrict bytes = s->bytes + n * s->per_row;
    uint8_t *restrict low = s->low + n * s->columns, *restrict nibbles = s->nibbles + n * ((s->columns + 1) / 2);
    int8_t *restrict side = lists->side;
    int16_t *restrict escape = lists->escape;
    const int32_t half = 1 << (width - 1);
    const uint32_t wide_codes = s->wide;
    while (k < end) {
        const int64_t next = (k / block + 1) * block, stop = next < end ? next : end;
        const int16_t *restrict level = near[bytes[k / block]];
        for (; k < stop; k++) {
            const int shift = 4 * (k & 1), code = codes[k / 2] >> shift & 15;
            const int16_t delta = (int16_t)(ordinal((int16_t)weight[k]) - level[code]);
            const int wide = wide_codes >> code & 1, escaped = (wide ^ 1) & ((delta >= half) | (delta <= -half));
            const int kept = escaped ? -half : delta;
            *side = (int8_t)(delta >> width), *escape = delta;  /* kept only if it is one */
            side += wide, escape += escaped;
            low[k] = (uint8_t)kept;
            if (width == 12) {
                const uint8_t high = kept >> 8 & 15;
                nibbles[k / 2] = (uint8_t)(shift ? nibbles[k / 2] | high << 4 : high);
            }
        }
    }
    *lists = (Lists){side, escape};
    return k;
}

#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VBMI2__)
/* 32 words, one per nibble, the low one first */
static inline __m512i nibble_words(__m128i bytes) {
    const __m512i pair = _mm512_cvtepu8_epi32(bytes);
    return _mm512_and_si512(_mm512_or_si512(pair, _mm512_slli_epi32(pair, 12)), _mm512_set1_epi32(0x000F000F));
}

/* k is a multiple of 32 */
INLINE int64_t split_32(
    const Splitting *s, const int16_t (*near)[16], int64_t n, int64_t k, int64_t end, Lists *lists, int width) {
    const int64_t block = s->block;
    const uint16_t *weight = s->weight + n * s->columns;
    const uint8_t *codes = s->codes + n * s->per_row * block / 2, *bytes = s->bytes + n * s->per_row;
    uint8_t *low = s->low + n * s->columns, *nibbles = s->nibbles + n * ((s->columns + 1) / 2);
    const __m512i upper = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    const __m512i wide_codes = _mm512_movm_epi16(s->wide | s->wide << 16), half = _mm512_set1_epi16(1 << (width - 1));
    const __m512i least = _mm512_sub_epi16(_mm512_setzero_si512(), half);
    int8_t *side = lists->side;
    int16_t *escape = lists->escape;
    for (; k < end; k += 32) {
        const int64_t left = end - k, second = block == 16 && left > 16 ? k / block + 1 : k / block;
        const __mmask32 valid = left >= 32 ? ~0u : (1u << left) - 1;
        const __mmask16 pairs = left >= 32 ? 0xFFFF : (1u << (left + 1) / 2) - 1;
        const __m256i one = _mm256_loadu_si256((const __m256i *)near[bytes[k / block]]);
        const __m256i two = _mm256_loadu_si256((const __m256i *)near[bytes[second]]);
        const __m512i table = _mm512_inserti64x4(_mm512_castsi256_si512(one), two, 1);
        const __m512i code = _mm512_or_si512(nibble_words(_mm_maskz_loadu_epi8(pairs, codes + k / 2)), upper);
        const __m512i given = _mm512_maskz_loadu_epi16(valid, weight + k);
        const __m512i turned = _mm512_and_si512(_mm512_srai_epi16(given, 15), _mm512_set1_epi16(0x7FFF));
        const __m512i level = _mm512_permutexvar_epi16(code, table);
        const __m512i delta = _mm512_maskz_sub_epi16(valid, _mm512_xor_si512(given, turned), level);
        const __mmask32 wide = valid & _mm512_movepi16_mask(_mm512_permutexvar_epi16(code, wide_codes));
        const __mmask32 far = _mm512_cmpge_epi16_mask(delta, half) | _mm512_cmple_epi16_mask(delta, least);
        const __mmask32 escaped = valid & ~wide & far;
        const __m512i kept = _mm512_mask_mov_epi16(delta, escaped, least);
        /* whole vectors: compress-stores are slow */
        const __m256i high = _mm512_cvtepi16_epi8(_mm512_srai_epi16(delta, width));
        _mm256_storeu_si256((__m256i *)side, _mm256_maskz_compress_epi8(wide, high));
        _mm512_storeu_si512(escape, _mm512_maskz_compress_epi16(escaped, delta));
        side += __builtin_popcount(wide), escape += __builtin_popcount(escaped);
        _mm256_mask_storeu_epi8(low + k, valid, _mm512_cvtepi16_epi8(kept));
        if (width == 12) {
            const __m512i nibble = _mm512_and_si512(_mm512_srli_epi16(kept, 8), _mm512_set1_epi16(15));
            const __m512i pair = _mm512_or_si512(nibble, _mm512_srli_epi32(nibble, 12));
            _mm_mask_storeu_epi8(nibbles + k / 2, pairs, _mm512_cvtepi32_epi8(pair));
        }
    }
    *lists = (Lists){side, escape};
    return end;
}
#else
INLINE int64_t split_32(
    const Splitting *s, const int16_t (*near)[16], int64_t n, int64_t k, int64_t end, Lists *lists, int width) {
    return split_plain(s, near, n, k, end, lists, width);
}
#endif

/* Split row n, and count its entries per span. */
INLINE void split_row(const Splitting *s, const int16_t (*near)[16], int64_t n, Lists *lists, int width) {
    for (int64_t k = 0; k < s->columns;) {
        const int64_t flat = n * s->columns + k, span = flat / SPAN, left = (span + 1) * SPAN - flat;
        const int64_t end = s->columns - k < left ? s->columns : k + left, whole = (k + 31) / 32 * 32;
        const Lists before = *lists;
        if (k < whole) k = split_plain(s, near, n, k, whole < end ? whole : end, lists, width);
        if (k < end) k = split_32(s, near, n, k, end, lists, width);
#pragma omp atomic
        s->counts[2 * span] += (int32_t)(lists->side - before.side);
#pragma omp atomic
        s->counts[2 * span + 1] += (int32_t)(lists->escape - before.escape);
    }
}

/* Split rows `first` to `last` in parts. found [parts, 4] has each part's list positions on entry, and gets the
 * lengths: (first side, sides, first escape, escapes). */
void vbrt_split_fine(const Splitting *s, int64_t first, int64_t last, int64_t *found, int parts) {
    int16_t near[256][16];
    fill_near(s, near);
#pragma omp parallel for num_threads(parts) schedule(static)
    for (int part = 0; part < parts; part++) {
        const int64_t count = last - first, begin = count * part / parts, end = count * (part + 1) / parts;
        const int64_t at = begin * s->columns + SLACK * part;
        Lists lists = {s->side + at, s->escapes + at};
        for (int64_t n = first + begin; n < first + end; n++) {
            if (s->width == 8) split_row(s, (const int16_t (*)[16])near, n, &lists, 8);
            else split_row(s, (const int16_t (*)[16])near, n, &lists, 12);
        }
        found[4 * part] = found[4 * part + 2] = at;
        found[4 * part + 1] = lists.side - (s->side + at), found[4 * part + 3] = lists.escape - (s->escapes + at);
    }
}
