#include "elements.h"

#include <string.h>

/* A sum is as fast as the memory with the widest registers that the processor has. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define EACH_OF(n) _Pragma("GCC ivdep") for (int64_t i = 0; i < (n); i++)

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Conversions of half types have no branches, so that loops over them use wide registers, too. */

static inline uint32_t choose(int which, uint32_t one, uint32_t other)
{
    const uint32_t mask = -(uint32_t)(which != 0);
    return (one & mask) | (other & ~mask);
}

static inline float from_bfloat16(uint16_t half) { return float_of((uint32_t)half << 16); }

static inline uint16_t to_bfloat16(float value)
{
    /* Half a unit of the last kept place, less one if that place is even. The carry may run up to infinity. */
    const uint32_t bits = bits_of(value), rounded = bits + 0x7FFF + (bits >> 16 & 1);
    return (uint16_t)choose((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded >> 16);
}

static inline float from_float16(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7FFF) << 13;
    const uint32_t bias = (127 - 15) << 23, exponent = rest & 0x0F800000;
    /* Subnormal numbers: with the exponent of the smallest normal one, from which that is taken off again. */
    const uint32_t small = bits_of(float_of(rest + bias + (1 << 23)) - float_of(bias + (1 << 23)));
    const uint32_t large = rest + bias + choose(exponent == 0x0F800000, bias, 0); /* infinity stays that */
    const uint32_t quiet = choose(rest > 0x0F800000, 0x00400000, 0);              /* as every NaN becomes */
    return float_of(sign | quiet | choose(exponent != 0, large, small));
}

static inline uint16_t to_float16(float value)
{
    const uint32_t bits = bits_of(value), rest = bits & 0x7FFFFFFF, bias = (127 - 15) << 23;
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    const uint32_t normal = (rest - bias + 0xFFF + (rest >> 13 & 1)) >> 13; /* 65520 carries into infinity */
    /* The unit of float's numbers from a half to one is the smallest of float16, to which adding rounds. */
    const uint32_t small = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f);
    const uint32_t large = choose(rest >= 0x47800000, 0x7C00, normal);
    return (uint16_t)choose(rest > 0x7F800000, 0x7E00, sign | choose(rest < 0x38800000, small, large));
}

#define DEFINE_ADD(TYPE)                                                                                    \
    FOR_EACH_PROCESSOR static void add_##TYPE(TYPE *into, const TYPE *total, const TYPE *own, int64_t n)    \
    {                                                                                                       \
        EACH_OF(n) into[i] = (TYPE)(total[i] + own[i]);                                                     \
    }
#define DEFINE_SCALE(TYPE)                                                         \
    FOR_EACH_PROCESSOR static void scale_##TYPE(TYPE *total, TYPE by, int64_t n)   \
    {                                                                              \
        EACH_OF(n) total[i] *= by;                                                 \
    }
#define DEFINE_HALF(NAME)                                                                                          \
    FOR_EACH_PROCESSOR static void add_##NAME(float *into, const float *total, const uint16_t *own, int64_t n)     \
    {                                                                                                              \
        EACH_OF(n) into[i] = total[i] + from_##NAME(own[i]);                                                       \
    }                                                                                                              \
    FOR_EACH_PROCESSOR static void widen_##NAME(float *into, const uint16_t *own, int64_t n)                       \
    {                                                                                                              \
        EACH_OF(n) into[i] = from_##NAME(own[i]);                                                                  \
    }                                                                                                              \
    FOR_EACH_PROCESSOR static void narrow_##NAME(uint16_t *out, const float *total, int64_t n)                     \
    {                                                                                                              \
        EACH_OF(n) out[i] = to_##NAME(total[i]);                                                                   \
    }

DEFINE_ADD(float)
DEFINE_ADD(double)
DEFINE_ADD(uint8_t) /* integers wrap around, which signed ones may not in C */
DEFINE_ADD(uint16_t)
DEFINE_ADD(uint32_t)
DEFINE_ADD(uint64_t)
DEFINE_SCALE(float)
DEFINE_SCALE(double)
DEFINE_HALF(float16)
DEFINE_HALF(bfloat16)

int is_half(kind_t kind) { return kind == 'e' || kind == 'y'; }

void add(kind_t kind, void *into, const void *total, const void *own, int64_t n)
{
    switch (kind) {
    case 'f': add_float(into, total, own, n); break;
    case 'd': add_double(into, total, own, n); break;
    case 'e': add_float16(into, total, own, n); break;
    case 'y': add_bfloat16(into, total, own, n); break;
    case 'b': add_uint8_t(into, total, own, n); break;
    case 'h': add_uint16_t(into, total, own, n); break;
    case 'i': add_uint32_t(into, total, own, n); break;
    case 'q': add_uint64_t(into, total, own, n); break;
    }
}

void widen(kind_t kind, void *into, const void *own, int64_t n)
{
    switch (kind) {
    case 'e': widen_float16(into, own, n); break;
    case 'y': widen_bfloat16(into, own, n); break;
    case 'b': memcpy(into, own, (size_t)n); break;
    case 'h': memcpy(into, own, 2 * (size_t)n); break;
    case 'f':
    case 'i': memcpy(into, own, 4 * (size_t)n); break;
    case 'd':
    case 'q': memcpy(into, own, 8 * (size_t)n); break;
    }
}

void scale(kind_t kind, void *total, double by, int64_t n)
{
    if (kind == 'd') scale_double(total, by, n);
    else if (kind == 'f' || is_half(kind)) scale_float(total, (float)by, n);
}

void narrow(kind_t kind, void *out, const void *total, int64_t n)
{
    if (kind == 'e') narrow_float16(out, total, n);
    else narrow_bfloat16(out, total, n);
}
