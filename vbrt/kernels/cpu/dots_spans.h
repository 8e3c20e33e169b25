/* Common to `dots` for NEON and plain C: fp32 scales by byte, and levels as bytes for lookups of 16 codes at a
 * time. The codes of 16 columns are eight bytes, which never straddle two blocks. */

typedef struct {
    float values[256];  /* by scale byte, times the unit */
    uint8_t bytes[4][16];  /* of the levels, the highest last */
} Scales;

typedef struct {
    const uint8_t *codes[2], *scales[2];  /* by row */
    const float *levels;  /* [16] */
    int scale_type, shift;  /* a block has 1 << shift columns */
    const float *values;  /* [256] by scale byte: value * unit */
    const uint8_t (*bytes)[16];
    const void *x[TOKENS];  /* in spans */
    int64_t columns;
    int upper;  /* levels are exact in bf16: the upper two bytes suffice */
    int form;  /* layout of x */
    int8_t whole[16];  /* integer levels, for int8 inputs */
    float step;
} Dots;

INLINE float scale_at(const Dots *d, int r, int64_t block) {
    return d->scale_type == BYTE ? d->values[d->scales[r][block]] : load(d->scales[r], d->scale_type, block);
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
