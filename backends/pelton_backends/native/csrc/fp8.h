/* Keys and values of 8 bits: e4m3, up to 448 and without infinity, and e5m2. Both widen exactly to float32. */
#ifndef PELTON_FP8_H
#define PELTON_FP8_H

#include "attention_vec.h"

typedef uint8_t byte_vec __attribute__((vector_size(LANES)));
typedef uint8_t loose_byte_vec __attribute__((vector_size(LANES), aligned(1), may_alias));

/* A number's size starts at this bit of float32, and its exponent is that of float32 less so much. */
INLINE int fp8_shift(int dtype) { return dtype == DTYPE_E4M3 ? 20 : 21; }
INLINE uint32_t fp8_bias(int dtype) { return (dtype == DTYPE_E4M3 ? 120u : 112u) << 23; }

/* LANES numbers from their bits. Those below the least with an exponent of its own are read as if they had that one, which is then
   taken away: there is no arithmetic on numbers that float32 has no exponent for, and which CPUs are slow with. */
INLINE vec vec_of_fp8(byte_vec bytes, int dtype) {
    uvec bits = __builtin_convertvector(bytes, uvec), size = bits & 0x7fu;
    uvec is_small = (uvec)((ivec)size < (dtype == DTYPE_E4M3 ? 8 : 4)), one = is_small & (1u << 23);
    uvec is_special = (uvec)((ivec)size >= (dtype == DTYPE_E4M3 ? 0x7f : 0x7c));
    vec number = (vec)((size << fp8_shift(dtype)) + one + fp8_bias(dtype)) - (vec)(is_small & (fp8_bias(dtype) + (1u << 23)));
    return (vec)((uvec)number | (is_special & 0x7f800000u) | ((bits & 0x80u) << 24));
}

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
    return __builtin_convertvector((bits & ~is_nan) | (is_nan & 0x7fu) | sign, byte_vec);
}

/* A line of `count` numbers of 8 bits as float32, zeros up to `padded`. */
INLINE void widen_fp8_line(const uint8_t *from, float *to, int64_t count, int64_t padded, int dtype) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        vec_store(to + i, vec_of_fp8((byte_vec) * (const loose_byte_vec *)(from + i), dtype));
    if (i < count) {
        uint8_t rest[LANES] = {0};
        float numbers[LANES];
        memcpy(rest, from + i, (size_t)(count - i));
        vec_store(numbers, vec_of_fp8((byte_vec) * (const loose_byte_vec *)rest, dtype));
        memcpy(to + i, numbers, (size_t)(count - i) * sizeof(float));
        i = count;
    }
    for (; i < padded; i++)
        to[i] = 0.0f;
}

/* A line of numbers of the model's dtype to 8 bits. */
INLINE void narrow_fp8_line(const void *from, uint8_t *to, int64_t count, int from_dtype, int dtype) {
    for (int64_t i = 0; i < count; i += LANES) {
        byte_vec bytes = fp8_of_vec(load_part(from, i, count - i, from_dtype), dtype);
        memcpy(to + i, &bytes, (size_t)least(LANES, count - i));
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
