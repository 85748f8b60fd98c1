/* What stands around a product, whatever its weights are: residual and norms before it; bias, activation, soft cap behind.
   Rounded as the reference rounds. */
#ifndef PELTON_SEAM_H
#define PELTON_SEAM_H

#include "linear.h"
#include "tile.h"

/* x * 1 / rms(x) * weight, of float32 numbers that have the dtype's precision. */
INLINE void norm_line(float *line, int64_t size, const void *weight, float eps, int unit_offset, int dtype) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++)
        sum += line[i] * line[i];
    float factor = 1.0f / sqrtf(sum / (float)size + eps);
    if (unit_offset)
        for (int64_t i = 0; i < size; i++)
            line[i] = round_to(line[i] * factor * (1.0f + load(weight, i, dtype)), dtype);
    else
        for (int64_t i = 0; i < size; i++)
            line[i] = round_to(round_to(line[i] * factor, dtype) * load(weight, i, dtype), dtype);
}

/* Row `row` of a call: residual' to its place where that is wanted, norm(residual') to `x`. */
INLINE void prepare_row(const struct linear *op, const struct rows *in, int64_t row, void *x, int dtype) {
    int64_t size = op->in_features;
    size_t row_bytes = (size_t)size * size_of(dtype), from = (size_t)(in->rows == NULL ? row : in->rows[row]) * row_bytes;
    const void *hidden = (const char *)in->hidden + from;
    float line[size];
    for (int64_t i = 0; i < size; i++)
        line[i] = load(hidden, i, dtype);
    if (op->post_norm != NULL)
        norm_line(line, size, op->post_norm, op->post_eps, op->post_unit_offset, dtype);
    if (in->residual != NULL) {
        const void *residual = (const char *)in->residual + from;
        for (int64_t i = 0; i < size; i++)
            line[i] = round_to(line[i] + load(residual, i, dtype), dtype);
    }
    if (in->residual_out != NULL) {
        void *residual_out = (char *)in->residual_out + (size_t)row * row_bytes;
        for (int64_t i = 0; i < size; i++)
            store(residual_out, i, line[i], dtype);
    }
    norm_line(line, size, op->norm, op->eps, op->unit_offset, dtype);
    for (int64_t i = 0; i < size; i++)
        store(x, i, line[i], dtype);
}

INLINE float activate(float x, int activation) {
    if (activation == ACTIVATION_GELU)
        return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    if (activation == ACTIVATION_GELU_TANH)
        return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    return x / (1.0f + fast_exp(-x));
}

/* `count` results from column `first` on; rounded as the reference: product, activation, their product. */
INLINE void finish(const struct linear *op, float *gate, float *up, int64_t first, int64_t count, void *output, int dtype) {
    if (op->bias != NULL)
        for (int64_t i = 0; i < count; i++)
            gate[i] += load(op->bias, first + i, dtype);
    if (op->is_logits) {
        for (int64_t i = 0; i < count; i++) {
            float logit = round_to(gate[i], dtype);
            ((float *)output)[first + i] = op->soft_cap > 0.0f ? op->soft_cap * tanhf(logit / op->soft_cap) : logit;
        }
    } else if (op->activation == ACTIVATION_NONE) {
        for (int64_t i = 0; i < count; i++)
            store(output, first + i, gate[i], dtype);
    } else {
        if (op->bias != NULL)
            for (int64_t i = 0; i < count; i++)
                up[i] += load(op->bias, op->out_features / 2 + first + i, dtype);
        if (op->activation == ACTIVATION_SILU)
            for (int64_t i = 0; i < count; i++) {
                float active = round_to(activate(round_to(gate[i], dtype), ACTIVATION_SILU), dtype);
                store(output, first + i, active * round_to(up[i], dtype), dtype);
            }
        else
            for (int64_t i = 0; i < count; i++) {
                float active = round_to(activate(round_to(gate[i], dtype), op->activation), dtype);
                store(output, first + i, active * round_to(up[i], dtype), dtype);
            }
    }
}

#if PELTON_X86

TARGET_AVX512 INLINE __m512 widen(__m256i numbers) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}

TARGET_AVX512 INLINE __m256i narrow(__m512 numbers) { return (__m256i)_mm512_cvtneps_pbh(numbers); }

TARGET_AVX512 INLINE __m512 with_bias(const struct linear *op, __m512 sums, __mmask16 mask, int64_t column) {
    if (op->bias == NULL)
        return sums;
    return _mm512_add_ps(sums, widen(_mm256_maskz_loadu_epi16(mask, (const bf16 *)op->bias + column)));
}

/* `finish` of one row of a panel in bfloat16, 16 at a time: loops as short as these are not vectorised by compilers. With an
   activation, `sums` holds 16 of the gate and the 16 of up that belong to them. */
TARGET_AVX512 INLINE void finish_panel(const struct linear *op, float *sums, int64_t first, int64_t count, void *output) {
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
        finish(op, sums, sums + 16, first, count, output, DTYPE_BF16);
    }
}

#endif
#endif
