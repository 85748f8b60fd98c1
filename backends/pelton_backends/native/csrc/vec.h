/* Vectors of float32 as wide as the instruction set that this library is compiled for, by the vector extensions of GCC and
   clang: one source for SSE2, AVX2, AVX-512 and NEON. Multiplications and additions are fused where the CPU can. */
#ifndef PELTON_VEC_H
#define PELTON_VEC_H

#include "common.h"

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

/* Of LANES pairs of bfloat16, as packed panels hold them: the first of each pair, the second of each. */
INLINE vec vec_first(uvec pairs) { return (vec)(pairs << 16); }
INLINE vec vec_second(uvec pairs) { return (vec)(pairs & 0xffff0000u); }

#endif
