/* 16-bit floating point numbers, by bits. */
#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

static inline int16_t bf16_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7FC0;
    return (int16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);  /* to nearest, ties to even */
}

static inline int16_t fp16_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000, large = bits & 0x7FFFFFFF;
    if (large > 0x7F800000) return (int16_t)(sign | 0x7E00);
    if (large >= 0x477FF000) return (int16_t)(sign | 0x7C00);
    if (large < 0x38800000) {  /* denormal: the sum's ulp is the smallest magnitude */
        float sum;
        memcpy(&sum, &large, 4);
        sum += 0.5f;
        memcpy(&bits, &sum, 4);
        return (int16_t)(sign | (bits - 0x3F000000));
    }
    return (int16_t)(sign | ((large + 0xFFF + ((large >> 13) & 1) - 0x38000000) >> 13));
}

static inline float bf16_value(uint16_t word) {
    const uint32_t bits = (uint32_t)word << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline float fp16_value(uint16_t word) {
#if defined(__F16C__)
    return _cvtsh_ss(word);
#elif defined(__aarch64__)
    __fp16 half;
    memcpy(&half, &word, 2);
    return half;
#endif
    const uint32_t large = (uint32_t)(word & 0x7FFF) << 13, sign = (uint32_t)(word & 0x8000) << 16;
    uint32_t bits = large + 0x38000000;  /* add 112 to the exponent */
    float value;
    if (large >= 0x0F800000) bits += 0x38000000;  /* Inf, NaN */
    else if (large < 0x00800000) {  /* denormal: normalize by subtracting the implicit one */
        bits += 0x00800000;
        memcpy(&value, &bits, 4);
        value -= 6.103515625e-05f;
        memcpy(&bits, &value, 4);
    }
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}
