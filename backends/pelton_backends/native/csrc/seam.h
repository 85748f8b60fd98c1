/* What follows a product on AVX-512, whatever its weights are: bias, activation, soft cap, rounded as the reference rounds. */
#ifndef PELTON_SEAM_H
#define PELTON_SEAM_H

#include "linear.h"
#include "tile_avx512.h"

#if PELTON_ISA >= ISA_AVX512_BF16

INLINE __m512 widen(__m256i numbers) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}

INLINE __m256i narrow(__m512 numbers) { return (__m256i)_mm512_cvtneps_pbh(numbers); }

INLINE __m512 with_bias(const struct linear *op, __m512 sums, __mmask16 mask, int64_t column) {
    if (op->bias == NULL)
        return sums;
    return _mm512_add_ps(sums, widen(_mm256_maskz_loadu_epi16(mask, (const bf16 *)op->bias + column)));
}

/* `pelton_finish` of one row of a panel in bfloat16, 16 at a time: loops as short as these are not vectorised by compilers. With an
   activation, `sums` holds 16 of the gate and the 16 of up that belong to them. */
INLINE void finish_panel(const struct linear *op, float *sums, int64_t first, int64_t count, void *output) {
    if (op->activation == ACTIVATION_SILU) {
        __mmask16 mask = (__mmask16)((1u << count) - 1u);
        __m512 gate = widen(narrow(with_bias(op, _mm512_loadu_ps(sums), mask, first)));
        __m512 up = widen(narrow(with_bias(op, _mm512_loadu_ps(sums + 16), mask, op->out_features / 2 + first)));
        __m512 one = _mm512_set1_ps(1.0f), above = avx512_exp(_mm512_sub_ps(_mm512_setzero_ps(), gate));
        __m512 active = widen(narrow(_mm512_div_ps(gate, _mm512_add_ps(one, above))));
        _mm256_mask_storeu_epi16((bf16 *)output + first, mask, narrow(_mm512_mul_ps(active, up)));
    } else if (op->activation == ACTIVATION_NONE && op->soft_cap == 0.0f) {
        for (int64_t i = 0; i < count; i += 16) {
            __mmask16 mask = (__mmask16)((1u << least(count - i, 16)) - 1u);
            __m256i rounded = narrow(with_bias(op, _mm512_loadu_ps(sums + i), mask, first + i));
            if (op->is_logits)
                _mm512_mask_storeu_ps((float *)output + first + i, mask, widen(rounded));
            else
                _mm256_mask_storeu_epi16((bf16 *)output + first + i, mask, rounded);
        }
    } else {
        pelton_finish(op, sums, sums + 16, first, count, output);
    }
}

#endif
#endif
