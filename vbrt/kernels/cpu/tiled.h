/* Dot products of a few tokens with rows of weights in a GPU's tile order (e2m1/tiles.py): a tile is read once, and
 * nothing is reordered. In pairs of bf16 here, for CPUs with such products; in integers in tiled_avx2.h.
 *
 * A word has eight codes, as four pairs of halves with the sign in bit 15 and the magnitude in bits 8 to 6; the first
 * and the third pair are row g's, the others row g + 8's. The 16 words of half p and row g belong to lanes t = 0 to 3,
 * four each: word j has columns 32 t + 16 p + 4 (j ^ 2 (t / 2)) to + 3. So 512 bits have one scale per 128, and x is
 * stored in the order of the words.
 * Legend: g row 0 to 7 of a tile, t quarter of its columns, p half of a quarter.
 */
#define TILE_ROWS 16
#define TILE_COLUMNS 128
#define TILE_CODES 1024  /* bytes; followed by scales by lane: row g, then row g + 8 */
#define TILE_AHEAD 4096

static int64_t tiles_across(int64_t columns) { return (columns + TILE_COLUMNS - 1) / TILE_COLUMNS; }

static int64_t tile_bytes(int64_t block) { return TILE_CODES + TILE_ROWS * TILE_COLUMNS / block; }

#if defined(WIDE) || defined(AVX2)
#define TILED 1
#include "tiled_avx2.h"
#if defined(PAIRS) && defined(WIDE)
#define TILED_PAIRS 1
/* Convert a row of `inputs` bf16, zero-padded, to tile order: four times 32 numbers per tile. */
static void spread_pairs(const uint16_t *x, int64_t inputs, int64_t across, uint16_t *to) {
    /* pairs of columns by word, p and pair are 0: of t = 0 and 1, and of t = 2 and 3 */
    const __m512i low = _mm512_setr_epi32(0, 2, 4, 6, 16, 18, 20, 22, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i high = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 6, 0, 2, 20, 22, 16, 18);
    int64_t u = 0;
    for (; (u + 1) * TILE_COLUMNS <= inputs; u++) {
        __m512i of[4];
        for (int t = 0; t < 4; t++) of[t] = _mm512_loadu_si512(x + u * TILE_COLUMNS + 32 * t);
        for (int i = 0; i < 4; i++, to += 32) {
            const __m512i at = _mm512_set1_epi32(i / 2 * 8 + i % 2);
            const __m512i a = _mm512_permutex2var_epi32(of[0], _mm512_add_epi32(low, at), of[1]);
            const __m512i b = _mm512_permutex2var_epi32(of[2], _mm512_add_epi32(high, at), of[3]);
            _mm512_storeu_si512(to, _mm512_mask_blend_epi32(0xFF00, a, b));
        }
    }
    for (; u < across; u++)
        for (int p = 0; p < 2; p++)
            for (int pair = 0; pair < 2; pair++)
                for (int t = 0; t < 4; t++)
                    for (int j = 0; j < 4; j++, to += 2) {
                        const int64_t at = u * TILE_COLUMNS + 32 * t + 16 * p + 4 * (j ^ t >> 1 << 1) + 2 * pair;
                        to[0] = at < inputs ? x[at] : 0, to[1] = at + 1 < inputs ? x[at + 1] : 0;
                    }
}

/* Scales of row g in lanes 4 t + p, of row g + 8 in 4 t + 2 + p: E4M3 / 256, or powers of two relative to the largest,
 * where those below 2^-126 are 0. */
INLINE __m512 tile_scales(const uint8_t *at, int powers) {
    if (powers) {
        const __m128i twice = _mm_loadl_epi64((const __m128i *)at), bytes = _mm_unpacklo_epi16(twice, twice);
        const __m512i wide = _mm512_cvtepu8_epi32(_mm_subs_epu8(bytes, _mm_set1_epi8(112)));
        /* row g's, row g + 8's, each twice */
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_shuffle_epi32(wide, _MM_PERM_DBCA), 23));
    }
    const __m128i bytes = _mm_loadu_si128((const __m128i *)at), nan = _mm_set1_epi8(0x7F);
    const __mmask16 found = _mm_cmpeq_epi8_mask(_mm_and_si128(bytes, nan), nan);
    return _mm512_mask_mov_ps(e4m3_256ths(bytes), found, _mm512_set1_ps(NAN));
}

/* sums[r * TOKENS + m] of the rows of one row of tiles with tokens m, in units of the stored scales. */
INLINE void pair_dots_of_tiles(const uint8_t *tiles, int64_t across, int powers, const char *const *x, int tokens, float *sums) {
    const __m512i sign = _mm512_set1_epi16((short)0x8000);
    /* bf16 by magnitude; vpermw uses the lowest five bits, two of which are irrelevant */
    const __m512i level = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0));
    __m512 sum[TILE_ROWS][TOKENS];
    for (int r = 0; r < TILE_ROWS; r++)
        for (int m = 0; m < tokens; m++) sum[r][m] = _mm512_setzero_ps();
    for (int64_t u = 0; u < across; u++, tiles += TILE_CODES + (powers ? 64 : 128))
        for (int g = 0; g < 8; g++) {
            const __m512 scales = tile_scales(tiles + TILE_CODES + g * (powers ? 8 : 16), powers);
            for (int p = 0; p < 2; p++) {
                const uint8_t *at = tiles + p * (TILE_CODES / 2) + g * 64;
                _mm_prefetch((const char *)at + TILE_AHEAD, _MM_HINT_T0);
                const __m512i w = _mm512_loadu_si512(at), last = _mm512_xor_si512(w, _mm512_srli_epi32(w, 8));
                const __m512i sizes[4] = {
                    _mm512_permutexvar_epi16(_mm512_srli_epi16(w, 4), level), _mm512_permutexvar_epi16(w, level),
                    _mm512_permutexvar_epi16(_mm512_rol_epi32(w, 6), level),
                    _mm512_permutexvar_epi16(_mm512_srli_epi16(last, 6), level)};
                const __m512i signs[4] = {_mm512_slli_epi16(w, 2), _mm512_slli_epi16(w, 6), _mm512_slli_epi16(w, 12), last};
                __m512bh of[4];
                for (int i = 0; i < 4; i++)  /* size ^ (signs & sign) */
                    of[i] = (__m512bh)_mm512_ternarylogic_epi32(sizes[i], signs[i], sign, 0x78);
                const __m512 upper = p ? _mm512_permute_ps(scales, 0x55) : _mm512_permute_ps(scales, 0x00);
                const __m512 lower = p ? _mm512_permute_ps(scales, 0xFF) : _mm512_permute_ps(scales, 0xAA);
                for (int m = 0; m < tokens; m++) {
                    const char *here = x[m] + u * 2 * TILE_COLUMNS + p * 128;
                    const __m512bh x0 = (__m512bh)_mm512_loadu_si512(here), x1 = (__m512bh)_mm512_loadu_si512(here + 64);
                    const __m512 zero = _mm512_setzero_ps();
                    const __m512 one = _mm512_dpbf16_ps(_mm512_dpbf16_ps(zero, of[0], x0), of[2], x1);
                    const __m512 two = _mm512_dpbf16_ps(_mm512_dpbf16_ps(zero, of[1], x0), of[3], x1);
                    sum[g][m] = _mm512_fmadd_ps(one, upper, sum[g][m]);
                    sum[g + 8][m] = _mm512_fmadd_ps(two, lower, sum[g + 8][m]);
                }
            }
        }
    for (int r = 0; r < TILE_ROWS; r++)
        for (int m = 0; m < tokens; m++) sums[r * TOKENS + m] = _mm512_reduce_add_ps(sum[r][m]);
}
#else
#define TILED_PAIRS 0
#endif

/* Whether x of a type can be multiplied. In fp32, 16 bits would be too few. */
static int tiles_take(int x_type) { return x_type == BF16 || x_type == FP16; }

/* Bytes of a row of x in tile order. */
static int64_t tiled_row_bytes(int64_t columns) { return tiles_across(columns) * TILE_X; }

/* Convert a row of `inputs` numbers of x, zero-padded, to tile order. */
static void spread_tiles(const void *x, int type, int64_t first, int64_t inputs, int64_t across, char *to) {
#if TILED_PAIRS
    if (type == BF16) {
        spread_pairs((const uint16_t *)x + first, inputs, across, (uint16_t *)to);
        return;
    }
#endif
    if (type == BF16) spread_fixed(x, BF16, first, inputs, across, to);
    else spread_fixed(x, FP16, first, inputs, across, to);
}

INLINE void dots_of_tiles(const uint8_t *tiles, int64_t across, int powers, const char *const *x, int pairs, int tokens, float *sums) {
#if TILED_PAIRS
    if (pairs) {
        pair_dots_of_tiles(tiles, across, powers, x, tokens, sums);
        return;
    }
#endif
    fixed_dots_of_tiles(tiles, across, powers, x, tokens, sums);
}

INLINE void dots_of_form(const uint8_t *tiles, int64_t across, int powers, const char *const *x, int pairs, int tokens, float *sums) {
    if (tokens == 4) dots_of_tiles(tiles, across, powers, x, pairs, 4, sums);
    else if (tokens == 2) dots_of_tiles(tiles, across, powers, x, pairs, 2, sums);
    else dots_of_tiles(tiles, across, powers, x, pairs, 1, sums);
}

/* sums[r * TOKENS + m] of the rows of one row of tiles with tokens m, of a type */
static void dots_of_tile_row(const uint8_t *tiles, int64_t across, int64_t block, const char *const *x, int type, int tokens,
                             float unit, float *sums) {
    const int pairs = TILED_PAIRS && type == BF16;
    if (pairs && block == 16) dots_of_form(tiles, across, 0, x, 1, tokens, sums);
    else if (pairs) dots_of_form(tiles, across, 1, x, 1, tokens, sums);
    else if (block == 16) dots_of_form(tiles, across, 0, x, 0, tokens, sums);
    else dots_of_form(tiles, across, 1, x, 0, tokens, sums);
    const float whole = (block == 16 ? 256 * unit : unit) * (pairs ? 1 : 1.0f / TILE_LEVEL);
    for (int i = 0; i < TILE_ROWS * TOKENS; i++) sums[i] *= whole;
}

#endif
