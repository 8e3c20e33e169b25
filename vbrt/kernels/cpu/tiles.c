/* Unpacking of weights in a GPU's tile order (e2m1/tiles.py) to the format's order: rows of codes, rows of scales.
 * Compiled by build.py.
 * Legend: N rows, K columns, U column tiles; a tile has 16 rows and 128 columns.
 */
#include <stdint.h>
#include <string.h>

#define ROWS 16
#define COLUMNS 128
#define WORDS 256           /* of a tile's codes, followed by its scales */
#define MASK 0x81C081C0u
#define TOP 239             /* E8M0 bytes are stored relative to the largest one, which becomes this */

typedef struct {
    const uint8_t *const *from;  /* pages in tile order */
    uint8_t *const *to;          /* pages in the format's order */
    int64_t pages, tiles, unit;  /* count; offsets in `from`, in bytes */
    int64_t codes, scales, unit_to;  /* offsets in `to`; unit_to: -1 if the format has none */
    int64_t rows, columns, block;    /* N, K, columns per scale */
} Order;

/* Byte of two codes, the even column in the low nibble, from a pair of halves; higher bits are not zero. In each half
 * bit 15 is the code's sign, bits 8 to 6 its magnitude; other bits are ignored. */
static inline uint32_t two_codes(uint32_t pair) {
    const uint32_t codes = ((pair >> 6) & 0x00070007) | ((pair >> 12) & 0x00080008);
    return codes | codes >> 12;
}

static inline uint16_t four_codes(uint32_t first, uint32_t second) {
    return (uint16_t)((two_codes(first) & 0xFF) | two_codes(second) << 8);
}

/* codes [16][64] bytes of one tile */
static void tile_codes(const uint32_t *words, uint8_t codes[ROWS][COLUMNS / 2]) {
    uint16_t upper[WORDS], lower[WORDS];  /* rows g, and rows g + 8 */
    for (int i = 0; i < WORDS; i++) {
        const uint32_t w = words[i];
        upper[i] = four_codes(w << 2, (w << 12) | (w >> 20));
        lower[i] = four_codes(w << 6, w ^ (w >> 8));
    }
    for (int half = 0; half < 2; half++)  /* words: half g t, then four of eight columns each */
        for (int g = 0; g < 8; g++)
            for (int t = 0; t < 4; t++) {
                const int word = half * 128 + g * 16 + t * 4, at = 16 * t + 8 * half, turned = t >> 1 << 1;
                memcpy(codes[g] + at, upper + word + turned, 4);
                memcpy(codes[g] + at + 4, upper + word + 2 - turned, 4);
                memcpy(codes[g + 8] + at, lower + word + turned, 4);
                memcpy(codes[g + 8] + at + 4, lower + word + 2 - turned, 4);
            }
}

/* scales of one tile, stored by lane: g t, then row g's before row g + 8's */
static void tile_scales(const uint8_t *from, int per_lane, int shift, uint8_t scales[ROWS][COLUMNS / 16]) {
    for (int g = 0; g < 8; g++)
        for (int t = 0; t < 4; t++, from += 2 * per_lane)
            for (int b = 0; b < per_lane; b++) {
                scales[g][t * per_lane + b] = (uint8_t)(from[b] + shift);
                scales[g + 8][t * per_lane + b] = (uint8_t)(from[per_lane + b] + shift);
            }
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static void row_of_tiles(const Order *o, int64_t page, int64_t row) {
    const int per_tile = (int)(COLUMNS / o->block);
    const int64_t words = WORDS + ROWS * per_tile / 4, across = (o->columns + COLUMNS - 1) / COLUMNS;
    const int64_t blocks = (o->columns + o->block - 1) / o->block, pitch = blocks * o->block / 2;
    const int64_t rows = smaller(ROWS, o->rows - row * ROWS);
    const uint8_t *from = o->from[page] + o->tiles + row * across * words * 4;
    uint8_t *codes_to = o->to[page] + o->codes + row * ROWS * pitch;
    uint8_t *scales_to = o->to[page] + o->scales + row * ROWS * blocks;
    int shift = 0;
    if (o->unit_to < 0) {  /* tensor scale = 2^(largest byte - 127) */
        uint32_t bits;
        memcpy(&bits, o->from[page] + o->unit, 4);
        shift = (int)(bits >> 23 & 255) - TOP;
    }
    for (int64_t u = 0; u < across; u++, from += words * 4) {
        uint32_t here[WORDS];
        uint8_t codes[ROWS][COLUMNS / 2], scales[ROWS][COLUMNS / 16];
        memcpy(here, from, sizeof here);
        tile_codes(here, codes);
        if (per_tile == 8) tile_scales(from + 4 * WORDS, 2, shift, scales);
        else tile_scales(from + 4 * WORDS, per_tile / 4, shift, scales);
        const int64_t bytes = smaller(COLUMNS / 2, pitch - u * (COLUMNS / 2));
        const int64_t few = smaller(per_tile, blocks - u * per_tile);
        for (int64_t r = 0; r < rows; r++) {
            if (bytes == COLUMNS / 2) memcpy(codes_to + r * pitch + u * (COLUMNS / 2), codes[r], COLUMNS / 2);
            else memcpy(codes_to + r * pitch + u * (COLUMNS / 2), codes[r], bytes);
            if (few == 8) memcpy(scales_to + r * blocks + u * per_tile, scales[r], 8);
            else memcpy(scales_to + r * blocks + u * per_tile, scales[r], few);
        }
    }
    if (row == 0 && o->unit_to >= 0) memcpy(o->to[page] + o->unit_to, o->from[page] + o->unit, 4);
}

void vbrt_rows_of_tiles(const Order *o, int threads) {
    const int64_t down = (o->rows + ROWS - 1) / ROWS;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < o->pages * down; i++) row_of_tiles(o, i / down, i % down);
}
