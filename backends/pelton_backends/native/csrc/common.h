/* What all kernels share: dtypes, roundings, exp, scratch memory, and the instruction sets that are told apart.

   A library is compiled for one instruction set, PELTON_ISA: build.py has the compiler's flags of each. */
#ifndef PELTON_COMMON_H
#define PELTON_COMMON_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Each has all of those before it, but for AVX2_VNNI, which the AVX512 ones do not have. */
#define ISA_PLAIN 0       /* what every CPU of the architecture has: SSE2, NEON */
#define ISA_AVX2 1        /* and FMA, F16C */
#define ISA_AVX2_VNNI 2   /* vpdpbusd on 32 bytes */
#define ISA_AVX512 3      /* F, BW, VL, DQ */
#define ISA_AVX512_VNNI 4 /* vpdpbusd on 64 bytes */
#define ISA_AVX512_BF16 5 /* vdpbf16ps */

#ifndef PELTON_ISA
#error "PELTON_ISA is not given"
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
/* For the libraries beside this one (build.py): calls within this one are as direct as before. */
#define SHARED __attribute__((visibility("protected")))

/* Numbers of 16 bits. In a library for models in float16 they are that (PELTON_FLOAT16), and so is all that is called bf16 here and
   elsewhere, DTYPE_BF16 too; such a library has no products of bfloat16. */
typedef uint16_t bf16;

#if defined(PELTON_FLOAT16) && PELTON_ISA >= ISA_AVX512_BF16
#error "products of bfloat16 in a library for float16"
#endif

enum { DTYPE_F32 = 0, DTYPE_BF16 = 1, DTYPE_E4M3 = 2, DTYPE_E5M2 = 3 }; /* the last two are of caches alone: fp8.h */

/* Width of a packed panel, in rows of a weight, keys, or numbers of a head. */
enum { PANEL = 32 };

/* This thread's scratch memory, 64-byte aligned, at least `bytes` long; NULL when there is none. A second call gives the
   same memory. It stays mapped for ever. `pelton_shared` is the same once more, for what the threads of a run read together;
   `pelton_between` for what lies between kernels that one task calls. */
void *pelton_scratch(size_t bytes);
void *pelton_shared(size_t bytes);
void *pelton_between(size_t bytes);

INLINE float half_to_float(uint16_t half) {
    uint32_t bits = (uint32_t)(half & 0x7fffu) << 13, sign = (uint32_t)(half & 0x8000u) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f; /* the exponents' offsets differ by 112 */
    memcpy(&bits, &value, sizeof bits);
    bits |= sign | ((half & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u);
    memcpy(&value, &bits, sizeof value);
    return value;
}

#if defined(PELTON_FLOAT16)
INLINE float to_float(bf16 value) { return half_to_float(value); }

/* To nearest, ties to even; from 65,520 on infinite; a NaN stays one. */
INLINE bf16 to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    if (size >= 0x477ff000u)
        return (bf16)(sign | (size > 0x7f800000u ? 0x7e00u : 0x7c00u));
    if (size >= 0x38800000u)
        return (bf16)(sign | ((size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13));
    float small; /* in steps of 2^-24, as float32 has them beside 0.5 */
    memcpy(&small, &size, sizeof small);
    small += 0.5f;
    memcpy(&size, &small, sizeof size);
    return (bf16)(sign | (size - 0x3f000000u));
}
#else
INLINE float to_float(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

/* To nearest, ties to even; a NaN stays one. */
INLINE bf16 to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bf16)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}
#endif

INLINE float load(const void *memory, int64_t index, int dtype) {
    return dtype == DTYPE_BF16 ? to_float(((const bf16 *)memory)[index]) : ((const float *)memory)[index];
}

INLINE void store(void *memory, int64_t index, float value, int dtype) {
    if (dtype == DTYPE_BF16)
        ((bf16 *)memory)[index] = to_bf16(value);
    else
        ((float *)memory)[index] = value;
}

INLINE float round_to(float value, int dtype) { return dtype == DTYPE_BF16 ? to_float(to_bf16(value)) : value; }

INLINE size_t size_of(int dtype) { return dtype == DTYPE_BF16 ? sizeof(bf16) : sizeof(float); }

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

/* exp with a relative error below 2e-7, free of branches and calls, so that compilers vectorise loops over it. 0 below -87. */
INLINE float fast_exp(float x) {
    float bounded = x < -87.0f ? -87.0f : x;
    bounded = bounded > 88.0f ? 88.0f : bounded;
    float scaled = bounded * 1.44269504f;
    int32_t power = (int32_t)(scaled + (scaled < 0.0f ? -0.5f : 0.5f));
    float rest = bounded - (float)power * 0.693359375f + (float)power * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    uint32_t bits = ((uint32_t)power + 127u) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return x < -87.0f ? 0.0f : sum * scale;
}

#endif
