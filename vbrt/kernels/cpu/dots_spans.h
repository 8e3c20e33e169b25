/* Common to `dots` for NEON and plain C: fp32 scales by byte, and levels as bytes for lookups of 16 codes at a
 * time. The codes of 16 columns are eight bytes, which never straddle two blocks. */

typedef struct {
    float values[256];  /* by scale byte, times the unit */
    uint8_t bytes[4][16];  /* of the levels, the highest last */
} Scales;

typedef struct {
    Row row[2];
    const float *levels;  /* [16] */
    int scale_type, offset_type, coding, shift;  /* a block has 1 << shift columns */
    const float *values;  /* [256] by scale byte: value * unit */
    float unit;
    const uint8_t (*bytes)[16];
    const void *x[TOKENS];  /* in spans */
    int64_t x_bytes;  /* of a row of them; sums by block follow */
    int64_t columns;
    int upper;  /* levels are exact in bf16: the upper two bytes suffice */
    int form;  /* layout of x */
    int8_t whole[16];  /* integer levels, for int8 inputs */
    float step;
} Dots;

INLINE float scale_at(const Dots *d, int r, int64_t block) {
    const Row *row = d->row + r;
    if (d->scale_type == BYTE) return d->values[row->scales[block]];
    if (d->scale_type == SUPER) return load(row->d, FP16, (block << d->shift) / SUPERBLOCK) * row->scales[block];
    return load(row->scales, d->scale_type, block);
}

INLINE float offset_at(const Dots *d, int r, int64_t block) {
    const Row *row = d->row + r;
    if (d->offset_type == VALUE) return load(row->offsets, d->scale_type, block);
    if (d->offset_type == ZERO) return -(row->offsets[block] * scale_at(d, r, block));
    return -(load(row->dmin, FP16, (block << d->shift) / SUPERBLOCK) * row->offsets[block]);
}

/* sums += offsets of row r times sums of each token's x */
INLINE void add_offsets(const Dots *d, int r, int tokens, float *sums) {
    float sum[TOKENS] = {0};
    for (int64_t block = 0; block < d->columns >> d->shift; block++) {
        const float offset = offset_at(d, r, block);
        for (int m = 0; m < tokens; m++) sum[m] += offset * ((const float *)((const char *)d->x[m] + d->x_bytes))[block];
    }
    for (int m = 0; m < tokens; m++) sums[r * TOKENS + m] += sum[m];
}

/* Sum of each of `count` words of eight numbers. */
INLINE void sum_words(const float *span, int count, float *words) {
    for (int word = 0; word < count; word++, span += 8)
        words[word] = ((span[0] + span[1]) + (span[2] + span[3])) + ((span[4] + span[5]) + (span[6] + span[7]));
}

static void fill_scales(Dots *d, const float *values, float unit, Scales *scales) {
    for (int i = 0; i < 256 && d->scale_type == BYTE; i++) scales->values[i] = values[i] * unit;
    d->upper = 1;
    for (int code = 0; code < 16; code++) {
        uint32_t bits;
        memcpy(&bits, d->levels + code, 4);
        for (int i = 0; i < 4; i++) scales->bytes[i][code] = (uint8_t)(bits >> 8 * i);
        d->upper = d->upper && !(bits & 0xFFFF);
    }
    d->values = scales->values, d->bytes = (const uint8_t(*)[16])scales->bytes;
}
