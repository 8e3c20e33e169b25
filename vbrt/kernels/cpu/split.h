/* Fine planes (formats/fine.py), made from a weight and its coarse plane. Part of encode.c. */

enum { SPAN = 4096 };  /* weights between two entries of `starts` */

typedef struct {
    const uint16_t *weight;  /* bf16 or fp16 [rows, columns] */
    const uint8_t *codes, *bytes;  /* [rows, per_row * block / 2], [rows, per_row] */
    const float *levels, *values;  /* [16], [256] by scale byte */
    uint8_t *low, *nibbles;  /* [rows, columns], [rows, ceil(columns / 2)] (fp16 only) */
    int8_t *side;  /* room for as many as there are weights in the rows of a call, and one a thread */
    int16_t *escapes;
    int32_t *counts;  /* [ceil(rows * columns / SPAN), 2]: entries of both lists in each span, zeros before */
    int64_t columns, per_row;
    uint32_t wide;  /* bit c: code c is wide */
    int32_t block, width;  /* bits in place: 8 for bf16, 12 for fp16 */
    float unit;
} Splitting;

static inline int16_t ordinal(int16_t bits) { return bits ^ ((bits >> 15) & 0x7FFF); }

/* ordinals of a block's 16 levels by its scale's byte */
static void fill_near(const Splitting *s, int16_t (*near)[16]) {
    for (int byte = 0; byte < 256; byte++) {
        const float scale = s->values[byte] * s->unit;
        for (int code = 0; code < 16; code++) {
            const float value = s->levels[code] * scale;
            near[byte][code] = ordinal(s->width == 8 ? bf16_bits(value) : fp16_bits(value));
        }
    }
}

/* Split the weights from column k of row n to `end`, and append to both lists. `width` is a constant once it is inlined. */
INLINE void split_run(
    const Splitting *s, const int16_t (*near)[16], int64_t n, int64_t k, int64_t end, int8_t **side, int16_t **escape,
    int width) {
    const int64_t block = s->block;
    const uint16_t *restrict weight = s->weight + n * s->columns;
    const uint8_t *restrict codes = s->codes + n * s->per_row * block / 2, *restrict bytes = s->bytes + n * s->per_row;
    uint8_t *restrict low = s->low + n * s->columns, *restrict nibbles = s->nibbles + n * ((s->columns + 1) / 2);
    int8_t *restrict sides = *side;
    int16_t *restrict escapes = *escape;
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
            *sides = (int8_t)(delta >> width), *escapes = delta;  /* overwritten unless it is one */
            sides += wide, escapes += escaped;
            low[k] = (uint8_t)kept;
            if (width == 12) {
                const uint8_t high = kept >> 8 & 15;
                nibbles[k / 2] = (uint8_t)(shift ? nibbles[k / 2] | high << 4 : high);
            }
        }
    }
    *side = sides, *escape = escapes;
}

static void split_row(const Splitting *s, const int16_t (*near)[16], int64_t n, int8_t **side, int16_t **escape) {
    for (int64_t k = 0; k < s->columns;) {
        const int64_t flat = n * s->columns + k, span = flat / SPAN, left = (span + 1) * SPAN - flat;
        const int64_t end = s->columns - k < left ? s->columns : k + left;
        const int8_t *sides = *side;
        const int16_t *escapes = *escape;
        if (s->width == 8) split_run(s, near, n, k, end, side, escape, 8);
        else split_run(s, near, n, k, end, side, escape, 12);
#pragma omp atomic
        s->counts[2 * span] += (int32_t)(*side - sides);
#pragma omp atomic
        s->counts[2 * span + 1] += (int32_t)(*escape - escapes);
        k = end;
    }
}

/* Split rows `first` to `last`. The lists of each of the parts that they are cut into begin where found [parts, 4] says,
 * which is also told how long they are: (first side, sides, first escape, escapes). */
void vbrt_split_fine(const Splitting *s, int64_t first, int64_t last, int64_t *found, int parts) {
    int16_t near[256][16];
    fill_near(s, near);
#pragma omp parallel for num_threads(parts) schedule(static)
    for (int part = 0; part < parts; part++) {
        const int64_t count = last - first, begin = count * part / parts, end = count * (part + 1) / parts;
        const int64_t at = begin * s->columns + part;
        int8_t *side = s->side + at;
        int16_t *escape = s->escapes + at;
        for (int64_t n = first + begin; n < first + end; n++)
            split_row(s, (const int16_t (*)[16])near, n, &side, &escape);
        found[4 * part] = found[4 * part + 2] = at;
        found[4 * part + 1] = side - (s->side + at), found[4 * part + 3] = escape - (s->escapes + at);
    }
}
