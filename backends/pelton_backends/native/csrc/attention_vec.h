/* What attention's vector code shares: powers of 2, shuffles, numbers of either dtype to vectors and back. */
#ifndef PELTON_ATTENTION_VEC_H
#define PELTON_ATTENTION_VEC_H

#include "attention.h"
#include "lines.h"

/* GCC's own names: it takes longer to read <immintrin.h> than to compile most files here. */
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 10
#if defined(__AVX512F__) && __has_builtin(__builtin_ia32_maxps512_mask)
#define MAX(a, b) __builtin_ia32_maxps512_mask(a, b, a, (unsigned short)-1, 4)
#elif !defined(__AVX512F__) && defined(__AVX__) && __has_builtin(__builtin_ia32_maxps256)
#define MAX(a, b) __builtin_ia32_maxps256(a, b)
#elif !defined(__AVX__) && defined(__SSE__) && __has_builtin(__builtin_ia32_maxps)
#define MAX(a, b) __builtin_ia32_maxps(a, b)
#endif
#endif
#if defined(__SSE__) && !defined(MAX)
#include <immintrin.h>
#endif

/* b where either is NaN */
INLINE vec vec_max(vec a, vec b) {
#if defined(MAX)
    return MAX(a, b);
#elif defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE__)
    return (vec)_mm_max_ps((__m128)a, (__m128)b);
#else
    return vec_select(a > b, a, b);
#endif
}
INLINE ivec ivec_all(int32_t number) { return number - (ivec){0}; }

INLINE float vec_highest(vec numbers) {
    float high = numbers[0];
    for (int i = 1; i < LANES; i++)
        high = numbers[i] > high ? numbers[i] : high;
    return high;
}

/* 2^x for x below 127, relative error below 2e-7; 0 below -126 and for -infinity; a NaN stays one. */
INLINE vec vec_exp2(vec x) {
    const float magic = 12582912.0f; /* adding it rounds to a whole number, which then stands in the lowest bits */
    ivec is_low = x < -126.0f;
    vec rounded = x + magic;
    vec rest = x - (rounded - magic);
    vec sum = vec_all(1.32764717e-3f);
    sum = sum * rest + 9.67554154e-3f;
    sum = sum * rest + 5.55071328e-2f;
    sum = sum * rest + 2.40221197e-1f;
    sum = sum * rest + 6.93146967e-1f;
    sum = sum * rest + 1.00000007f;
    vec power = (vec)(((uvec)rounded << 23) + 0x3f800000u);
    return (vec)((ivec)(sum * power) & ~is_low);
}

/* Below every score: where a softmax starts, so that nothing is subtracted from infinity. */
#define LOWEST_SCORE (-1e30f)

/* A product of query and key as a power of 2. */
INLINE vec scaled(const struct attention *op, vec product) {
    if (op->soft_cap > 0.0f)
        return vec_tanh(product * (op->scale / op->soft_cap)) * (op->soft_cap * 1.44269504f);
    return product * (op->scale * 1.44269504f);
}

/* A line of `count` numbers as float32, zeros up to `padded`. */
INLINE void widen_line(const void *from, float *to, int64_t count, int64_t padded, int dtype) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        vec_store(to + i, load_lanes(from, i, dtype));
    for (; i < count; i++)
        to[i] = load(from, i, dtype);
    for (; i < padded; i++)
        to[i] = 0.0f;
}

/* And back. */
INLINE void narrow_line(const float *from, void *to, int64_t count, int dtype) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        store_lanes(to, i, vec_load(from + i), dtype);
    for (; i < count; i++)
        store(to, i, from[i], dtype);
}

INLINE void leave_state(const struct attention *op, float *state, float base, float total, const float *sums) {
    state[0] = base, state[1] = total;
    memcpy(state + STATE(0), sums, (size_t)op->head_dim * sizeof(float));
}

INLINE void put_line(const struct attention *op, float *sums, float factor, void *output) {
    for (int64_t i = 0; i < op->head_dim; i++)
        sums[i] *= factor;
    narrow_line(sums, output, op->head_dim, op->dtype);
}

#endif
