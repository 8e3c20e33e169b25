/* What `dots` of plain C and of AVX2 share. The codes of 32 columns are 16 bytes: even columns, then odd ones. */
#define SPAN 32

/* Values by scale byte, times the unit. */
typedef struct { float values[256]; } Scales;

typedef struct {
    const uint8_t *codes[2], *scales[2];  /* by row */
    const float *levels;  /* [16] */
    int scale_type, shift;  /* a block has 1 << shift columns */
    const float *values;  /* [256] by scale byte: value * unit */
    const void *x[TOKENS];  /* in spans */
    int64_t columns;
    int narrow;  /* x is bf16; levels are numbers that bf16 has */
} Dots;

INLINE float scale_at(const Dots *d, int r, int64_t block) {
    return d->scale_type == BYTE ? d->values[d->scales[r][block]] : load(d->scales[r], d->scale_type, block);
}

static void fill_scales(Dots *d, const float *values, float unit, Scales *scales) {
    for (int i = 0; i < 256 && d->scale_type == BYTE; i++) scales->values[i] = values[i] * unit;
    d->values = scales->values;
}

/* One span of x, as fp32. */
INLINE void spread_span(const float *span, int narrow, void *to) {
    (void)narrow;
    for (int k = 0; k < SPAN; k++) ((float *)to)[k % 2 * 16 + k / 2] = span[k];
}
