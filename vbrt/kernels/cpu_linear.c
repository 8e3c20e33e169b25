/* 4-bit weights on a CPU: decode rows to fp32 in cache, and multiply them there. Compiled by cpu_linear.py.
 *
 * weight = level[code] * (value[scale byte] * unit), both products rounded to fp32: the bits of the reference.
 * Two codes share a byte, the even column in the low nibble. A block has 16, 32 or 64 columns.
 * Legend: M tokens, N outputs, K inputs padded to the block.
 */
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef struct {
    const uint8_t *codes, *scales;  /* [N, K/2], [N, K/block] */
    const float *levels, *values, *unit;  /* [16], [256], [1] */
    int64_t rows, columns, block;
} Weight;

#define TILE 2048  /* columns that are decoded at a time: 8 KiB of fp32, beside as much of x in a 32 KiB L1 */
#define TOKENS 4   /* tokens that share one load of a decoded vector */

typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));

typedef struct { float even, odd; } Pair;

static void fill_pairs(const float *levels, Pair *pairs) {
    for (int byte = 0; byte < 256; byte++) pairs[byte] = (Pair){levels[byte & 15], levels[byte >> 4]};
}

/* `columns` weights, whole blocks of them */
static void decode(const Weight *w, const Pair *pairs, const uint8_t *codes, const uint8_t *scales, int64_t columns,
                   float *out) {
    const float unit = *w->unit;
#ifdef __AVX512F__
    const __m512 levels = _mm512_loadu_ps(w->levels);
    const __m512i shifts = _mm512_set1_epi64((int64_t)4 << 32);
    (void)pairs;
#endif
    for (int64_t first = 0; first < columns; first += w->block, scales++) {
        const float scale = w->values[*scales] * unit;
        for (int64_t k = first; k < first + w->block; k += 16, codes += 8) {
#ifdef __AVX512F__
            __m128i bytes = _mm_loadl_epi64((const __m128i *)codes);
            __m512i code = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, bytes));
            /* vpermps looks at the lowest four bits of an index only */
            __m512 level = _mm512_permutexvar_ps(_mm512_srlv_epi32(code, shifts), levels);
            _mm512_storeu_ps(out + k, _mm512_mul_ps(level, _mm512_set1_ps(scale)));
#else
            Vector level;
            for (int j = 0; j < 8; j++) memcpy((float *)&level + 2 * j, pairs + codes[j], sizeof(Pair));
            level *= scale;
            memcpy(out + k, &level, sizeof level);
#endif
        }
    }
}

static inline float total(const Vector *sum) {
    Vector v = *sum;
    for (int half = 8; half; half /= 2)
        for (int j = 0; j < half; j++) v[j] += v[j + half];
    return v[0];
}

/* sum[m] += w . x[m], 16 columns; w is loaded once */
static inline __attribute__((always_inline)) void multiply(const float *w, const float *x, int64_t k, int tokens,
                                                           Vector *sum) {
    const Vector w_j = *(const Vector *)w;
    for (int m = 0; m < tokens; m++) sum[m] += w_j * *(const Vector *)(x + m * k);
}

/* y[m * stride] += w . x[m] for `tokens` rows of x, a constant once this is inlined */
static inline __attribute__((always_inline)) void dots(const float *w, const float *x, int64_t k, int64_t columns,
                                                       int tokens, float *y, int64_t stride) {
    Vector sum[4][TOKENS] = {{{0}}};  /* four chains of additions hide their latency */
    const int chains = TOKENS / tokens;
    int64_t j = 0;
    for (; j + 16 * chains <= columns; j += 16 * chains)
        for (int c = 0; c < chains; c++) multiply(w + j + 16 * c, x + j + 16 * c, k, tokens, sum[c]);
    for (; j < columns; j += 16) multiply(w + j, x + j, k, tokens, sum[0]);
    for (int m = 0; m < tokens; m++) {
        for (int c = 1; c < chains; c++) sum[0][m] += sum[c][m];
        y[m * stride] += total(&sum[0][m]);
    }
}

/* y [M, N] = x [M, K] @ w.T, all fp32 */
void vbrt_linear(const Weight *w, const float *x, int64_t tokens, float *y, int threads) {
    const int64_t k = w->columns;
    Pair pairs[256];
    fill_pairs(w->levels, pairs);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < w->rows; n++) {
        float tile[TILE];
        for (int64_t m = 0; m < tokens; m++) y[m * w->rows + n] = 0;
        for (int64_t first = 0; first < k; first += TILE) {
            const int64_t columns = k - first < TILE ? k - first : TILE, at = n * k + first;
            decode(w, pairs, w->codes + at / 2, w->scales + at / w->block, columns, tile);
            int64_t m = 0;
            for (; m + TOKENS <= tokens; m += TOKENS)
                dots(tile, x + m * k + first, k, columns, TOKENS, y + m * w->rows + n, w->rows);
            for (; m < tokens; m++) dots(tile, x + m * k + first, k, columns, 1, y + m * w->rows + n, w->rows);
        }
    }
}

/* out fp32 [last - first, K]: rows first to last */
void vbrt_decode(const Weight *w, int64_t first, int64_t last, float *out, int threads) {
    const int64_t k = w->columns;
    Pair pairs[256];
    fill_pairs(w->levels, pairs);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = first; n < last; n++)
        decode(w, pairs, w->codes + n * k / 2, w->scales + n * k / w->block, k, out + (n - first) * k);
}

/* the most tokens for which vbrt_linear beats vbrt_decode and a matmul */
int vbrt_fused_tokens(void) {
#ifdef __AVX512F__
    return 16;
#else
    return 4;
#endif
}
