/* Vectors of float32 as wide as the instruction set that this library is compiled for, by the vector extensions of GCC and
   clang: one source for SSE2, AVX2, AVX-512 and NEON. Multiplications and additions are fused where the CPU can. */
#ifndef PELTON_VEC_H
#define PELTON_VEC_H

#include "common.h"

#if defined(PELTON_FLOAT16) && PELTON_ISA >= ISA_AVX2
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VEC_BYTES 64
enum { NUM_REGISTERS = 32 };
#elif defined(__AVX2__)
#define VEC_BYTES 32
enum { NUM_REGISTERS = 16 };
#else
#define VEC_BYTES 16
#if defined(__aarch64__)
enum { NUM_REGISTERS = 32 };
#else
enum { NUM_REGISTERS = 16 };
#endif
#endif

enum { LANES = VEC_BYTES / 4 };

typedef float vec __attribute__((vector_size(VEC_BYTES)));
typedef uint32_t uvec __attribute__((vector_size(VEC_BYTES)));
typedef int32_t ivec __attribute__((vector_size(VEC_BYTES)));
typedef float loose_vec __attribute__((vector_size(VEC_BYTES), aligned(2), may_alias));
typedef uint32_t loose_uvec __attribute__((vector_size(VEC_BYTES), aligned(2), may_alias));

INLINE vec vec_load(const void *from) { return (vec) * (const loose_vec *)from; }
INLINE void vec_store(void *to, vec numbers) { *(loose_vec *)to = (loose_vec)numbers; }
INLINE uvec vec_load_bits(const void *from) { return (uvec) * (const loose_uvec *)from; }
INLINE vec vec_all(float number) { return number - (vec){0}; }

typedef uint16_t half_vec __attribute__((vector_size(VEC_BYTES / 2)));
typedef uint16_t loose_half_vec __attribute__((vector_size(VEC_BYTES / 2), aligned(2), may_alias));

/* LANES numbers of 16 bits to float32, and to the nearest of 16 bits. */
#if defined(PELTON_FLOAT16)
INLINE vec vec_widen(half_vec halves) {
#if PELTON_ISA >= ISA_AVX512
    return (vec)_mm512_cvtph_ps((__m256i)halves);
#elif PELTON_ISA >= ISA_AVX2
    return (vec)_mm256_cvtph_ps((__m128i)halves);
#else
    float numbers[LANES];
    for (int i = 0; i < LANES; i++)
        numbers[i] = to_float(halves[i]);
    return vec_load(numbers);
#endif
}

INLINE half_vec vec_narrow(vec numbers) {
#if PELTON_ISA >= ISA_AVX512
    return (half_vec)_mm512_cvtps_ph((__m512)numbers, _MM_FROUND_TO_NEAREST_INT);
#elif PELTON_ISA >= ISA_AVX2
    return (half_vec)_mm256_cvtps_ph((__m256)numbers, _MM_FROUND_TO_NEAREST_INT);
#else
    half_vec halves = {0};
    for (int i = 0; i < LANES; i++)
        halves[i] = to_bf16(numbers[i]);
    return halves;
#endif
}
#else
/* As `to_bf16`, but each in the upper half of its place. */
INLINE uvec bf16_bits(vec numbers) {
    uvec bits = (uvec)numbers, is_nan = (uvec)(numbers != numbers);
    uvec rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return (rounded & ~is_nan) | ((bits | 0x400000u) & is_nan);
}

INLINE vec vec_widen(half_vec halves) { return (vec)(__builtin_convertvector(halves, uvec) << 16); }
INLINE half_vec vec_narrow(vec numbers) { return __builtin_convertvector(bf16_bits(numbers) >> 16, half_vec); }
#endif

/* Of LANES pairs of numbers of 16 bits, as packed panels hold them: the first of each pair, the second of each. */
#if defined(PELTON_FLOAT16)
INLINE vec vec_first(uvec pairs) { return vec_widen(__builtin_convertvector(pairs, half_vec)); }
INLINE vec vec_second(uvec pairs) { return vec_widen(__builtin_convertvector(pairs >> 16, half_vec)); }
#else
INLINE vec vec_first(uvec pairs) { return (vec)(pairs << 16); }
INLINE vec vec_second(uvec pairs) { return (vec)(pairs & 0xffff0000u); }
#endif

#endif
