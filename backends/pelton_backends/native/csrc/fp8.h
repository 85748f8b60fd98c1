/* Keys and values of 8 bits: e4m3, up to 448 and without infinity, and e5m2. Both widen exactly to float32. */
#ifndef PELTON_FP8_H
#define PELTON_FP8_H

#include "attention_vec.h"

typedef uint8_t byte_vec __attribute__((vector_size(LANES)));

/* A number's size starts at this bit of float32, and its exponent is that of float32 less so much. */
INLINE int fp8_shift(int dtype) { return dtype == DTYPE_E4M3 ? 20 : 21; }
INLINE uint32_t fp8_bias(int dtype) { return (dtype == DTYPE_E4M3 ? 120u : 112u) << 23; }

#if defined(__F16C__) && defined(__AVX2__)
typedef int8_t bytes_16 __attribute__((vector_size(16)));
typedef int16_t halves_16 __attribute__((vector_size(32)));
typedef int16_t halves_8 __attribute__((vector_size(16)));

/* GCC's own names, as in attention_vec.h. */
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 10
#define WIDEN_BYTES(bytes) __builtin_ia32_pmovsxbw256((char __attribute__((vector_size(16))))(bytes))
#define HALF_OF(halves, at) ((halves_8)__builtin_ia32_extract128i256((long long __attribute__((vector_size(32))))(halves), at))
#define FROM_8(halves) __builtin_ia32_vcvtph2ps256((short __attribute__((vector_size(16))))(halves))
#define FROM_16(halves) __builtin_ia32_vcvtph2ps512_mask((short __attribute__((vector_size(32))))(halves), (vec){0}, -1, 4)
#else
#include <immintrin.h>
#define WIDEN_BYTES(bytes) _mm256_cvtepi8_epi16((__m128i)(bytes))
#define HALF_OF(halves, at) ((halves_8)_mm256_extracti128_si256((__m256i)(halves), at))
#define FROM_8(halves) ((vec)_mm256_cvtph_ps((__m128i)(halves)))
#define FROM_16(halves) ((vec)_mm512_cvtph_ps((__m256i)(halves)))
#endif

enum { FP8_STEP = 16 };

/* FP8_STEP numbers, by way of float16: e5m2 is its upper half, e4m3 its size above the 7 lowest bits, 256 times as large. */
INLINE void widen_fp8(const uint8_t *from, float *to, int dtype) {
    bytes_16 bytes;
    memcpy(&bytes, from, sizeof bytes);
    halves_16 bits = (halves_16)WIDEN_BYTES(bytes), halves = bits << (dtype == DTYPE_E4M3 ? 7 : 8);
    if (dtype == DTYPE_E4M3)
        halves = (halves & (int16_t)0xbf80) | ((bits | (int16_t)0xff80) == -1); /* without the upper sign; the last one is a NaN */
    float factor = dtype == DTYPE_E4M3 ? 256.0f : 1.0f;
#if defined(__AVX512F__)
    vec_store(to, FROM_16(halves) * factor);
#else
    vec_store(to, FROM_8(HALF_OF(halves, 0)) * factor);
    vec_store(to + LANES, FROM_8(HALF_OF(halves, 1)) * factor);
#endif
}
#else
/* All numbers, by their bits. */
#define E4M3_SIZE(b) ((b & 127) == 127 ? NAN : (b & 120) == 0 ? (b & 7) * 0x1p-9f : (8 + (b & 7)) * 0x1p-10f * (1 << (b >> 3 & 15)))
#define E5M2_SIZE(b) \
    ((b & 127) == 124 ? INFINITY : (b & 127) > 124 ? NAN : (b & 124) == 0 ? (b & 3) * 0x1p-16f : (4 + (b & 3)) * 0x1p-17f * (1u << (b >> 2 & 31)))
#define NUMBER(SIZE, b) (((b) & 128 ? -1.0f : 1.0f) * SIZE((b)))
#define FOUR(SIZE, b) NUMBER(SIZE, b), NUMBER(SIZE, b + 1), NUMBER(SIZE, b + 2), NUMBER(SIZE, b + 3)
#define SIXTEEN(SIZE, b) FOUR(SIZE, b), FOUR(SIZE, b + 4), FOUR(SIZE, b + 8), FOUR(SIZE, b + 12)
#define QUARTER(SIZE, b) SIXTEEN(SIZE, b), SIXTEEN(SIZE, b + 16), SIXTEEN(SIZE, b + 32), SIXTEEN(SIZE, b + 48)
#define TABLE(SIZE) {QUARTER(SIZE, 0), QUARTER(SIZE, 64), QUARTER(SIZE, 128), QUARTER(SIZE, 192)}
static const float e4m3_numbers[256] = TABLE(E4M3_SIZE), e5m2_numbers[256] = TABLE(E5M2_SIZE);

enum { FP8_STEP = 4 };

INLINE void widen_fp8(const uint8_t *from, float *to, int dtype) {
    for (int i = 0; i < FP8_STEP; i++)
        to[i] = (dtype == DTYPE_E4M3 ? e4m3_numbers : e5m2_numbers)[from[i]];
}
#endif

/* The nearest of 8 bits, ties to even; the largest one stands for larger ones and infinity; a NaN stays one. */
INLINE byte_vec fp8_of_vec(vec numbers, int dtype) {
    int shift = fp8_shift(dtype);
    uint32_t bias = fp8_bias(dtype), largest = dtype == DTYPE_E4M3 ? 0x43e00000u : 0x47600000u;
    uint32_t magic = bias + ((uint32_t)(shift + 1) << 23); /* adding it rounds a small number to what stands in its lowest bits */
    uvec size = (uvec)numbers & 0x7fffffffu, sign = ((uvec)numbers >> 24) & 0x80u;
    uvec is_nan = (uvec)((ivec)size > 0x7f800000), is_large = (uvec)((ivec)size > (int32_t)largest);
    size = (size & ~is_large) | (largest & is_large);
    uvec is_small = (uvec)((ivec)size < (int32_t)(bias + (1u << 23)));
    uvec small = (uvec)((vec)size + (vec)(magic + (uvec){0})) - magic;
    uvec whole = (size - bias + ((size >> shift) & 1u) + ((1u << (shift - 1)) - 1u)) >> shift;
    uvec bits = (small & is_small) | (whole & ~is_small);
    return __builtin_convertvector(__builtin_convertvector((bits & ~is_nan) | (is_nan & 0x7fu) | sign, half_vec), byte_vec);
}

/* A line of `count` numbers of 8 bits as float32, zeros up to `padded`. */
INLINE void widen_fp8_line(const uint8_t *from, float *to, int64_t count, int64_t padded, int dtype) {
    int64_t i = 0;
    for (; i + FP8_STEP <= count; i += FP8_STEP)
        widen_fp8(from + i, to + i, dtype);
    if (i < count) {
        uint8_t rest[FP8_STEP] = {0};
        float numbers[FP8_STEP];
        memcpy(rest, from + i, (size_t)(count - i));
        widen_fp8(rest, numbers, dtype);
        memcpy(to + i, numbers, (size_t)(count - i) * sizeof(float));
        i = count;
    }
    for (; i < padded; i++)
        to[i] = 0.0f;
}

/* A line of numbers of the model's dtype to 8 bits. */
INLINE void narrow_fp8_line(const void *from, uint8_t *to, int64_t count, int from_dtype, int dtype) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        byte_vec bytes = fp8_of_vec(load_lanes(from, i, from_dtype), dtype);
        memcpy(to + i, &bytes, LANES);
    }
    if (i < count) {
        byte_vec bytes = fp8_of_vec(load_part(from, i, count - i, from_dtype), dtype);
        memcpy(to + i, &bytes, (size_t)(count - i));
    }
}

/* A line of a cache, of any dtype, as `widen_line` does. */
INLINE void widen_cache_line(const struct attention *op, const void *from, float *to, int64_t padded) {
    if (op->kv_dtype == DTYPE_E4M3)
        widen_fp8_line(from, to, op->head_dim, padded, DTYPE_E4M3);
    else if (op->kv_dtype == DTYPE_E5M2)
        widen_fp8_line(from, to, op->head_dim, padded, DTYPE_E5M2);
    else
        widen_line(from, to, op->head_dim, padded, op->kv_dtype);
}

#endif
