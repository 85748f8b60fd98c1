/* Numbers of either dtype to vectors of float32 and back, and what is computed on lines of them. */
#ifndef PELTON_LINES_H
#define PELTON_LINES_H

#include "vec.h"

INLINE vec vec_select(ivec where, vec yes, vec no) { return (vec)(((ivec)yes & where) | ((ivec)no & ~where)); }

INLINE float vec_sum(vec numbers) {
    float sum = 0.0f;
    for (int i = 0; i < LANES; i++)
        sum += numbers[i];
    return sum;
}

/* To the dtype's precision. */
INLINE vec vec_round(vec numbers, int dtype) {
#if defined(PELTON_FLOAT16)
    return dtype == DTYPE_BF16 ? vec_widen(vec_narrow(numbers)) : numbers;
#else
    return dtype == DTYPE_BF16 ? (vec)(bf16_bits(numbers) & 0xffff0000u) : numbers;
#endif
}

/* LANES numbers from `index` on. */
INLINE vec load_lanes(const void *from, int64_t index, int dtype) {
    if (dtype == DTYPE_F32)
        return vec_load((const float *)from + index);
    return vec_widen((half_vec) * (const loose_half_vec *)((const bf16 *)from + index));
}

INLINE void store_lanes(void *to, int64_t index, vec numbers, int dtype) {
    if (dtype == DTYPE_F32)
        vec_store((float *)to + index, numbers);
    else
        *(loose_half_vec *)((bf16 *)to + index) = (loose_half_vec)vec_narrow(numbers);
}

/* The first `count` of them: zeros behind, or nothing written. They go through memory by themselves: a vector that is indexed stays
   there. */
INLINE vec load_part(const void *from, int64_t index, int64_t count, int dtype) {
    if (count >= LANES)
        return load_lanes(from, index, dtype);
    float numbers[LANES] = {0};
    for (int i = 0; i < count; i++)
        numbers[i] = load(from, index + i, dtype);
    return vec_load(numbers);
}

INLINE void store_part(void *to, int64_t index, vec numbers, int64_t count, int dtype) {
    if (count >= LANES) {
        store_lanes(to, index, numbers, dtype);
        return;
    }
    float part[LANES];
    vec_store(part, numbers);
    for (int i = 0; i < count; i++)
        store(to, index + i, part[i], dtype);
}

/* exp with a relative error below 2e-7; 0 below -87, 1.7e38 from 88 on; a NaN stays one. */
INLINE vec vec_exp(vec x) {
    ivec is_low = x < -87.0f;
    vec bounded = vec_select(x > 88.0f, vec_all(88.0f), vec_select(is_low, vec_all(-87.0f), x));
    const float magic = 12582912.0f; /* adding it rounds to a whole number, which then stands in the lowest bits */
    vec shifted = bounded * 1.44269504f + magic, power = shifted - magic;
    vec rest = bounded - power * 0.693359375f + power * 2.12194440e-4f;
    vec sum = vec_all(1.9875691500e-4f);
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    vec scale = (vec)(((ivec)shifted << 23) + 0x3f800000);
    return (vec)((ivec)(sum * scale) & ~is_low);
}

/* Absolute error below 3e-7. */
INLINE vec vec_tanh(vec x) {
    ivec sign = (ivec)x & INT32_MIN;
    vec power = vec_exp((vec)((ivec)x & INT32_MAX) * -2.0f);
    return (vec)((ivec)((1.0f - power) / (1.0f + power)) | sign);
}

/* Absolute error below 4e-7: a quotient of polynomials in x * x, fitted to erf(x) / x up to 3.92, where erf is 1 in float32. A NaN stays
   one. */
INLINE vec vec_erf(vec x) {
    vec bounded = vec_select(x > 3.92f, vec_all(3.92f), vec_select(x < -3.92f, vec_all(-3.92f), x)), square = bounded * bounded;
    vec above = vec_all(2.050074727e-6f), below = vec_all(3.809162444e-5f);
    above = above * square + 2.848834838e-4f;
    above = above * square + 3.765666159e-3f;
    above = above * square + 5.274887755e-2f;
    above = above * square + 1.904076487e-1f;
    above = above * square + 1.128379107f;
    below = below * square + 1.162546803e-3f;
    below = below * square + 1.496931724e-2f;
    below = below * square + 1.141095981e-1f;
    below = below * square + 5.020771027e-1f;
    below = below * square + 1.0f;
    return bounded * above / below;
}

/* ---- shuffles ---- */

/* Every second number of two vectors' first halves, and of their second ones: a0 b0 a1 b1 ... */
#if VEC_BYTES == 64
#define FIRST_HALVES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define SECOND_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif VEC_BYTES == 32
#define FIRST_HALVES 0, 8, 1, 9, 2, 10, 3, 11
#define SECOND_HALVES 4, 12, 5, 13, 6, 14, 7, 15
#else
#define FIRST_HALVES 0, 4, 1, 5
#define SECOND_HALVES 2, 6, 3, 7
#endif

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

/* Sums of LANES vectors, one in each place. */
INLINE vec sum_each(vec v[LANES]) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++)
            v[i] = SHUFFLE(v[i], v[i + half], FIRST_HALVES) + SHUFFLE(v[i], v[i + half], SECOND_HALVES);
    return v[0];
}

/* LANES vectors: number j of vector i becomes number i of vector j. */
INLINE void vec_transpose(vec v[LANES]) {
#pragma GCC unroll 4
    for (int stage = 1; stage < LANES; stage *= 2) {
        vec mixed[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            mixed[2 * i] = SHUFFLE(v[i], v[i + LANES / 2], FIRST_HALVES);
            mixed[2 * i + 1] = SHUFFLE(v[i], v[i + LANES / 2], SECOND_HALVES);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            v[i] = mixed[i];
    }
}

#endif
