/* Linear layers of 4-bit and 8-bit weights on a CPU: multiply rows by few tokens; decode them; merge a fine plane.
 * Compiled by build.py.
 *
 * A decoded weight is level[code] * (value[scale byte] * unit), both products rounded to fp32, bit-exact with the
 * reference; or level[code] * scale for scales of 16 or 32 bits. Those have no fine plane, nor have 8-bit codes, which
 * are their own levels: code * scale * unit. Affine weights are level * scale + offset or (code - zero) * scale, each
 * operation rounded to fp32; where zero points lie between codes, the difference then to the scales' type.
 * Legend: M tokens, N outputs, K inputs padded to the block.
 */
#include "dots.h"
#include "shares.h"

typedef struct {
    Row plane;  /* codes [N, K/2] or, for 8 bits, [N, K]; scales [N, K/block] of scale_type; offsets likewise */
    const float *levels, *values, *unit;  /* [16], [256], [1]; `values` for byte scales only */
    int64_t rows, columns, block, scale_type, offset_type, bits, coding;
} Weight;

static Row row_of(const Weight *w, int64_t n) {
    return row_at(w->plane, n, w->columns, w->block, w->bits, (int)w->scale_type, (int)w->offset_type);
}

/* Columns per sum of x that a product needs; 0: none. */
static int64_t summed(const Weight *w) { return w->offset_type && w->coding == LEVELS ? w->block : 0; }

typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));

typedef struct { float even, odd; } Pair;

static void fill_pairs(const float *levels, Pair *pairs) {
    for (int byte = 0; byte < 256; byte++) pairs[byte] = (Pair){levels[byte & 15], levels[byte >> 4]};
}

static inline float number_of(const uint8_t *at, int type) {
    uint16_t word;
    float number;
    if (type == FP32) {
        memcpy(&number, at, 4);
        return number;
    }
    memcpy(&word, at, 2);
    return type == FP16 ? fp16_value(word) : bf16_value(word);
}

/* `columns` weights from column `at` of a row on, in whole blocks; types are constants after inlining */
INLINE void decode_as(const Weight *w, const Pair *pairs, Row row, int64_t at, int64_t columns, float *out, int type,
                      int offset_type) {
    const float unit = type == BYTE ? *w->unit : 1;
    const int64_t width = SCALE_BYTES[type], offset_width = offset_type == VALUE ? width : 1;
    const uint8_t *codes = row.codes + at / 2;
#ifdef __AVX512F__
    const __m512 levels = _mm512_loadu_ps(w->levels);
    const __m512i shifts = _mm512_set1_epi64((int64_t)4 << 32);
    (void)pairs;
#endif
    for (int64_t first = 0; first < columns; first += w->block) {
        const int64_t block = (at + first) / w->block, superblock = (at + first) / SUPERBLOCK;
        const uint8_t *stored = row.scales + block * width;
        const float scale = type == BYTE ? w->values[*stored] * unit
                            : type == SUPER ? number_of(row.d + 2 * superblock, FP16) * *stored : number_of(stored, type);
        float offset = 0;  /* or zero */
        if (offset_type == VALUE) offset = number_of(row.offsets + block * offset_width, type);
        if (offset_type == ZERO) offset = row.offsets[block];
        if (offset_type == MIN) offset = -(number_of(row.dmin + 2 * superblock, FP16) * row.offsets[block]);
        for (int64_t k = first; k < first + w->block; k += 16, codes += 8) {
#ifdef __AVX512F__
            __m128i bytes = _mm_loadl_epi64((const __m128i *)codes);
            __m512i code = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, bytes));
            /* vpermps uses only the lowest four bits of an index */
            __m512 level = _mm512_permutexvar_ps(_mm512_srlv_epi32(code, shifts), levels);
            if (offset_type == ZERO) level = _mm512_sub_ps(level, _mm512_set1_ps(offset));
            level = _mm512_mul_ps(level, _mm512_set1_ps(scale));
            if (offset_type == VALUE || offset_type == MIN) level = _mm512_add_ps(level, _mm512_set1_ps(offset));
            _mm512_storeu_ps(out + k, level);
#else
            Vector level;
            for (int j = 0; j < 8; j++) memcpy((float *)&level + 2 * j, pairs + codes[j], sizeof(Pair));
            if (offset_type == ZERO) level -= offset;
            level *= scale;
            if (offset_type == VALUE || offset_type == MIN) level += offset;
            memcpy(out + k, &level, sizeof level);
#endif
        }
    }
}

/* the same without levels */
static void decode_in_columns(const Weight *w, Row row, int64_t at, int64_t columns, float *out) {
    const int type = (int)w->scale_type, offset_type = (int)w->offset_type;
    const float unit = type == BYTE ? 1 : *w->unit;
    const uint8_t *positive = row.codes + code_bytes(at, w->bits);
    const int8_t *whole = (const int8_t *)positive;
    for (int64_t first = 0; first < columns; first += w->block) {
        const int64_t block = (at + first) / w->block, superblock = (at + first) / SUPERBLOCK, end = first + w->block;
        const uint8_t *stored = row.scales + block * SCALE_BYTES[type];
        const float scale = type == BYTE ? w->values[*stored] * *w->unit
                            : type == SUPER ? number_of(row.d + 2 * superblock, FP16) * *stored : number_of(stored, type);
        if (w->coding >= E4M3) {
            const float zero = offset_type ? number_of(row.offsets + block * SCALE_BYTES[type], type) : 0;
            for (int64_t k = first; k < end; k += 16) {
                Lanes code[16 / LANES];
                if (w->coding == E4M3) sixteen_whole(positive + k, E4M3, code);
                else if (w->coding == NIBBLES) sixteen_differences(positive + k / 2, NIBBLES, zero, type, code);
                else sixteen_differences(positive + k, DIFFERENCES, zero, type, code);
                for (int i = 0; i < 16 / LANES; i++) to_memory(out + k + i * LANES, times(code[i], all_of(scale)));
            }
        } else if (offset_type == NO_OFFSET) {
            for (int64_t k = first; k < end; k++) out[k] = whole[k] * scale * unit;
        } else if (offset_type == ZERO) {
            const float zero = row.offsets[block];
            for (int64_t k = first; k < end; k++) out[k] = (positive[k] - zero) * scale;
        } else {
            const float offset = offset_type == VALUE ? number_of(row.offsets + block * SCALE_BYTES[type], type)
                                 : -(number_of(row.dmin + 2 * superblock, FP16) * row.offsets[block]);
            for (int64_t k = first; k < end; k++) out[k] = positive[k] * scale + offset;
        }
    }
}

INLINE void decode_numbers(const Weight *w, const Pair *pairs, Row row, int64_t at, int64_t columns, float *out,
                           int offset_type) {
    switch (w->scale_type) {
        case FP16: decode_as(w, pairs, row, at, columns, out, FP16, offset_type); break;
        case BF16: decode_as(w, pairs, row, at, columns, out, BF16, offset_type); break;
        default: decode_as(w, pairs, row, at, columns, out, FP32, offset_type);
    }
}

/* `columns` weights from column `at` of row n on, a block boundary */
static void decode(const Weight *w, const Pair *pairs, int64_t n, int64_t at, int64_t columns, float *out) {
    const Row row = row_of(w, n);
    if (w->coding) decode_in_columns(w, row, at, columns, out);
    else if (w->scale_type == BYTE) decode_as(w, pairs, row, at, columns, out, BYTE, NO_OFFSET);
    else if (w->scale_type == SUPER) decode_as(w, pairs, row, at, columns, out, SUPER, MIN);
    else if (w->offset_type == VALUE) decode_numbers(w, pairs, row, at, columns, out, VALUE);
    else if (w->offset_type == ZERO) decode_numbers(w, pairs, row, at, columns, out, ZERO);
    else decode_numbers(w, pairs, row, at, columns, out, NO_OFFSET);
}

/* Operands and results of a product: rows of one type each. */
typedef struct {
    const void *x, *bias;  /* [M, inputs], [N] or NULL */
    void *y;  /* [M, N] */
    int64_t tokens, inputs;  /* K without padding */
    int32_t x_type, bias_type, y_type, rounded;  /* rounded: x may be quantized to int8 */
} Product;

#define CHUNK 32  /* rows per work item */

/* y of rows first to last - 1; x is in spans */
static void multiply(const Weight *w, const Product *p, Dots d, const char *x, int64_t first, int64_t last) {
    const int64_t pitch = row_bytes(w->columns, summed(w));
    float sums[ROWS * TOKENS];
    for (int64_t n = first; n < last; n += ROWS) {  /* sequential, for the hardware prefetcher */
        for (int r = 0; r < ROWS; r++) d.row[r] = row_of(w, n + r < last ? n + r : last - 1);
        for (int64_t m = 0; m < p->tokens;) {
            const int64_t left = p->tokens - m;
            const int tokens = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            for (int i = 0; i < tokens; i++) d.x[i] = x + (m + i) * pitch;
            dots_of_tokens(&d, ROWS, tokens, sums);
            for (int r = 0; r < ROWS && n + r < last; r++) {
                const float bias = p->bias ? load(p->bias, p->bias_type, n + r) : 0;
                for (int i = 0; i < tokens; i++)
                    store(p->y, p->y_type, (m + i) * w->rows + n + r, sums[r * TOKENS + i] + bias);
            }
            m += tokens;
        }
    }
}

#define KEPT_BYTES (64 << 10)  /* inputs in spans on the stack */

/* One weight of a call: its rows are the chunks up to `end`; x is in spans. */
typedef struct { const Weight *w; const Product *p; Dots d; const char *x; int64_t end; } Part;

/* Whether two parts' inputs have the same layout in spans. */
static int shares_spans(const Part *one, const Part *other) {
    return one->p->x == other->p->x && one->p->tokens == other->p->tokens && one->p->inputs == other->p->inputs
        && one->p->x_type == other->p->x_type && one->w->columns == other->w->columns && one->d.form == other->d.form
        && summed(one->w) == summed(other->w);
}

static int64_t part_bytes(const Part *part) { return part->p->tokens * row_bytes(part->w->columns, summed(part->w)); }

/* Convert the inputs of all parts to spans, once per layout, at `at`. */
static void spread_parts(Part *parts, int count, char *at) {
    for (int i = 0; i < count; i++) {
        Part *part = parts + i;
        if (i && shares_spans(part, part - 1)) {
            part->x = part[-1].x;
            continue;
        }
        const Product *p = part->p;
        for (int64_t m = 0; m < p->tokens; m++)
            spread_row(p->x, p->x_type, m * p->inputs, p->inputs, part->w->columns, part->d.form, summed(part->w),
                       at + m * row_bytes(part->w->columns, summed(part->w)));
        part->x = at;
        at += part_bytes(part);
    }
}

static void multiply_parts(const Part *parts, int count, int threads) {
    Range ranges[threads];
    share_out(ranges, threads, parts[count - 1].end);
#pragma omp parallel num_threads(threads)
    {
        Taker mine = taker(ranges, threads);
        for (int64_t i; (i = take(&mine)) >= 0;) {
            const Part *part = parts;
            int64_t begin = 0;
            for (; i >= part->end; part++) begin = part->end;
            const int64_t first = (i - begin) * CHUNK, end = first + CHUNK, rows = part->w->rows;
            multiply(part->w, part->p, part->d, part->x, first, end < rows ? end : rows);
        }
    }
}

static Dots dots_for(const Weight *w, int form, Scales *scales) {
    return dots_with(w->levels, w->values, *w->unit, w->scale_type, w->offset_type, w->coding, w->block, w->columns, form, scales);
}

/* y = x @ w.T + bias for `count` weights, bit-exact with a call for each; returns 0 if out of memory */
int vbrt_linears(const Weight *const *weights, const Product *products, int count, int threads) {
    static _Thread_local _Alignas(64) char kept[KEPT_BYTES];
    Part parts[count];
    Scales scales[count];
    int64_t bytes = 0, chunks = 0;
    for (int i = 0; i < count; i++) {
        const Weight *w = weights[i];
        chunks += (w->rows + CHUNK - 1) / CHUNK;
        parts[i] = (Part){.w = w, .p = products + i, .end = chunks};
        const int form = form_of(w->levels, 16, w->coding, products[i].x_type, products[i].rounded);
        parts[i].d = dots_for(w, form, scales + i);
        if (!i || !shares_spans(parts + i, parts + i - 1)) bytes += part_bytes(parts + i);
    }
    char *x = kept;
    if (bytes > KEPT_BYTES && posix_memalign((void **)&x, 64, bytes)) return 0;
    spread_parts(parts, count, x);
    multiply_parts(parts, count, threads);
    if (x != kept) free(x);
    return 1;
}

int vbrt_linear(const Weight *w, const Product *p, int threads) { return vbrt_linears(&w, p, 1, threads); }

/* The same with x, biases and results of one type; biases: NULL, or an array with NULL for none. */
typedef struct {
    const Weight *const *weights;
    const void *x;
    const void *const *biases;
    void *const *ys;
    int64_t tokens, inputs;
    int32_t count, type, rounded, threads;
} Few;

int vbrt_few(const Few *f) {
    Product products[f->count];
    for (int i = 0; i < f->count; i++)
        products[i] = (Product){f->x, f->biases ? f->biases[i] : NULL, f->ys[i], f->tokens, f->inputs,
                                f->type, f->type, f->type, f->rounded};
    return vbrt_linears(f->weights, products, f->count, f->threads);
}

#define PIECE 1024  /* columns decoded, then rounded, within L1 */

/* one row, its first `inputs` columns, as 16-bit numbers */
static void decode_rounded(const Weight *w, const Pair *pairs, int64_t n, int64_t inputs, int16_t *out, int type) {
    _Alignas(64) float piece[PIECE];
    for (int64_t first = 0; first < inputs; first += PIECE) {
        const int64_t padded = w->columns - first < PIECE ? w->columns - first : PIECE;
        const int64_t count = inputs - first < padded ? inputs - first : padded;
        decode(w, pairs, n, first, padded, piece);
        if (type == BF16) for (int64_t k = 0; k < count; k++) out[first + k] = bf16_bits(piece[k]);
        else for (int64_t k = 0; k < count; k++) out[first + k] = fp16_bits(piece[k]);
    }
}

/* rows first to last: out fp32 [last - first, columns], or 16-bit [last - first, inputs] */
void vbrt_decode(const Weight *w, int64_t first, int64_t last, int64_t inputs, void *out, int type, int threads) {
    const int64_t k = w->columns;
    Pair pairs[256];
    fill_pairs(w->levels, pairs);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = first; n < last; n++)
        if (type == FP32) decode(w, pairs, n, 0, k, (float *)out + (n - first) * k);
        else decode_rounded(w, pairs, n, inputs, (int16_t *)out + (n - first) * inputs, type);
}

#ifdef WIDE
#include "panels_avx512.h"
#elif defined(AVX2)
#include "panels_avx2.h"
#endif

/* y = x @ w.T + bias for many tokens, with weights rounded to bf16 if x is bf16 and this CPU multiplies it; returns 0
 * if out of memory, or if this CPU has no panels */
int vbrt_panels(const Weight *w, const Product *p, int threads) {
#if defined(WIDE) && defined(PAIRS)
    return multiply_panels(w, p, p->x_type == BF16, threads);
#elif defined(WIDE)
    return multiply_panels(w, p, 0, threads);
#elif defined(AVX2)
    return multiply_panels(w, p, threads);
#else
    (void)w, (void)p, (void)threads;
    return 0;
#endif
}

int vbrt_has_panels(void) {
#if defined(WIDE) || defined(AVX2)
    return 1;
#else
    return 0;
#endif
}

/* maximum tokens for which vbrt_linear beats panels, or vbrt_decode and a matmul if there are none */
int vbrt_fused_tokens(void) { return vbrt_has_panels() ? 8 : 4; }

#include "merge.h"
