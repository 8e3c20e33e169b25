/* Products of many tokens: 32 rows are decoded into L2, transposed, and multiplied there by panels of up to 12 tokens,
 * with accumulators in registers. Nothing of the weight's size is written, and no weight is decoded twice.
 * A word is an fp32 number or a bf16 pair. The summation order depends on the row's length alone.
 */
#define SIDE 32      /* rows of a tile */
#define DEEP 256     /* words per row decoded at a time */
#define PANEL 12     /* tokens */
#define PASS 1020    /* tokens per decoding of a tile */
#define ROW (DEEP + 16)  /* row pitch in words, not a power of two */

typedef struct {
    _Alignas(64) float tile[DEEP * SIDE];  /* [word, row] */
    float rows[16 * ROW];
    float scales[2 * DEEP / 16 + 32], offsets[2 * DEEP / 16 + 32];
    int type;  /* of zero points, and of differences */
    float sums[PASS * SIDE];  /* [token, row] */
} Room;

static int64_t row_words(int64_t columns, int pairs) { return (columns / (pairs ? 2 : 1) + 15) / 16 * 16; }

/* sums [tokens, 32] += x [words, tokens] and w [words, 32]; `tokens` and `pairs` are constants after inlining */
INLINE void add_as(const float *x, const float *w, int64_t words, int tokens, int pairs, float *sums) {
    __m512 sum[PANEL][2];
#pragma GCC unroll 12
    for (int m = 0; m < tokens; m++)
        for (int i = 0; i < 2; i++) sum[m][i] = _mm512_loadu_ps(sums + m * SIDE + 16 * i);
    for (int64_t k = 0; k < words; k++, x += tokens, w += SIDE) {
        const __m512 w0 = _mm512_load_ps(w), w1 = _mm512_load_ps(w + 16);
#pragma GCC unroll 12
        for (int m = 0; m < tokens; m++) {
            const __m512 each = _mm512_set1_ps(x[m]);
#ifdef PAIRS
            if (pairs) {
                sum[m][0] = _mm512_dpbf16_ps(sum[m][0], (__m512bh)w0, (__m512bh)each);
                sum[m][1] = _mm512_dpbf16_ps(sum[m][1], (__m512bh)w1, (__m512bh)each);
                continue;
            }
#endif
            sum[m][0] = _mm512_fmadd_ps(w0, each, sum[m][0]);
            sum[m][1] = _mm512_fmadd_ps(w1, each, sum[m][1]);
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < tokens; m++)
        for (int i = 0; i < 2; i++) _mm512_storeu_ps(sums + m * SIDE + 16 * i, sum[m][i]);
}

#define OF(tokens) \
    case tokens: \
        if (pairs) add_as(x, w, words, tokens, 1, sums); \
        else add_as(x, w, words, tokens, 0, sums); \
        break;

static void add_panel(const float *x, const float *w, int64_t words, int tokens, int pairs, float *sums) {
    switch (tokens) {
        OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) OF(7) OF(8) OF(9) OF(10) OF(11) OF(12)
    }
}

/* transpose 16 x 16 words */
INLINE void turn_words(__m512i *v) {
    __m512i t[16], u[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            u[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            u[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int c = 0; c < 4; c++) {  /* u[4 i + c] has in lane j column 4 j + c of rows 4 i to 4 i + 3 */
        const __m512i even0 = _mm512_shuffle_i32x4(u[c], u[4 + c], 0x88), odd0 = _mm512_shuffle_i32x4(u[c], u[4 + c], 0xDD);
        const __m512i even1 = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0x88);
        const __m512i odd1 = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0xDD);
        v[c] = _mm512_shuffle_i32x4(even0, even1, 0x88);
        v[4 + c] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
        v[8 + c] = _mm512_shuffle_i32x4(even0, even1, 0xDD);
        v[12 + c] = _mm512_shuffle_i32x4(odd0, odd1, 0xDD);
    }
}

/* 16 weights of the block `at`; for 4 bits the lower half of a word is an even column's level, the upper an odd one's */
INLINE __m512 weights_at(const uint8_t *codes, __m512 levels, const Room *room, int64_t at, int bits, int coding,
                         int offset_type) {
    const __m512 scale = _mm512_set1_ps(room->scales[at]);
    __m512 level;
    if (offset_type == FLOAT_ZERO) {
        sixteen_differences(codes, coding, room->offsets[at], room->type, &level);
        return _mm512_mul_ps(level, scale);
    }
    if (bits == 8) {
        sixteen_whole(codes, coding, &level);
    } else {
        const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)codes));
        const __m512i both = _mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28));  /* vpermps uses the lowest four bits */
        level = _mm512_permutexvar_ps(both, levels);
    }
    if (offset_type == ZERO) return _mm512_mul_ps(_mm512_sub_ps(level, _mm512_set1_ps(room->offsets[at])), scale);
    const __m512 weight = _mm512_mul_ps(level, scale);
    return offset_type ? _mm512_add_ps(weight, _mm512_set1_ps(room->offsets[at])) : weight;
}

/* words of `columns` weights of a row, to a multiple of 16 words; `bits`, `pairs` and the kinds of codes and offsets (of
 * VALUE and MIN, VALUE) are constants after inlining */
INLINE void decode_words(const uint8_t *codes, const Room *room, int shift, int64_t columns, __m512 levels, int bits,
                         int pairs, int coding, int offset_type, float *out) {
    if (!pairs)
        for (int64_t k = 0; k < columns; k += 16)
            _mm512_store_ps(out + k, weights_at(codes + k * bits / 8, levels, room, k >> shift, bits, coding, offset_type));
#ifdef PAIRS
    else
        for (int64_t k = 0; k < columns; k += 32) {
            const uint8_t *at = codes + k * bits / 8;
            const __m512 low = weights_at(at, levels, room, k >> shift, bits, coding, offset_type);
            const __m512 high = k + 16 >= columns ? _mm512_setzero_ps()
                                : weights_at(at + 2 * bits, levels, room, (k + 16) >> shift, bits, coding, offset_type);
            _mm512_store_si512(out + k / 2, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
#endif
}

INLINE void decode_row(const Weight *w, const uint8_t *codes, const Room *room, int shift, int64_t columns, __m512 levels,
                       int pairs, float *out) {
    if (w->coding == NIBBLES) decode_words(codes, room, shift, columns, levels, 4, pairs, NIBBLES, FLOAT_ZERO, out);
    else if (w->coding == DIFFERENCES) decode_words(codes, room, shift, columns, levels, 8, pairs, DIFFERENCES, FLOAT_ZERO, out);
    else if (w->bits == 8 && w->offset_type == ZERO) decode_words(codes, room, shift, columns, levels, 8, pairs, UNSIGNED, ZERO, out);
    else if (w->bits == 8 && w->offset_type) decode_words(codes, room, shift, columns, levels, 8, pairs, UNSIGNED, VALUE, out);
    else if (w->coding == E4M3) decode_words(codes, room, shift, columns, levels, 8, pairs, E4M3, NO_OFFSET, out);
    else if (w->bits == 8) decode_words(codes, room, shift, columns, levels, 8, pairs, SIGNED, NO_OFFSET, out);
    else if (w->offset_type == ZERO) decode_words(codes, room, shift, columns, levels, 4, pairs, LEVELS, ZERO, out);
    else if (w->offset_type) decode_words(codes, room, shift, columns, levels, 4, pairs, LEVELS, VALUE, out);
    else decode_words(codes, room, shift, columns, levels, 4, pairs, LEVELS, NO_OFFSET, out);
}

/* Decode the tile of rows from n on, `columns` of them from `first` on; zeros beyond the last row and column. */
static void fill_tile(const Weight *w, const Dots *d, int64_t n, int64_t first, int64_t columns, int pairs, Room *room) {
    const __m512 levels = _mm512_loadu_ps(w->levels);
    const int64_t words = row_words(columns, pairs);
    Dots row = *d;
    room->type = (int)w->scale_type;
    for (int half = 0; half < 2; half++) {
        for (int r = 0; r < 16; r++) {
            const int64_t at = n + 16 * half + r;
            float *out = room->rows + r * ROW;
            if (at >= w->rows) {
                memset(out, 0, words * sizeof(float));
                continue;
            }
            row.row[0] = row_of(w, at);
            if (w->coding) scales_of_bytes(&row, 0, first, columns, room->scales);
            else scales_of(&row, 0, first, columns, room->scales);
            if (w->offset_type && w->coding) offsets_of_bytes(&row, 0, first, columns, NULL, room->offsets);
            else if (w->offset_type) offsets_of(&row, 0, first, columns, room->offsets);
            const uint8_t *codes = row.row[0].codes + code_bytes(first, w->bits);
            const uint8_t *ahead = codes + code_bytes(SIDE * w->columns, w->bits);
            for (int64_t i = 0; i < code_bytes(columns, w->bits); i += 64) _mm_prefetch((const char *)ahead + i, _MM_HINT_T1);
            if (pairs) decode_row(w, codes, room, d->shift, columns, levels, 1, out);
            else decode_row(w, codes, room, d->shift, columns, levels, 0, out);
        }
        for (int64_t k = 0; k < words; k += 16) {
            __m512i v[16];
            for (int r = 0; r < 16; r++) v[r] = _mm512_load_si512(room->rows + r * ROW + k);
            turn_words(v);
            for (int j = 0; j < 16; j++) _mm512_store_si512(room->tile + (k + j) * SIDE + 16 * half, v[j]);
        }
    }
}

/* Tokens before panel i of `panels`, of nearly equal size. */
static int64_t before(int64_t tokens, int64_t panels, int64_t i) { return tokens * i / panels; }

/* Transpose the first multiple of 16 words of x of tokens `from` to `to` - 1 to [words, tokens]; x has the word type.
*/
static int64_t turn_inputs(const Product *p, int64_t from, int64_t to, int pairs, float *out) {
    const int64_t step = to - from, bytes = p->inputs * (pairs ? 2 : 4), words = bytes / 64 * 16;
    const __mmask16 kept = (1 << step) - 1;
    for (int64_t k = 0; k < words; k += 16) {
        __m512i v[16];
        for (int m = 0; m < 16; m++)
            v[m] = m < step ? _mm512_loadu_si512((const char *)p->x + (from + m) * bytes + 4 * k) : _mm512_setzero_si512();
        turn_words(v);
        for (int j = 0; j < 16; j++) _mm512_mask_storeu_epi32(out + (k + j) * step, kept, v[j]);
    }
    return words;
}

/* x of tokens `from` to `to` - 1 as [words, tokens] */
static void spread_panel(const Product *p, int64_t from, int64_t to, int64_t words, int pairs, float *out) {
    const int64_t begin = pairs || p->x_type == FP32 ? turn_inputs(p, from, to, pairs, out) : 0;
    const int64_t count = p->inputs, step = to - from;
    for (int64_t m = from; m < to; m++) {
        float *at = out + (m - from);
        for (int64_t k = begin; k < words; k++) {
            uint16_t both[2] = {0};
            if (!pairs) at[k * step] = k < count ? load(p->x, p->x_type, m * count + k) : 0;
            else {
                for (int i = 0; i < 2 && 2 * k + i < count; i++) both[i] = ((const uint16_t *)p->x)[m * count + 2 * k + i];
                memcpy(at + k * step, both, 4);
            }
        }
    }
}

static void store_row(const Product *p, int64_t at, __m512 y, __mmask16 kept) {
    if (p->y_type == FP32) _mm512_mask_storeu_ps((float *)p->y + at, kept, y);
#ifdef PAIRS
    else if (p->y_type == BF16) _mm256_mask_storeu_epi16((int16_t *)p->y + at, kept, (__m256i)_mm512_cvtneps_pbh(y));
#endif
    else {
        float one[16];
        _mm512_storeu_ps(one, y);
        for (int i = 0; i < 16; i++) if (kept >> i & 1) store(p->y, p->y_type, at + i, one[i]);
    }
}

/* y of `tokens` tokens from `from` on and of rows n to n + 31; x is in panels */
static void multiply_tile(const Weight *w, const Product *p, const Dots *d, const float *x, int64_t from,
                          int64_t tokens, int64_t n, int pairs, Room *room) {
    const int64_t panels = (tokens + PANEL - 1) / PANEL, all = row_words(w->columns, pairs);
    const int64_t step = pairs ? 2 * DEEP : DEEP;
    memset(room->sums, 0, tokens * SIDE * sizeof(float));
    for (int64_t first = 0; first < w->columns; first += step) {
        const int64_t columns = w->columns - first < step ? w->columns - first : step, words = row_words(columns, pairs);
        fill_tile(w, d, n, first, columns, pairs, room);
        for (int64_t i = 0; i < panels; i++) {
            const int64_t begin = before(tokens, panels, i), count = before(tokens, panels, i + 1) - begin;
            const float *inputs = x + begin * all + (pairs ? first / 2 : first) * count;
            add_panel(inputs, room->tile, words, (int)count, pairs, room->sums + begin * SIDE);
        }
    }
    for (int half = 0; half < 2; half++) {
        const int64_t row = n + 16 * half, left = w->rows - row;
        if (left <= 0) return;
        const __mmask16 kept = left >= 16 ? 0xFFFF : (1 << left) - 1;
        float bias[16] = {0};
        for (int i = 0; p->bias && i < 16 && i < left; i++) bias[i] = load(p->bias, p->bias_type, row + i);
        const __m512 added = _mm512_loadu_ps(bias);
        for (int64_t m = 0; m < tokens; m++)
            store_row(p, (from + m) * w->rows + row, _mm512_add_ps(_mm512_loadu_ps(room->sums + m * SIDE + 16 * half), added),
                      kept);
    }
}

/* y = x @ w.T + bias, in bf16 if `pairs`, else in fp32; returns 0 if out of memory */
static int multiply_panels(const Weight *w, const Product *p, int pairs, int threads) {
    const int64_t tiles = (w->rows + SIDE - 1) / SIDE, words = row_words(w->columns, pairs);
    const int64_t most = p->tokens < PASS ? p->tokens : PASS;
    char *memory = NULL;
    if (posix_memalign((void **)&memory, 64, threads * sizeof(Room) + most * words * sizeof(float))) return 0;
    Room *rooms = (Room *)memory;
    float *x = (float *)(rooms + threads);
    Scales scales;
    const Dots d = dots_for(w, pairs ? AS_BF16 : AS_FP32, &scales);
    Range ranges[threads];
    for (int64_t from = 0; from < p->tokens; from += PASS) {
        const int64_t tokens = p->tokens - from < PASS ? p->tokens - from : PASS, panels = (tokens + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t i = 0; i < panels; i++) {
            const int64_t begin = before(tokens, panels, i), end = before(tokens, panels, i + 1);
            spread_panel(p, from + begin, from + end, words, pairs, x + begin * words);
        }
        share_out(ranges, threads, tiles);
#pragma omp parallel num_threads(threads)
        {
            Taker mine = taker(ranges, threads);
            for (int64_t i; (i = take(&mine)) >= 0;)
                multiply_tile(w, p, &d, x, from, tokens, i * SIDE, pairs, rooms + mine.first);
        }
    }
    free(memory);
    return 1;
}
