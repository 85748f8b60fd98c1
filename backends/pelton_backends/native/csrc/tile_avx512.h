/* Small matrix products over packed panels, in bfloat16 by AVX-512: a panel is PANEL rows of a matrix, [k / 2][PANEL][2], and
   A [m, k] times a panel is added to C [m, PANEL] float32, two products an instruction (vdpbf16ps). `rows` of a panel become its
   columns (weights, keys); `cols` of it keep their place (values). */
#ifndef PELTON_TILE_AVX512_H
#define PELTON_TILE_AVX512_H

#include "common.h"

#if PELTON_ISA >= ISA_AVX512_BF16
#include <immintrin.h>

/* ---- bfloat16 by AVX-512 ---- */

/* 16 vectors of 16 32-bit words, transposed in place. */
INLINE void transpose_16(__m512i v[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i a = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88), b = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
        __m512i c = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88), d = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
        t[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        t[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        t[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        v[i] = t[i];
}

/* k even. */
INLINE void avx512_pack_rows(const void *const *rows, int64_t k, bf16 *panel) {
    for (int half = 0; half < 2; half++)
        for (int64_t i = 0; i < k; i += 32) {
            int64_t left = least(k - i, 32);
            __mmask32 mask = left == 32 ? 0xffffffffu : (1u << left) - 1u;
            __m512i words[16];
#pragma GCC unroll 16
            for (int row = 0; row < 16; row++)
                words[row] = _mm512_maskz_loadu_epi16(mask, (const bf16 *)rows[half * 16 + row] + i);
            transpose_16(words);
            if (left == 32) {
#pragma GCC unroll 16
                for (int pair = 0; pair < 16; pair++)
                    _mm512_store_si512(panel + (i / 2 + pair) * 2 * PANEL + half * 32, words[pair]);
            } else {
                for (int64_t pair = 0; pair < left / 2; pair++)
                    _mm512_store_si512(panel + (i / 2 + pair) * 2 * PANEL + half * 32, words[pair]);
            }
        }
}

/* Numbers [first, first + count) of `k` rows, a row of zeros behind an odd k. */
INLINE void avx512_pack_cols(const void *const *rows, int64_t k, int64_t first, int64_t count, bf16 *panel) {
    __mmask32 mask = count == 32 ? 0xffffffffu : (1u << count) - 1u;
    __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36,
                                     4, 35, 3, 34, 2, 33, 1, 32, 0);
    __m512i upper = _mm512_add_epi16(order, _mm512_set1_epi16(16));
    for (int64_t i = 0; i < k; i += 2) {
        __m512i even = _mm512_maskz_loadu_epi16(mask, (const bf16 *)rows[i] + first);
        __m512i odd = i + 1 < k ? _mm512_maskz_loadu_epi16(mask, (const bf16 *)rows[i + 1] + first) : _mm512_setzero_si512();
        _mm512_store_si512(panel + i * PANEL, _mm512_permutex2var_epi16(even, order, odd));
        _mm512_store_si512(panel + i * PANEL + 32, _mm512_permutex2var_epi16(even, upper, odd));
    }
}

/* M rows of A by one panel: with M = 12, 24 of 32 registers are sums. */
INLINE void avx512_block(const bf16 *a, int64_t lda, const bf16 *panel, float *c, int64_t ldc, int64_t k, int M) {
    __m512 sums[12][2];
#pragma GCC unroll 12
    for (int row = 0; row < M; row++) {
        sums[row][0] = _mm512_loadu_ps(c + row * ldc);
        sums[row][1] = _mm512_loadu_ps(c + row * ldc + 16);
    }
    for (int64_t i = 0; i < k; i += 2) {
        __m512bh low = (__m512bh)_mm512_load_si512(panel + i * PANEL);
        __m512bh high = (__m512bh)_mm512_load_si512(panel + i * PANEL + 32);
#pragma GCC unroll 12
        for (int row = 0; row < M; row++) {
            int32_t pair;
            memcpy(&pair, a + row * lda + i, sizeof pair);
            __m512bh factor = (__m512bh)_mm512_set1_epi32(pair);
            sums[row][0] = _mm512_dpbf16_ps(sums[row][0], low, factor);
            sums[row][1] = _mm512_dpbf16_ps(sums[row][1], high, factor);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < M; row++) {
        _mm512_storeu_ps(c + row * ldc, sums[row][0]);
        _mm512_storeu_ps(c + row * ldc + 16, sums[row][1]);
    }
}

/* k even: a row of A is read in pairs. */
static __attribute__((noinline, unused)) void avx512_multiply(const bf16 *a, int64_t lda, const bf16 *panel, float *c, int64_t ldc, int64_t m,
                                          int64_t k) {
    /* What is left of 12 goes in few sizes: each is compiled on its own, and takes its time. */
    int64_t row = 0;
    for (; row + 12 <= m; row += 12)
        avx512_block(a + row * lda, lda, panel, c + row * ldc, ldc, k, 12);
    for (; row + 6 <= m; row += 6)
        avx512_block(a + row * lda, lda, panel, c + row * ldc, ldc, k, 6);
    for (; row + 3 <= m; row += 3)
        avx512_block(a + row * lda, lda, panel, c + row * ldc, ldc, k, 3);
    for (; row < m; row++)
        avx512_block(a + row * lda, lda, panel, c + row * ldc, ldc, k, 1);
}

/* exp, as `fast_exp`. */
INLINE __m512 avx512_exp(__m512 x) {
    __mmask16 is_zero = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
    __m512 power = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(0.693359375f), x);
    rest = _mm512_fmadd_ps(power, _mm512_set1_ps(2.12194440e-4f), rest);
    __m512 sum = _mm512_set1_ps(1.9875691500e-4f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.3981999507e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(8.3334519073e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(4.1665795894e-2f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.6666665459e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.0000001201e-1f));
    sum = _mm512_fmadd_ps(sum, _mm512_mul_ps(rest, rest), _mm512_add_ps(rest, _mm512_set1_ps(1.0f)));
    return _mm512_mask_mov_ps(_mm512_scalef_ps(sum, power), is_zero, _mm512_setzero_ps());
}

#endif
#endif
