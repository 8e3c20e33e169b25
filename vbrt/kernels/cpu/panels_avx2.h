/* Products of many tokens for AVX2: up to 64 rows are decoded into L2, 512 columns at a time, and multiplied there by
 * three tokens at a time, with accumulators in registers. Weights and x are in spans, so lanes are columns, and nothing
 * is transposed. The summation order depends on the row's length alone.
 */
#define SIDE 64     /* rows of a tile */
#define STEP 4      /* rows at a time */
#define DEEP 512    /* columns per row decoded at a time: those of STEP rows and of PANEL tokens fit L1 */
#define PANEL 3     /* tokens at a time: 12 accumulators, 4 weights, or 3 of x, in 16 registers */
#define PASS 516    /* tokens per decoding of a tile: one for 512, two for 1,024 */

typedef struct {
    _Alignas(64) float tile[SIDE][DEEP];  /* in spans */
    float sums[PASS * SIDE];  /* [token, row] */
    float scales[DEEP / 16 + WORD], offsets[DEEP / 16 + WORD];
    int type;  /* of zero points, and of differences */
} Room;

/* sums [tokens, SIDE] += x [tokens, columns] and w [STEP, columns]; `tokens` is a constant after inlining */
INLINE void add_as(const float *const *x, const float (*w)[DEEP], int64_t columns, int tokens, float *sums) {
    __m256 sum[PANEL][STEP];
    for (int m = 0; m < tokens; m++)
        for (int r = 0; r < STEP; r++) sum[m][r] = _mm256_setzero_ps();
    for (int64_t k = 0; k < columns; k += 8) {
        __m256 each[PANEL];
        for (int m = 0; m < tokens; m++) each[m] = _mm256_loadu_ps(x[m] + k);
        for (int r = 0; r < STEP; r++) {
            const __m256 weight = _mm256_load_ps(w[r] + k);
            for (int m = 0; m < tokens; m++) sum[m][r] = _mm256_fmadd_ps(each[m], weight, sum[m][r]);
        }
    }
    for (int m = 0; m < tokens; m++) {
        const __m256 pairs[2] = {_mm256_hadd_ps(sum[m][0], sum[m][1]), _mm256_hadd_ps(sum[m][2], sum[m][3])};
        const __m256 lanes = _mm256_hadd_ps(pairs[0], pairs[1]);
        const __m128 rows = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
        _mm_store_ps(sums + m * SIDE, _mm_add_ps(_mm_load_ps(sums + m * SIDE), rows));
    }
}

/* `columns` weights of a row in spans, up to a whole span; `upper` and the kind of offset (of VALUE and MIN, VALUE) are
 * constants after inlining */
INLINE void decode_spans(const Dots *d, const uint8_t *codes, const Room *room, int64_t columns, int upper, int offset_type,
                         float *out) {
    const Lookup of = lookup_of(d);
    for (int64_t k = 0; k < columns; k += SPAN, out += SPAN) {
        const uint8_t *at = codes + k / 2;
        __m256i code[2];
        halves_of(columns - k >= SPAN ? _mm256_loadu_si256((const __m256i *)at) : codes_at(at, columns - k), code);
        const __m256 scale = _mm256_loadu_ps(room->scales + (k >> d->shift));
        const __m256 offset = offset_type ? _mm256_loadu_ps(room->offsets + (k >> d->shift)) : _mm256_setzero_ps();
        for (int half = 0; half < 2; half++) {
            __m256 level[4];
            levels_of(of.bytes, code, half, upper, level);
            const __m256 factor = _mm256_permutevar8x32_ps(scale, of.order[half]);
            const __m256 term = _mm256_permutevar8x32_ps(offset, of.order[half]);
            for (int c = 0; c < 4; c++) {
                __m256 weight = _mm256_mul_ps(offset_type == ZERO ? _mm256_sub_ps(level[c], term) : level[c], factor);
                if (offset_type == VALUE) weight = _mm256_add_ps(weight, term);
                _mm256_store_ps(out + 32 * half + 8 * c, weight);
            }
        }
    }
}

/* `columns` weights without levels of a row in order; the kinds of codes and offsets are constants after inlining */
INLINE void decode_in_order(const uint8_t *codes, const Room *room, int shift, int64_t columns, int coding, int offset_type,
                            float *out) {
    const int bits = coding == NIBBLES ? 4 : 8;
    for (int64_t k = 0; k < columns; k += 16) {
        const Lanes scale = all_of(room->scales[k >> shift]);
        const Lanes offset = offset_type ? all_of(room->offsets[k >> shift]) : _mm256_setzero_ps();
        Lanes both[2];
        if (offset_type == FLOAT_ZERO) sixteen_differences(codes + code_bytes(k, bits), coding, room->offsets[k >> shift], room->type, both);
        else sixteen_whole(codes + k, coding, both);
        for (int j = 0; j < 2; j++) {
            Lanes weight = _mm256_mul_ps(offset_type == ZERO ? _mm256_sub_ps(both[j], offset) : both[j], scale);
            if (offset_type == VALUE) weight = _mm256_add_ps(weight, offset);
            _mm256_store_ps(out + k + 8 * j, weight);
        }
    }
    for (int64_t k = columns; k % SPAN; k++) out[k] = 0;
}

/* Decode `count` rows from n on, `columns` of each from `first` on. Products with what else the tile holds are dropped. */
static void fill_tile(const Weight *w, const Dots *d, int64_t n, int64_t count, int64_t first, int64_t columns, Room *room) {
    Dots row = *d;
    room->type = (int)w->scale_type;
    for (int64_t r = 0; r < count; r++) {
        row.row[0] = row_of(w, n + r);
        const uint8_t *codes = row.row[0].codes + code_bytes(first, w->bits);
        const uint8_t *ahead = codes + code_bytes(SIDE * w->columns, w->bits);
        for (int64_t i = 0; i < code_bytes(columns, w->bits); i += 64) _mm_prefetch((const char *)ahead + i, _MM_HINT_T1);
        if (w->coding) {
            scales_of_bytes(&row, 0, first, columns, room->scales);
            if (w->offset_type) offsets_of_bytes(&row, 0, first, columns, NULL, room->offsets);
            if (w->coding == NIBBLES) decode_in_order(codes, room, d->shift, columns, NIBBLES, FLOAT_ZERO, room->tile[r]);
            else if (w->coding == DIFFERENCES) decode_in_order(codes, room, d->shift, columns, DIFFERENCES, FLOAT_ZERO, room->tile[r]);
            else if (w->offset_type == ZERO) decode_in_order(codes, room, d->shift, columns, UNSIGNED, ZERO, room->tile[r]);
            else if (w->offset_type) decode_in_order(codes, room, d->shift, columns, UNSIGNED, VALUE, room->tile[r]);
            else if (w->coding == E4M3) decode_in_order(codes, room, d->shift, columns, E4M3, NO_OFFSET, room->tile[r]);
            else decode_in_order(codes, room, d->shift, columns, SIGNED, NO_OFFSET, room->tile[r]);
            continue;
        }
        scales_of(&row, 0, first, columns, room->scales);
        if (w->offset_type) offsets_of(&row, 0, first, columns, room->offsets);
        if (w->offset_type == ZERO) decode_spans(d, codes, room, columns, 1, ZERO, room->tile[r]);
        else if (w->offset_type) decode_spans(d, codes, room, columns, 1, VALUE, room->tile[r]);
        else if (d->upper) decode_spans(d, codes, room, columns, 1, NO_OFFSET, room->tile[r]);
        else decode_spans(d, codes, room, columns, 0, NO_OFFSET, room->tile[r]);
    }
}

INLINE __m256i bf16_of(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i near = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
    const __m256 nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
    return _mm256_blendv_epi8(near, _mm256_set1_epi32(0x7FC0), _mm256_castps_si256(nan));
}

/* `count` results of a token from index `at` of y on */
static void store_row(const Product *p, int64_t at, const float *sums, const float *bias, int64_t count) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m256 y = _mm256_add_ps(_mm256_loadu_ps(sums + i), _mm256_loadu_ps(bias + i));
        if (p->y_type == FP32) {
            _mm256_storeu_ps((float *)p->y + at + i, y);
        } else if (p->y_type == FP16) {
            _mm_storeu_si128((__m128i *)((int16_t *)p->y + at + i), _mm256_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT));
        } else {
            const __m256i words = bf16_of(y);
            const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
            _mm_storeu_si128((__m128i *)((int16_t *)p->y + at + i), packed);
        }
    }
    for (; i < count; i++) store(p->y, p->y_type, at + i, sums[i] + bias[i]);
}

/* y of `tokens` tokens from `from` on and of `count` rows from n on; x is in spans */
static void multiply_tile(const Weight *w, const Product *p, const Dots *d, const char *x, int64_t from, int64_t tokens,
                          int64_t n, int64_t count, Room *room) {
    const int64_t pitch = row_bytes(w->columns, 0);
    float bias[SIDE] = {0};
    for (int64_t r = 0; p->bias && r < count; r++) bias[r] = load(p->bias, p->bias_type, n + r);
    memset(room->sums, 0, tokens * SIDE * sizeof(float));
    for (int64_t first = 0; first < w->columns; first += DEEP) {
        const int64_t columns = w->columns - first < DEEP ? w->columns - first : DEEP;
        const int64_t padded = (columns + SPAN - 1) / SPAN * SPAN;
        fill_tile(w, d, n, count, first, columns, room);
        for (int64_t m = 0; m < tokens; m += PANEL) {
            const float *of[PANEL];
            for (int i = 0; i < PANEL; i++) of[i] = (const float *)(x + (m + i) * pitch) + first;
            float *sums = room->sums + m * SIDE;
            for (int64_t r = 0; r < count; r += STEP, sums += STEP)
                switch (tokens - m) {
                    case 1: add_as(of, room->tile + r, padded, 1, sums); break;
                    case 2: add_as(of, room->tile + r, padded, 2, sums); break;
                    default: add_as(of, room->tile + r, padded, 3, sums);
                }
        }
    }
    for (int64_t m = 0; m < tokens; m++) store_row(p, (from + m) * w->rows + n, room->sums + m * SIDE, bias, count);
}

/* y = x @ w.T + bias, in fp32; returns 0 if out of memory */
static int multiply_panels(const Weight *w, const Product *p, int threads) {
    const int64_t most = p->tokens < PASS ? p->tokens : PASS, pitch = row_bytes(w->columns, 0);
    /* smaller tiles where there are few rows: two for each thread */
    const int64_t fair = (w->rows / (2 * threads) + STEP - 1) / STEP * STEP, side = fair < STEP ? STEP : fair < SIDE ? fair : SIDE;
    char *memory = NULL;
    if (posix_memalign((void **)&memory, 64, threads * sizeof(Room) + most * pitch)) return 0;
    Room *rooms = (Room *)memory;
    char *x = (char *)(rooms + threads);
    Scales scales;
    const int form = w->coding ? IN_ORDER : AS_FP32;
    const Dots d = dots_for(w, form, &scales);
    Range ranges[threads];
    for (int64_t from = 0; from < p->tokens; from += PASS) {
        const int64_t tokens = p->tokens - from < PASS ? p->tokens - from : PASS;
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t m = 0; m < tokens; m++)
            spread_row(p->x, p->x_type, (from + m) * p->inputs, p->inputs, w->columns, form, 0, x + m * pitch);
        share_out(ranges, threads, (w->rows + side - 1) / side);
#pragma omp parallel num_threads(threads)
        {
            Taker mine = taker(ranges, threads);
            for (int64_t i; (i = take(&mine)) >= 0;) {
                const int64_t n = i * side, left = w->rows - n;
                multiply_tile(w, p, &d, x, from, tokens, n, left < side ? left : side, rooms + mine.first);
            }
        }
    }
    free(memory);
    return 1;
}
