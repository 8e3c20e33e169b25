/* Optimizer step on split master weights, in one pass over memory. Compiled by build.py, without contraction: FMAs are
 * explicit (fmaf).
 *
 * The master is fp32. Its bits, as an integer, plus HALF are two halves: the upper 16, a bf16 number (the master
 * rounded half up), and the lower 16. The model computes with round-to-nearest-even: for a lower half of 0, a tie, with
 * an odd upper half, that is the upper half minus 1, and the weight's bit in `ties` is set. All three restore the
 * master bit for bit. Few tiles have such ties, marked in `tied`: the zero bits of other tiles are neither read nor
 * written. Gradients are bf16 or fp32. Moments are fp32, or 8-bit codes with one fp32 scale per BLOCK.
 *
 * The order of operations, and so the bits, are those of torch's fused optimizers on x86 (FusedAdamKernel.cpp,
 * FusedSGDKernel.cpp): for vectors of LANES numbers, and for the remainder after the last whole vector, where its
 * compiler contracted other products. Work is done in tiles that fit in L1, one vectorizable loop per stage. Threads
 * split a weight into parts of whole tiles: the bits are the same. Out of place, results are collected in L1 and stored
 * past the caches, so that the old bytes of the destination are not read first.
 */
#include <math.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif
#include "numbers.h"
#include "team.h"

#define INLINE static inline __attribute__((always_inline))
#define RARE static __attribute__((noinline))
#define TILE 1024
#define PART (16 * TILE)  /* work item of a team: some tens of microseconds */
#define BLOCK 256    /* moments per scale */
#define CHUNK 64     /* out of place: results in L1 at a time */
#define LANES 8
#define HALF 0x8000u
#define SMALLEST 1.17549435e-38f  /* smaller scales become 0: their inverse is not finite */

enum { BF16, FP32 };
enum { ADAM, SGD, LION };

/* NULL for what a rule does not use; all NULL: no weight. */
typedef struct {
    uint16_t *high, *low;
    uint8_t *ties, *tied;  /* a bit per weight, the first one's lowest; a byte per TILE, 0 if no bit is set */
    void *first, *second;  /* fp32, or 8 bits */
    float *first_scales, *second_scales;  /* one per BLOCK; 8-bit moments only */
    float *peak;  /* the largest second moments so far (AMSGrad) */
    const void *gradient;
} Weight;

typedef struct {
    int32_t rule, gradient_type, eight_bit, decoupled, maximize, nesterov, begins, pad;
    float divisor, factor;  /* gradient = stored / divisor * factor; 1: none */
    float decay;  /* weight decay; decoupled: factor of the master. None: 0 and 1 */
    float lerp, beta1, beta2, rest1, rest2;  /* rest: 1 - beta */
    float root, epsilon, rate;  /* root of the second bias correction; rate: signed step size */
} Step;

/* out = held * factor + more */
typedef struct {
    const void *held, *more;
    void *out;  /* may be `held` */
    int32_t held_type, more_type, out_type;
    float factor;
} Sum;

INLINE float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* -- masters and gradients */

INLINE float joined(uint16_t high, uint16_t low) { return of_bits(((uint32_t)high << 16 | low) - HALF); }

/* Both halves, rounded half up. A NaN whose upper half would become zero (its upper 17 bits except the sign all set)
 * loses the bit of HALF. */
INLINE uint32_t halves(float w) {
    uint32_t bits = bits_of(w);
    bits &= (bits & 0x7FFF8000) == 0x7FFF8000 ? 0xFFFF7FFF : 0xFFFFFFFF;
    return bits + HALF;
}

INLINE void join(const uint16_t *restrict high, const uint16_t *restrict low, int64_t n, float *restrict w) {
    for (int64_t i = 0; i < n; i++) w[i] = joined(high[i], low[i]);
}

/* Split, rounded half up; true if there may be ties. */
INLINE int split(const float *restrict w, int64_t n, uint16_t *restrict high, uint16_t *restrict low) {
    uint16_t least = 0xFFFF;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = halves(w[i]);
        high[i] = (uint16_t)(bits >> 16);
        low[i] = (uint16_t)bits;
        least = (uint16_t)bits < least ? (uint16_t)bits : least;
    }
    return !least;
}

/* Convert a tile's upper halves from nearest even to half up. */
RARE void to_half_up(uint16_t *restrict high, const uint8_t *ties, int64_t n) {
    for (int64_t i = 0; i < n; i++) high[i] += ties[i / 8] >> i % 8 & 1;
}

/* True if there is a tie that rounds to another upper half. */
RARE int any_down(const uint16_t *high, const uint16_t *low, int64_t n) {
    int any = 0;
    for (int64_t i = 0; i < n; i++) any |= !low[i] & high[i];
    return any;
}

/* Convert back to nearest even; true if any changed. */
RARE int to_even(uint16_t *restrict high, const uint16_t *restrict low, uint8_t *ties, int64_t n) {
    uint8_t any = 0;
    for (int64_t i = 0; i < n; i += 8) {
        uint8_t down = 0;
        for (int j = 0; j < 8 && i + j < n; j++) {
            const int one = !low[i + j] & high[i + j];
            down |= one << j;
            high[i + j] -= one;
        }
        any |= ties[i / 8] = down;
    }
    return any != 0;
}

INLINE void read_gradient(const Weight *c, const Step *s, int64_t at, int64_t n, float *restrict g) {
    if (s->gradient_type == BF16) {
        const uint16_t *from = (const uint16_t *)c->gradient + at;
        for (int64_t i = 0; i < n; i++) g[i] = bf16_value(from[i]);
    } else {
        memcpy(g, (const float *)c->gradient + at, n * sizeof(float));
    }
    if (s->divisor != 1) for (int64_t i = 0; i < n; i++) g[i] = g[i] / s->divisor;
    if (s->factor != 1) for (int64_t i = 0; i < n; i++) g[i] = g[i] * s->factor;
    if (s->maximize) for (int64_t i = 0; i < n; i++) g[i] = -g[i];
}

/* -- rules; numbers from `body` on are the remainder after the last whole vector */

/* Denominator of a step, from second moments. */
INLINE float divisor(const Step *s, float second) { return sqrtf(second) / s->root + s->epsilon; }

INLINE void adam(const Step *s, float *restrict w, float *restrict g, float *restrict m, float *restrict v,
                 float *restrict peak, int64_t body, int64_t n) {
    const float lerp = s->lerp, far = lerp - 1.0f, near = 1.0f - lerp;
    const float kept = s->decoupled ? s->decay : 1.0f;
    if (!s->decoupled && s->decay != 0) for (int64_t i = 0; i < n; i++) g[i] = fmaf(w[i], s->decay, g[i]);
    if (fabsf(lerp) < 0.5f) for (int64_t i = 0; i < n; i++) m[i] = fmaf(lerp, g[i] - m[i], m[i]);
    else {
        for (int64_t i = 0; i < body; i++) m[i] = fmaf(far, g[i] - m[i], g[i]);
        for (int64_t i = body; i < n; i++) m[i] = fmaf(-(g[i] - m[i]), near, g[i]);
    }
    for (int64_t i = 0; i < body; i++) v[i] = fmaf(s->rest2 * g[i], g[i], v[i] * s->beta2);
    for (int64_t i = body; i < n; i++) v[i] = fmaf(v[i], s->beta2, s->rest2 * g[i] * g[i]);
    if (peak) for (int64_t i = 0; i < n; i++) peak[i] = v[i] > peak[i] || v[i] != v[i] ? v[i] : peak[i];
    const float *roots = peak ? peak : v;
    for (int64_t i = 0; i < n; i++) w[i] = w[i] * kept + s->rate * m[i] / divisor(s, roots[i]);
}

/* Fast path of most AdamW tiles: one weight's step; `lerp` is below one half. Returns its new halves. */
INLINE uint32_t adamw_of(const Step *s, uint16_t high, uint16_t low, float g, float *m, float *v) {
    *m = fmaf(s->lerp, g - *m, *m);
    *v = fmaf(s->rest2 * g, g, *v * s->beta2);
    return halves(joined(high, low) * s->decay + s->rate * *m / (sqrtf(*v) / s->root + s->epsilon));
}

/* Join, step and split in one loop, for whole vectors. */
INLINE int adamw(const Step *step, uint16_t *restrict high, uint16_t *restrict low, const float *restrict g,
                 float *restrict m, float *restrict v, int64_t n) {
    const Step s = *step;
    uint16_t least = 0xFFFF;
    for (int64_t i = 0; i < n; i++) {
        float mean = m[i], square = v[i];
        const uint32_t bits = adamw_of(&s, high[i], low[i], g[i], &mean, &square);
        m[i] = mean;
        v[i] = square;
        high[i] = (uint16_t)(bits >> 16);
        low[i] = (uint16_t)bits;
        least = (uint16_t)bits < least ? (uint16_t)bits : least;
    }
    return !least;
}

INLINE void sgd(const Step *s, float *restrict w, float *restrict g, float *restrict m, int64_t body, int64_t n) {
    if (s->decay != 0) for (int64_t i = 0; i < n; i++) g[i] = fmaf(w[i], s->decay, g[i]);
    if (m) {
        if (s->begins) memcpy(m, g, n * sizeof(float));
        else {
            for (int64_t i = 0; i < body; i++) m[i] = fmaf(g[i], s->rest1, m[i] * s->beta1);
            for (int64_t i = body; i < n; i++) m[i] = fmaf(m[i], s->beta1, g[i] * s->rest1);
        }
        if (s->nesterov) for (int64_t i = 0; i < n; i++) g[i] = fmaf(m[i], s->beta1, g[i]);
        else g = m;
    }
    for (int64_t i = 0; i < n; i++) w[i] = fmaf(g[i], s->rate, w[i]);
}

/* Chen et al., 2023, arXiv 2302.06675, algorithm 2; each product and sum is rounded separately. */
INLINE void lion(const Step *s, float *restrict w, const float *restrict g, float *restrict m, int64_t n) {
    if (s->decay != 1) for (int64_t i = 0; i < n; i++) w[i] = w[i] * s->decay;
    for (int64_t i = 0; i < n; i++) {
        const float c = m[i] * s->beta1 + g[i] * s->rest1;
        const float sign = c > 0 ? 1.0f : c < 0 ? -1.0f : c != c ? c : 0.0f;
        w[i] = w[i] + sign * s->rate;
        m[i] = m[i] * s->beta2 + g[i] * s->rest2;
    }
}

/* -- 8-bit moments: companding after FlashOptim (Gonzalez Ortiz et al., 2026, arXiv 2602.23349): x / (1 + |x|) for
 * first moments, the square root for second ones, of numbers divided by their block's maximum. Differences: blocks of
 * 256, and no positive second moment becomes 0, so no step divides by epsilon alone. A block with a non-finite number
 * becomes NaN. */

INLINE float scale_of(const float *values, int64_t n, float *inverse) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = bits_of(values[i]) & 0x7FFFFFFF;
        largest = bits > largest ? bits : largest;
    }
    float scale = of_bits(largest);
    if (largest >= 0x7F800000) scale = of_bits(0x7FC00000);
    else if (scale < SMALLEST) scale = 0;
    *inverse = scale > 0 ? 1.0f / scale : 0.0f;
    return scale;
}

/* To the nearest integer, ties to even, for numbers below 2^22. */
INLINE float rounded(float x) { return x + 12582912.0f - 12582912.0f; }

INLINE void decode_first(const int8_t *restrict codes, const float *scales, int64_t n, float *restrict m) {
    for (int64_t b = 0; b < n; b += BLOCK) {
        const int64_t end = n - b < BLOCK ? n : b + BLOCK;
        const float scale = scales[b / BLOCK];
        for (int64_t i = b; i < end; i++) {
            const float code = codes[i];
            m[i] = scale * (code / (254.0f - fabsf(code)));
        }
    }
}

INLINE void encode_first(const float *restrict m, int64_t n, int8_t *restrict codes, float *scales) {
    for (int64_t b = 0; b < n; b += BLOCK) {
        const int64_t end = n - b < BLOCK ? n : b + BLOCK;
        float inverse;
        const float scale = scales[b / BLOCK] = scale_of(m + b, end - b, &inverse);
        if (!(scale > 0)) { memset(codes + b, 0, end - b); continue; }
        for (int64_t i = b; i < end; i++) {
            const float x = m[i] * inverse;
            codes[i] = (int8_t)(int32_t)rounded(254.0f * x / (1.0f + fabsf(x)));
        }
    }
}

INLINE void decode_second(const uint8_t *restrict codes, const float *scales, int64_t n, float *restrict v) {
    for (int64_t b = 0; b < n; b += BLOCK) {
        const int64_t end = n - b < BLOCK ? n : b + BLOCK;
        const float scale = scales[b / BLOCK];
        for (int64_t i = b; i < end; i++) {
            const float root = (float)codes[i] * (1.0f / 255.0f);
            v[i] = root * root * scale;
        }
    }
}

INLINE void encode_second(const float *restrict v, int64_t n, uint8_t *restrict codes, float *scales) {
    for (int64_t b = 0; b < n; b += BLOCK) {
        const int64_t end = n - b < BLOCK ? n : b + BLOCK;
        float inverse;
        const float scale = scales[b / BLOCK] = scale_of(v + b, end - b, &inverse);
        if (!(scale > 0)) { memset(codes + b, 0, end - b); continue; }
        for (int64_t i = b; i < end; i++) {
            const float code = rounded(sqrtf(v[i] * inverse) * 255.0f);
            codes[i] = (uint8_t)(int32_t)(v[i] > 0 && code < 1 ? 1.0f : code);
        }
    }
}

/* -- a tile, a part of a weight */

INLINE int is_adamw(const Weight *c, const Step *s) {
    return s->rule == ADAM && s->decoupled && fabsf(s->lerp) < 0.5f && !c->peak;
}

/* With halves rounded half up, on entry and exit; true if there may be ties. */
INLINE int step_halves(const Weight *c, const Step *s, int64_t at, int64_t n) {
    float w[TILE], g[TILE], m8[TILE], v8[TILE];
    const int64_t body = n - n % LANES;
    float *m = c->first ? (float *)c->first + at : 0, *v = c->second ? (float *)c->second + at : 0;
    if (s->eight_bit && c->first) decode_first((int8_t *)c->first + at, c->first_scales + at / BLOCK, n, m = m8);
    if (s->eight_bit && c->second) decode_second((uint8_t *)c->second + at, c->second_scales + at / BLOCK, n, v = v8);
    read_gradient(c, s, at, n, g);
    if (is_adamw(c, s) && n == body) {
        const int down = adamw(s, c->high + at, c->low + at, g, m, v, n);
        if (s->eight_bit) encode_first(m, n, (int8_t *)c->first + at, c->first_scales + at / BLOCK);
        if (s->eight_bit) encode_second(v, n, (uint8_t *)c->second + at, c->second_scales + at / BLOCK);
        return down;
    }
    join(c->high + at, c->low + at, n, w);
    if (s->rule == ADAM) adam(s, w, g, m, v, c->peak ? c->peak + at : 0, body, n);
    else if (s->rule == SGD) sgd(s, w, g, m, body, n);
    else lion(s, w, g, m, n);
    const int down = split(w, n, c->high + at, c->low + at);
    if (s->eight_bit && c->first) encode_first(m, n, (int8_t *)c->first + at, c->first_scales + at / BLOCK);
    if (s->eight_bit && c->second) encode_second(v, n, (uint8_t *)c->second + at, c->second_scales + at / BLOCK);
    return down;
}

INLINE void step_tile(const Weight *c, const Step *s, int64_t at, int64_t n) {
    const int before = c->tied[at / TILE];
    if (before) to_half_up(c->high + at, c->ties + at / 8, n);
    const int after = step_halves(c, s, at, n);
    if (before || (after && any_down(c->high + at, c->low + at, n)))
        c->tied[at / TILE] = to_even(c->high + at, c->low + at, c->ties + at / 8, n);
}

/* -- out of place */

typedef struct {
    _Alignas(64) uint16_t high[TILE], low[TILE];
    _Alignas(64) float first[TILE], second[TILE], peak[TILE];  /* moments of 8 bits take a quarter */
    float first_scales[TILE / BLOCK], second_scales[TILE / BLOCK];
    uint8_t ties[TILE / 8], tied;
} Tile;

INLINE void *offset(const void *from, int64_t nbytes) { return from ? (char *)from + nbytes : 0; }

/* A tile where it lies. */
INLINE Weight tile_of(const Weight *c, const Step *s, int64_t at) {
    const int64_t moment = s->eight_bit ? 1 : sizeof(float), gradient = s->gradient_type == BF16 ? 2 : sizeof(float);
    return (Weight){
        c->high + at, c->low + at, c->ties + at / 8, c->tied + at / TILE,
        offset(c->first, at * moment), offset(c->second, at * moment),
        offset(c->first_scales, at / BLOCK * sizeof(float)), offset(c->second_scales, at / BLOCK * sizeof(float)),
        offset(c->peak, at * sizeof(float)), offset(c->gradient, at * gradient),
    };
}

INLINE void fetch(void *to, const void *from, int64_t nbytes) { if (from) memcpy(to, from, nbytes); }

/* Copy into L1; absent moments stay absent. */
INLINE Weight fetched(const Weight *from, const Step *s, int64_t n, Tile *t) {
    const int64_t moment = s->eight_bit ? n : n * (int64_t)sizeof(float);
    const int64_t scales = (n + BLOCK - 1) / BLOCK * (int64_t)sizeof(float);
    fetch(t->high, from->high, 2 * n);
    fetch(t->low, from->low, 2 * n);
    fetch(t->first, from->first, moment);
    fetch(t->second, from->second, moment);
    fetch(t->first_scales, from->first_scales, scales);
    fetch(t->second_scales, from->second_scales, scales);
    fetch(t->peak, from->peak, n * sizeof(float));
    t->tied = *from->tied;
    if (t->tied) memcpy(t->ties, from->ties, (n + 7) / 8);
    else memset(t->ties, 0, sizeof t->ties);
    return (Weight){
        t->high, t->low, t->ties, &t->tied, from->first ? t->first : 0, from->second ? t->second : 0,
        t->first_scales, t->second_scales, from->peak ? t->peak : 0, from->gradient,
    };
}

#if defined(__AVX512F__)
#define STREAMED 64
#define STREAM(to, from) _mm512_stream_si512((__m512i *)(to), _mm512_load_si512((const __m512i *)(from)))
#elif defined(__AVX__)
#define STREAMED 32
#define STREAM(to, from) _mm256_stream_si256((__m256i *)(to), _mm256_load_si256((const __m256i *)(from)))
#elif defined(__SSE2__)
#define STREAMED 16
#define STREAM(to, from) _mm_stream_si128((__m128i *)(to), _mm_load_si128((const __m128i *)(from)))
#endif

/* Store past the caches. */
INLINE void stream(void *to, const void *from, int64_t nbytes) {
    if (!to) return;
    int64_t at = 0;
#ifdef STREAMED
    if (((uintptr_t)to | (uintptr_t)from) % STREAMED == 0)
        for (; at + STREAMED <= nbytes; at += STREAMED) STREAM((char *)to + at, (const char *)from + at);
#endif
    if (at < nbytes) memcpy((char *)to + at, (const char *)from + at, nbytes - at);
}

INLINE void store(const Weight *to, const Step *s, int64_t n, const Tile *t) {
    const int64_t moment = s->eight_bit ? n : n * (int64_t)sizeof(float);
    const int64_t scales = (n + BLOCK - 1) / BLOCK * (int64_t)sizeof(float);
    stream(to->high, t->high, 2 * n);
    stream(to->low, t->low, 2 * n);
    stream(to->first, t->first, moment);
    stream(to->second, t->second, moment);
    stream(to->peak, t->peak, n * sizeof(float));
    if (to->first_scales) memcpy(to->first_scales, t->first_scales, scales);
    if (to->second_scales) memcpy(to->second_scales, t->second_scales, scales);
    if (*to->tied || t->tied) memcpy(to->ties, t->ties, (n + 7) / 8);  /* else all bits are 0 already */
    *to->tied = t->tied;
}

/* Fast path of most AdamW tiles: few results at a time, so that reads, arithmetic and stores overlap, where a whole
 * tile is copied, updated and stored in turns. For whole CHUNKs, without ties before. */
INLINE void adamw_into(const Weight *from, const Weight *to, const Step *step, int64_t n) {
    const Step s = *step;
    const float *first = from->first, *second = from->second;
    uint16_t least = 0xFFFF;
    for (int64_t at = 0; at < n; at += CHUNK) {
        _Alignas(64) uint16_t high[CHUNK], low[CHUNK];
        _Alignas(64) float m[CHUNK], v[CHUNK];
        float g[CHUNK];
        read_gradient(from, &s, at, CHUNK, g);
        for (int64_t i = 0; i < CHUNK; i++) {
            float mean = first[at + i], square = second[at + i];
            const uint32_t bits = adamw_of(&s, from->high[at + i], from->low[at + i], g[i], &mean, &square);
            m[i] = mean;
            v[i] = square;
            high[i] = (uint16_t)(bits >> 16);
            low[i] = (uint16_t)bits;
            least = (uint16_t)bits < least ? (uint16_t)bits : least;
        }
        stream(to->high + at, high, sizeof high);
        stream(to->low + at, low, sizeof low);
        stream((float *)to->first + at, m, sizeof m);
        stream((float *)to->second + at, v, sizeof v);
    }
    if (!least && any_down(to->high, to->low, n)) *to->tied = to_even(to->high, to->low, to->ties, n);
    else if (*to->tied) *to->tied = 0, memset(to->ties, 0, n / 8);
}

/* Update weights from `begin`, a multiple of TILE, to `end`, another one or the last: in place, or into `out`. */
void vbrt_update(const Weight *weight, const Weight *out, const Step *step, int64_t begin, int64_t end) {
    Tile tile;
    for (int64_t at = begin; at < end; at += TILE) {
        const int64_t n = end - at < TILE ? end - at : TILE;
        Weight own = tile_of(weight, step, at);
        if (!out->high) {
            step_tile(&own, step, 0, n);
            continue;
        }
        const Weight to = tile_of(out, step, at);
        if (is_adamw(&own, step) && !step->eight_bit && n % CHUNK == 0 && !*own.tied) {
            adamw_into(&own, &to, step, n);
            continue;
        }
        own = fetched(&own, step, n, &tile);
        step_tile(&own, step, 0, n);
        store(&to, step, n, &tile);
    }
#ifdef __SSE2__
    if (out->high) _mm_sfence();
#endif
}

/* Euclidean norm of a gradient times a factor, bit-exact with torch.linalg.vector_norm on x86: LANES sums in fp32,
 * added from left to right, then the remainder: fours of products, and single ones with FMA. */
float vbrt_norm(const void *gradient, int32_t type, int64_t count, float factor) {
    float sums[LANES] = {0}, g[TILE];
    const Weight weight = {.gradient = gradient};
    const Step step = {.gradient_type = type, .divisor = 1, .factor = factor};
    float sum = 0;
    for (int64_t at = 0; at < count || !at; at += TILE) {
        const int64_t n = count - at < TILE ? count - at : TILE, body = n - n % LANES;
        read_gradient(&weight, &step, at, n, g);
        for (int64_t i = 0; i < body; i += LANES)
            for (int j = 0; j < LANES; j++) sums[j] += g[i + j] * g[i + j];
        if (count - at > TILE) continue;
        sum = sums[0];
        for (int j = 1; j < LANES; j++) sum += sums[j];
        const int64_t fours = body + (n - body) / 4 * 4;
        for (int64_t i = body; i < fours; i++) sum += g[i] * g[i];
        for (int64_t i = fours; i < n; i++) sum = fmaf(g[i], g[i], sum);
    }
    return sqrtf(sum);
}

/* Add numbers from `begin` to `end`, rounded to the type of `out` after the product and after the sum, like torch;
 * `more` is bf16 or of that type. */
void vbrt_add(const Sum *sum, int64_t begin, int64_t end) {
    float a[TILE], b[TILE];
    const Weight held = {.gradient = sum->held}, more = {.gradient = sum->more};
    const Step scaled = {.gradient_type = sum->held_type, .divisor = 1, .factor = sum->factor};
    const Step plain = {.gradient_type = sum->more_type, .divisor = 1, .factor = 1};
    for (int64_t at = begin; at < end; at += TILE) {
        const int64_t n = end - at < TILE ? end - at : TILE;
        read_gradient(&held, &scaled, at, n, a);
        read_gradient(&more, &plain, at, n, b);
        if (sum->out_type == FP32) {
            float *to = (float *)sum->out + at;
            for (int64_t i = 0; i < n; i++) to[i] = a[i] + b[i];
            continue;
        }
        uint16_t *to = (uint16_t *)sum->out + at;
        if (sum->factor != 1) for (int64_t i = 0; i < n; i++) a[i] = bf16_value((uint16_t)bf16_bits(a[i]));
        for (int64_t i = 0; i < n; i++) to[i] = (uint16_t)bf16_bits(a[i] + b[i]);
    }
}

/* -- by a team: each thread takes the next part; so does the caller, which returns when all are done */

typedef struct {
    Weight weight, to;  /* without `to.high`, in place */
    Step step;
    Sum sum;  /* without `out`, the job is an update instead */
    int64_t count;
    _Alignas(64) int64_t next;  /* start of the next part */
} Job;

static void do_numbers(const Job *j, int64_t begin, int64_t end) {
    if (j->sum.out) vbrt_add(&j->sum, begin, end);
    else vbrt_update(&j->weight, &j->to, &j->step, begin, end);
}

static void take_part(Team *t, int place) {
    Job *j = t->memory;
    for (int64_t at; (at = __atomic_fetch_add(&j->next, PART, __ATOMIC_RELAXED)) < j->count;) {
        do_numbers(j, at, j->count - at < PART ? j->count : at + PART);
        tick(t, 1);
    }
}

static void share(Team *t, const Job *job) {
    int64_t number = 0;
    if (job->count > PART) {
        pthread_mutex_lock(&t->posting);
        Job *own = job_memory(t, sizeof *own);
        if (own) *own = *job, number = open_job(t, (job->count + PART - 1) / PART);
        pthread_mutex_unlock(&t->posting);
    }
    if (number) vbrt_team_finish(t, number);
    else do_numbers(job, 0, job->count);
}

/* Update a whole weight. */
void vbrt_team_update(Team *t, const Weight *weight, const Weight *to, const Step *step, int64_t count) {
    share(t, &(Job){.weight = *weight, .to = *to, .step = *step, .count = count});
}

/* Add all numbers. */
void vbrt_team_add(Team *t, const Sum *sum, int64_t count) { share(t, &(Job){.sum = *sum, .count = count}); }
