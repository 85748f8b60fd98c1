/* Keys and values of 8 bits (fp8.h) to bfloat16, which has all of their numbers, by AVX-512. */
#ifndef PELTON_FP8_AVX512_H
#define PELTON_FP8_AVX512_H

#include "common.h"

#if PELTON_ISA >= ISA_AVX512_BF16
#include <immintrin.h>

/* 32 numbers. Those below the least with an exponent of its own are looked up. */
INLINE __m512i bf16_of_fp8(__m256i bytes, int dtype) {
    int is_e4m3 = dtype == DTYPE_E4M3;
    __m512i small = is_e4m3 ? _mm512_set4_epi64(0, 0, 0x3c603c403c203c00, 0x3bc03b803b000000) : _mm512_set4_epi64(0, 0, 0, 0x3840380037800000);
    __m512i bits = _mm512_cvtepi8_epi16(bytes), number = _mm512_slli_epi16(bits, is_e4m3 ? 4 : 5);
    number = _mm512_and_si512(number, _mm512_set1_epi16(is_e4m3 ? 0x7f0 : 0xfe0));
    number = _mm512_add_epi16(number, _mm512_set1_epi16(is_e4m3 ? 120 << 7 : 112 << 7));
    __mmask32 is_special = _mm512_cmpge_epi16_mask(number, _mm512_set1_epi16(is_e4m3 ? 0x43f0 : 0x4780)); /* to exponent 255 */
    number = _mm512_mask_add_epi16(number, is_special, number, _mm512_set1_epi16(is_e4m3 ? 0x3c00 : 0x3800));
    __mmask32 is_small = _mm512_testn_epi16_mask(bits, _mm512_set1_epi16(is_e4m3 ? 0x78 : 0x7c));
    number = _mm512_mask_permutexvar_epi16(number, is_small, bits, small);
    return _mm512_ternarylogic_epi64(number, bits, _mm512_set1_epi16(INT16_MIN), 0xf8); /* number | (bits & sign) */
}

/* `count` lines that are `step` apart, each of `dim` numbers; they stand `to_step` apart then, a multiple of 32. */
INLINE void widen_lines_of(const uint8_t *from, int64_t step, int64_t count, int64_t dim, bf16 *to, int64_t to_step, int dtype) {
    for (; count > 0; count--, from += step, to += to_step) {
        int64_t i = 0;
        for (; i + 32 <= dim; i += 32)
            _mm512_storeu_si512(to + i, bf16_of_fp8(_mm256_loadu_si256((const __m256i *)(from + i)), dtype));
        if (i < dim)
            _mm512_storeu_si512(to + i, bf16_of_fp8(_mm256_maskz_loadu_epi8((1u << (dim - i)) - 1u, from + i), dtype));
    }
}

static __attribute__((noinline)) void widen_lines(const void *from, int64_t step, int64_t count, int64_t dim, bf16 *to, int64_t to_step,
                                                  int dtype) {
    if (dtype == DTYPE_E4M3)
        widen_lines_of(from, step, count, dim, to, to_step, DTYPE_E4M3);
    else
        widen_lines_of(from, step, count, dim, to, to_step, DTYPE_E5M2);
}

#endif
#endif
