/* Dot products of a few tokens with rows of 4-bit weights, or of 8-bit ones (`eight.h`): codes are decoded in registers
 * and multiplied there.
 *
 * weight = level[code] * (value[scale byte] * unit), or level[code] * scale for scales of 16 or 32 bits; a scale may be
 * applied to a sum of level[code] * x instead. Affine weights have levels 0 to 15 (signed ones -8 to 7) and an offset per
 * block, which is multiplied by the sum of the block's x: sums come with a row of x, so an offset costs one product per
 * block and token.
 * Two codes share a byte, the even column in the low nibble. A block has 16, 32, 64 or 128 columns.
 * The summation order of a dot product depends on the row's length alone.
 * `dots` itself is in one file per instruction set, with `Dots`, its scale tables and its span layout.
 */
#include <stdlib.h>
#include "numbers.h"

#define INLINE static inline __attribute__((always_inline))
#define TOKENS 4     /* tokens per decoding of a row */
#define TILE 4096    /* columns per lookup of scales */

/* SUPER: a byte times d, a half per SUPERBLOCK columns */
enum { FP32, BF16, FP16, BYTE, SUPER };
/* a block's offset: a number of the scales' type; -zero * scale; -min * dmin, a half per SUPERBLOCK columns; a zero point
 * of the scales' type, to which the difference of code and zero point is rounded */
enum { NO_OFFSET, VALUE, ZERO, MIN, FLOAT_ZERO };
#define SUPERBLOCK 256
/* codes: of 16 levels; of 8 bits: integers, those of weights with offsets without a sign, or E4M3; of 8 or 4 bits under a
 * FLOAT_ZERO */
enum { LEVELS, SIGNED, UNSIGNED, E4M3, DIFFERENCES, NIBBLES };
/* layout of inputs in spans: fp32, bf16, int8 or 16-bit fixed point, or in column order, as fp32 or bf16 */
enum { AS_FP32, AS_BF16, AS_INT8, AS_FIXED, IN_ORDER, PAIRS_IN_ORDER };
static const int SCALE_BYTES[] = {4, 2, 2, 1, 1};
static const int COLUMN_BYTES[] = {[AS_FP32] = 4, [AS_BF16] = 2, [AS_INT8] = 2, [AS_FIXED] = 3, [IN_ORDER] = 4, [PAIRS_IN_ORDER] = 2};

static inline float load(const void *from, int type, int64_t at) {
    if (type == FP32) return ((const float *)from)[at];
    const uint16_t word = ((const uint16_t *)from)[at];
    return type == BF16 ? bf16_value(word) : fp16_value(word);
}

static inline void store(void *to, int type, int64_t at, float value) {
    if (type == FP32) ((float *)to)[at] = value;
    else ((int16_t *)to)[at] = type == BF16 ? bf16_bits(value) : fp16_bits(value);
}

/* A row of weights, or the first row of a plane. */
typedef struct {
    const uint8_t *codes, *scales;
    const uint8_t *offsets;  /* numbers, zeros or mins */
    const uint8_t *d, *dmin;  /* halves by superblock */
} Row;

#include "int8.h"

/* -- dots: sums[r * TOKENS + m] of rows r with tokens m; `rows` and `tokens` are constants after inlining */

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define WIDE 1
#include "dots_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#define AVX2 1
#include "dots_avx2.h"
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include "dots_neon.h"
#else
#include "dots_plain.h"
#endif
#ifndef ROWS
#define ROWS 1  /* rows of a linear layer together */
#endif

/* Bytes of codes for `columns` weights. */
static inline int64_t code_bytes(int64_t columns, int64_t bits) { return columns * bits / 8; }

#include "eight.h"

/* Bytes of a row of x in spans, without sums. */
static inline int64_t span_bytes(int64_t columns) { return (columns + SPAN - 1) / SPAN * SPAN * sizeof(float); }

/* Row n of a plane. */
static inline Row row_at(Row plane, int64_t n, int64_t columns, int64_t block, int64_t bits, int scale_type, int offset_type) {
    const int64_t at = n * (columns >> __builtin_ctzll(block));  /* a division takes as long as a short row */
    Row row = {.codes = plane.codes + n * code_bytes(columns, bits), .scales = plane.scales + at * SCALE_BYTES[scale_type]};
    if (offset_type) row.offsets = plane.offsets + at * (offset_type == VALUE || offset_type == FLOAT_ZERO ? SCALE_BYTES[scale_type] : 1);
    if (scale_type == SUPER) {
        const int64_t bytes = n * ((columns + SUPERBLOCK - 1) / SUPERBLOCK) * 2;
        row.d = plane.d + bytes, row.dmin = plane.dmin + bytes;
    }
    return row;
}

INLINE void dots_in_form(const Dots *d, int rows, int tokens, float *sums) {
    if (d->form == IN_ORDER) {
        dots_of_bytes(d, rows, tokens, 0, sums);
        return;
    }
    if (d->form == PAIRS_IN_ORDER) {
        dots_of_bytes(d, rows, tokens, 1, sums);
        return;
    }
#ifndef WIDE
    if (d->form == AS_INT8) {
        dots_in_int8(d, rows, tokens, sums);
        return;
    }
#endif
    dots(d, rows, tokens, sums);
}

INLINE void dots_of_tokens(const Dots *d, int rows, int tokens, float *sums) {
    if (tokens == 4) dots_in_form(d, rows, 4, sums);
    else if (tokens == 2) dots_in_form(d, rows, 2, sums);
    else dots_in_form(d, rows, 1, sums);
}

/* Layout of x for these levels: int8 if it may be `rounded`, bf16 pairs if exact for levels and x, fixed point for AVX2
 * if exact for levels and x has 16 bits. Without levels x is in column order, in bf16 if it has that type and bf16 has all
 * codes. */
static int form_of(const float *levels, int64_t count, int64_t coding, int x_type, int rounded) {
    if (coding >= DIFFERENCES) return IN_ORDER;
    if (coding) return NARROW8 && x_type == BF16 ? PAIRS_IN_ORDER : IN_ORDER;
    if (rounded) return AS_INT8;
#ifdef PAIRS
    int exact = x_type == BF16;
    for (int64_t i = 0; i < count; i++) exact = exact && bf16_value((uint16_t)bf16_bits(levels[i])) == levels[i];
    return exact ? AS_BF16 : AS_FP32;
#elif defined(AVX2)
    return x_type != FP32 && count == 16 && small_step(levels) > 0 ? AS_FIXED : AS_FP32;
#else
    return AS_FP32;
#endif
}

/* Dots of x, in some layout, with rows of weights of `columns` columns; `values` are used for byte scales only. */
static Dots dots_with(const float *levels, const float *values, float unit, int64_t type, int64_t offset_type, int64_t coding,
                      int64_t block, int64_t columns, int form, Scales *scales) {
    Dots d = {.levels = levels, .scale_type = (int)type, .offset_type = (int)offset_type, .coding = (int)coding,
              .form = form, .shift = __builtin_ctzll(block), .columns = columns, .x_bytes = span_bytes(columns), .unit = unit};
    fill_scales(&d, values, unit, scales);
    if (offset_type) {
        d.step = 1;
        for (int i = 0; i < 16; i++) d.whole[i] = (int8_t)levels[i];
        return d;
    }
    if (form == AS_INT8) d.step = in_whole_steps(levels, d.whole);
#ifdef AVX2
    if (form == AS_FIXED) {
        d.step = small_step(levels);
        for (int i = 0; i < 16; i++) d.whole[i] = (int8_t)(levels[i] / d.step);
    }
#endif
#ifndef WIDE
    if (form == AS_INT8) d.step = in_fewest_steps(d.step, d.whole);
#endif
    return d;
}

/* Bytes of a row of x in spans, followed by its sums by `summed` columns (0: none). */
static inline int64_t row_bytes(int64_t columns, int64_t summed) {
    return span_bytes(columns) + (summed ? (columns / summed + 15) / 16 * 16 * sizeof(float) : 0);
}

/* Convert a span of x; words = sums by eight columns, of the numbers that are multiplied (not in column order). */
INLINE void spread_in_form(const float *span, int form, void *to, float *words) {
    if (form == IN_ORDER) {
        memcpy(to, span, SPAN * sizeof(float));
        return;
    }
    if (form == PAIRS_IN_ORDER) {
        for (int k = 0; k < SPAN; k++) ((int16_t *)to)[k] = bf16_bits(span[k]);
        return;
    }
#ifdef WIDE
    spread_span(span, form, to, words);
#else
    if (form == AS_INT8) round_span(span, to, words);
    else spread_span(span, form, to, words);
#endif
}

/* sums by block += sums of a span's words */
INLINE void add_to_sums(const float *words, int64_t first, int64_t columns, int shift, float *sums) {
    const int each = 1 << (shift - 3) < SPAN / 8 ? 1 << (shift - 3) : SPAN / 8;
    for (int w = 0; w < SPAN / 8 && first + 8 * w < columns; w += each) {
        float sum = 0;
        for (int i = 0; i < each; i++) sum += words[w + i];
        sums[(first + 8 * w) >> shift] += sum;
    }
}

/* Convert a row of `inputs` numbers of x to spans, zero-padded, in some layout, then sums by `summed` columns (0: none);
 * `type` is a constant after inlining. */
INLINE void spread_as(const void *x, int type, int64_t at, int64_t inputs, int64_t columns, int form, int64_t summed, char *to) {
    float words[SPAN / 8], *sums = (float *)(to + span_bytes(columns));
    if (summed) memset(sums, 0, row_bytes(columns, summed) - span_bytes(columns));
    for (int64_t first = 0; first < columns; first += SPAN) {
        const int64_t count = inputs - first < SPAN ? inputs - first : SPAN;
        float span[SPAN];
        if (count < SPAN) memset(span, 0, sizeof span);
        for (int64_t k = 0; k < count; k++) span[k] = load(x, type, at + first + k);
        spread_in_form(span, form, to + first * COLUMN_BYTES[form], words);
        if (summed) add_to_sums(words, first, columns, __builtin_ctzll(summed), sums);
    }
}

static void spread_row(const void *x, int type, int64_t at, int64_t inputs, int64_t columns, int form, int64_t summed, char *to) {
    if (type == FP32) spread_as(x, FP32, at, inputs, columns, form, summed, to);
    else if (type == BF16) spread_as(x, BF16, at, inputs, columns, form, summed, to);
    else spread_as(x, FP16, at, inputs, columns, form, summed, to);
}
