/* Dot products of a few tokens with rows of weights in tile order (tiled.h) for AVX2, with x in 16 bits: in integers,
 * which need the fewest instructions for a word's pairs of columns. A step of x is 1 / 32767 of the largest of 16
 * columns, so results differ by about 1e-5 of their size, where bf16 and fp16 round by 2e-3 and 3e-4.
 *
 * x of a tile: 128 columns in the order of the words, then scales in the order of the tile's: [t][row][p], the same for
 * both rows. 256 bits of codes have two lanes t, so their sums by lane and p are one vector for rows g and g + 8.
 */
#define TILE_STEPS 32767  /* a block's sum, 16 * 12 * 256 of them, fits 32 bits */
#define TILE_LEVEL 512  /* levels are multiplied by this: integers in the upper bytes */
#define TILE_SCALES (2 * TILE_COLUMNS)
#define TILE_X (TILE_SCALES + 64)  /* bytes */

/* sum + products of pairs */
INLINE __m256i plus_pairs(__m256i sum, __m256i level, __m256i x) {
#if defined(__AVXVNNI__)
    return _mm256_dpwssd_avx_epi32(sum, level, x);
#elif defined(__AVX512VNNI__)
    return _mm256_dpwssd_epi32(sum, level, x);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(level, x));
#endif
}

/* 16-bit levels of eight words' four pairs. Shifts bring each pair's codes to the same bits, a multiplication brings
 * sign and magnitude together in the upper byte, to be looked up; the lower byte's code is 0, as is its level. */
INLINE void levels_of_words(__m256i w, __m256i *pair) {
    const __m256i left = _mm256_setr_epi8(3, 0, 1, 2, 7, 4, 5, 6, 11, 8, 9, 10, 15, 12, 13, 14,
                                          3, 0, 1, 2, 7, 4, 5, 6, 11, 8, 9, 10, 15, 12, 13, 14);
    const __m256i level = _mm256_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12,
                                           0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m256i last = _mm256_xor_si256(w, _mm256_srli_epi32(w, 8));
    const __m256i codes[4] = {w, _mm256_slli_epi16(w, 4), _mm256_slli_epi16(_mm256_shuffle_epi8(w, left), 2),
                              _mm256_srli_epi16(last, 2)};
    for (int i = 0; i < 4; i++) {  /* sign in bit 13, magnitude in bits 6 to 4 */
        const __m256i fields = _mm256_and_si256(codes[i], _mm256_set1_epi16(0x2070));
        pair[i] = _mm256_shuffle_epi8(level, _mm256_maddubs_epi16(fields, _mm256_set1_epi16(64 << 8 | 16)));
    }
}

/* Sums of four vectors' 128-bit lanes: those of the first lanes, then those of the second ones. */
INLINE __m256i sums_of_lanes(const __m256i *v) {
    __m256 two[2];
    for (int i = 0; i < 2; i++) {
        const __m256i inner = _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(v[2 * i]), _mm256_castsi256_ps(v[2 * i + 1]), 0x4E));
        two[i] = _mm256_castsi256_ps(_mm256_add_epi32(inner, _mm256_blend_epi32(v[2 * i], v[2 * i + 1], 0xCC)));
    }
    const __m256i even = _mm256_castps_si256(_mm256_shuffle_ps(two[0], two[1], 0x88));
    return _mm256_add_epi32(even, _mm256_castps_si256(_mm256_shuffle_ps(two[0], two[1], 0xDD)));
}

/* Scales of rows g and g + 8, of lanes 0 and 1 and of 2 and 3, as stored or each twice: E4M3 / 256 except NaN, or powers
 * of two relative to the largest, where those below 2^-126 are 0. */
INLINE void scales_of_lanes(const uint8_t *at, int powers, __m256 *scales) {
    if (powers) {
        const __m128i once = _mm_subs_epu8(_mm_loadl_epi64((const __m128i *)at), _mm_set1_epi8(112));
        const __m128i twice = _mm_unpacklo_epi8(once, once);
        scales[0] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(twice), 23));
        scales[1] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(twice, twice)), 23));
        return;
    }
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)at)), 7);
    const __m256i halves = _mm256_and_si256(words, _mm256_set1_epi16((short)0xBF80));
    scales[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    scales[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
}

/* Rows with a NaN among a tile's E4M3 scales, by bit. */
static __attribute__((noinline)) int rows_of_nan(const uint8_t *scales) {
    int rows = 0;
    for (int i = 0; i < TILE_ROWS * TILE_COLUMNS / 16; i++)
        if ((scales[i] & 0x7F) == 0x7F) rows |= 1 << (i / 16 + i / 2 % 2 * 8);
    return rows;
}

INLINE int has_nan(const uint8_t *scales) {
    const __m256i nan = _mm256_set1_epi8(0x7F);
    __m256i found = _mm256_setzero_si256();
    for (int i = 0; i < TILE_ROWS * TILE_COLUMNS / 16; i += 32) {
        const __m256i size = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(scales + i)), nan);
        found = _mm256_or_si256(found, _mm256_cmpeq_epi8(size, nan));
    }
    return !_mm256_testz_si256(found, found);
}

/* sums[r * TOKENS + m] of the rows of one row of tiles with tokens m, times TILE_LEVEL, in units of the stored scales. */
INLINE void fixed_dots_of_tiles(const uint8_t *tiles, int64_t across, int powers, const char *const *x, int tokens, float *sums) {
    int nan = 0;
    __m256 sum[TILE_ROWS / 2][TOKENS];
    for (int g = 0; g < TILE_ROWS / 2; g++)
        for (int m = 0; m < tokens; m++) sum[g][m] = _mm256_setzero_ps();
    for (int64_t u = 0; u < across; u++, tiles += TILE_CODES + (powers ? 64 : 128)) {
        if (!powers && has_nan(tiles + TILE_CODES)) nan |= rows_of_nan(tiles + TILE_CODES);
        for (int g = 0; g < TILE_ROWS / 2; g++) {
            __m256 scales[2];
            scales_of_lanes(tiles + TILE_CODES + g * (powers ? 8 : 16), powers, scales);
            for (int p = 0; p < 2; p++)
                _mm_prefetch((const char *)tiles + TILE_AHEAD + p * (TILE_CODES / 2) + g * 64, _MM_HINT_T0);
            for (int side = 0; side < 2; side++) {
                __m256i part[TOKENS][4];  /* by row and p */
                for (int p = 0; p < 2; p++) {
                    __m256i pair[4];
                    levels_of_words(_mm256_loadu_si256((const __m256i *)(tiles + p * (TILE_CODES / 2) + g * 64 + side * 32)), pair);
                    for (int m = 0; m < tokens; m++) {
                        const char *here = x[m] + u * TILE_X + p * 128 + side * 32;
                        const __m256i x0 = _mm256_loadu_si256((const __m256i *)here);
                        const __m256i x1 = _mm256_loadu_si256((const __m256i *)(here + 64));
                        part[m][p] = plus_pairs(_mm256_madd_epi16(pair[0], x0), pair[2], x1);
                        part[m][2 + p] = plus_pairs(_mm256_madd_epi16(pair[1], x0), pair[3], x1);
                    }
                }
                for (int m = 0; m < tokens; m++) {
                    const __m256 step = _mm256_loadu_ps((const float *)(x[m] + u * TILE_X + TILE_SCALES + side * 32));
                    const __m256 whole = _mm256_cvtepi32_ps(sums_of_lanes(part[m]));
                    sum[g][m] = _mm256_fmadd_ps(whole, _mm256_mul_ps(scales[side], step), sum[g][m]);
                }
            }
        }
    }
    for (int g = 0; g < TILE_ROWS / 2; g++)
        for (int m = 0; m < tokens; m++) {
            const __m128 four = _mm_add_ps(_mm256_castps256_ps128(sum[g][m]), _mm256_extractf128_ps(sum[g][m], 1));
            const __m128 both = _mm_add_ps(four, _mm_movehdup_ps(four));  /* row g in 0, g + 8 in 2 */
            sums[g * TOKENS + m] = nan >> g & 1 ? NAN : _mm_cvtss_f32(both);
            sums[(g + 8) * TOKENS + m] = nan >> (g + 8) & 1 ? NAN : _mm_cvtss_f32(_mm_movehl_ps(both, both));
        }
}

/* Convert a row of `inputs` numbers of x, zero-padded, to fixed point in tile order; `type` is a constant after
 * inlining. */
INLINE void spread_fixed(const void *x, int type, int64_t first, int64_t inputs, int64_t across, char *to) {
    for (int64_t u = 0; u < across; u++, to += TILE_X) {
        const int64_t begin = u * TILE_COLUMNS, count = inputs - begin < TILE_COLUMNS ? inputs - begin : TILE_COLUMNS;
        float tile[TILE_COLUMNS];
        if (count < TILE_COLUMNS) memset(tile, 0, sizeof tile);
        for (int64_t k = 0; k < count; k++) tile[k] = load(x, type, first + begin + k);
        for (int block = 0; block < 8; block++) {  /* t and p */
            const int t = block / 2, p = block % 2;
            const float *at = tile + 16 * block;
            const __m256 v[2] = {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}, sign = _mm256_set1_ps(-0.0f);
            const __m256 size = _mm256_max_ps(_mm256_andnot_ps(sign, v[0]), _mm256_andnot_ps(sign, v[1]));
            const __m128 four = _mm_max_ps(_mm256_castps256_ps128(size), _mm256_extractf128_ps(size, 1));
            const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            const float largest = _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
            /* v - v is NaN for NaN and Inf; the maximum of a NaN need not be */
            const __m256 rest = _mm256_add_ps(_mm256_sub_ps(v[0], v[0]), _mm256_sub_ps(v[1], v[1]));
            const int finite = _mm256_movemask_ps(_mm256_cmp_ps(rest, _mm256_setzero_ps(), _CMP_EQ_OQ)) == 0xFF;
            const __m256 per_one = _mm256_set1_ps(finite && largest >= SMALLEST * TILE_STEPS / STEPS ? TILE_STEPS / largest : 0);
            __m128 columns[2];  /* eight of 16 bits each, in order */
            for (int i = 0; i < 2; i++) {
                const __m256i near = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], per_one));
                columns[i] = _mm_castsi128_ps(_mm_packs_epi32(_mm256_castsi256_si128(near), _mm256_extracti128_si256(near, 1)));
            }
            const __m128 one = columns[t / 2], other = columns[1 - t / 2];  /* words of t = 2 and 3 begin with columns 8 to 15 */
            _mm_storeu_ps((float *)(to + p * 128 + t * 16), _mm_shuffle_ps(one, other, 0x88));
            _mm_storeu_ps((float *)(to + p * 128 + 64 + t * 16), _mm_shuffle_ps(one, other, 0xDD));
            float *scales = (float *)(to + TILE_SCALES) + 4 * t + p;
            scales[0] = scales[2] = finite ? largest / TILE_STEPS : NAN;
        }
    }
}
