/* Products with a plain weight [out, in], with what stands before (residual, norms) and behind them (bias, activation).

   One row: dot products, each thread with its share of the weight's rows, read once in order: as fast as memory. More rows
   (bfloat16, AVX-512): panels of 32 weight rows are packed as they are read, and multiplied with up to ROW_BLOCK rows while
   they are in the cache; packing costs a tenth at 64 rows, and no second copy of the weights is kept. */
#include "linear.h"
#include "tile.h"

enum { ROW_BLOCK = 252 };

/* ---- residual and norm ---- */

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

/* One row: residual' to `residual_out` where that is wanted, norm(residual') to `x`. */
INLINE void prepare_row(const struct linear *op, const void *hidden, const void *residual, void *residual_out, void *x, int dtype) {
    int64_t size = op->in_features;
    float line[size];
    for (int64_t i = 0; i < size; i++)
        line[i] = load(hidden, i, dtype);
    if (op->post_norm != NULL)
        norm_line(line, size, op->post_norm, op->post_eps, op->post_unit_offset, dtype);
    if (residual != NULL)
        for (int64_t i = 0; i < size; i++)
            line[i] = round_to(line[i] + load(residual, i, dtype), dtype);
    if (residual_out != NULL)
        for (int64_t i = 0; i < size; i++)
            store(residual_out, i, line[i], dtype);
    norm_line(line, size, op->norm, op->eps, op->unit_offset, dtype);
    for (int64_t i = 0; i < size; i++)
        store(x, i, line[i], dtype);
}

/* ---- what follows a product ---- */

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

/* ---- one row ---- */

INLINE void dot_rows(const void *weight, const void *x, int64_t size, int64_t first, int64_t count, float *results, int dtype) {
    for (int64_t row = 0; row < count; row++) {
        int64_t start = (first + row) * size;
        float sum = 0.0f;
        if (dtype == DTYPE_BF16) {
            const bf16 *w = (const bf16 *)weight + start, *in = x;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < size; i++)
                sum += to_float(w[i]) * to_float(in[i]);
        } else {
            const float *w = (const float *)weight + start, *in = x;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < size; i++)
                sum += w[i] * in[i];
        }
        results[row] = sum;
    }
}

#if PELTON_X86

/* bfloat16 by vdpbf16ps. One row after the other, so that memory is read in one stream: 21 GB/s a core (EPYC 9004, of 28 that
   plain reading gives), against 12 with four rows at a time. */
TARGET_AVX512 INLINE void dot_rows_avx512(const bf16 *weight, const bf16 *x, int64_t size, int64_t first, int64_t count,
                                          float *results) {
    int64_t whole = size / 64 * 64;
    for (int64_t row = 0; row < count; row++) {
        const bf16 *w = weight + (first + row) * size;
        __m512 even = _mm512_setzero_ps(), odd = even;
        for (int64_t k = 0; k < whole; k += 64) {
            even = _mm512_dpbf16_ps(even, (__m512bh)_mm512_loadu_si512(w + k), (__m512bh)_mm512_loadu_si512(x + k));
            odd = _mm512_dpbf16_ps(odd, (__m512bh)_mm512_loadu_si512(w + k + 32), (__m512bh)_mm512_loadu_si512(x + k + 32));
        }
        for (int64_t k = whole; k < size; k += 32) {
            __mmask32 mask = size - k >= 32 ? 0xffffffffu : (1u << (size - k)) - 1u;
            __m512i left = _mm512_maskz_loadu_epi16(mask, w + k), right = _mm512_maskz_loadu_epi16(mask, x + k);
            even = _mm512_dpbf16_ps(even, (__m512bh)left, (__m512bh)right);
        }
        results[row] = _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
    }
}

#endif

enum { STRIP = 64 };

/* Results [first, last), a strip at a time. */
#define DEFINE_ROW(NAME, TARGET, DTYPE, DOT)                                                                        \
    TARGET static void NAME(const struct linear *op, const void *x, int64_t first, int64_t last, void *output) {    \
        float gate[STRIP], up[STRIP];                                                                               \
        for (int64_t at = first; at < last; at += STRIP) {                                                          \
            int64_t count = least(STRIP, last - at);                                                                \
            DOT(op->weight, x, op->in_features, at, count, gate);                                                   \
            if (op->activation != ACTIVATION_NONE)                                                                  \
                DOT(op->weight, x, op->in_features, op->out_features / 2 + at, count, up);                          \
            finish(op, gate, up, at, count, output, DTYPE);                                                         \
        }                                                                                                           \
    }                                                                                                               \
    TARGET static void NAME##_prepare(const struct linear *op, const void *hidden, const void *residual, void *out, \
                                      void *x) {                                                                    \
        prepare_row(op, hidden, residual, out, x, DTYPE);                                                           \
    }

#define DOT_BF16(weight, x, size, first, count, results) dot_rows(weight, x, size, first, count, results, DTYPE_BF16)
#define DOT_F32(weight, x, size, first, count, results) dot_rows(weight, x, size, first, count, results, DTYPE_F32)

DEFINE_ROW(row_plain_bf16, , DTYPE_BF16, DOT_BF16)
DEFINE_ROW(row_plain_f32, , DTYPE_F32, DOT_F32)
#if PELTON_X86
DEFINE_ROW(row_avx2_bf16, TARGET_AVX2, DTYPE_BF16, DOT_BF16)
DEFINE_ROW(row_avx2_f32, TARGET_AVX2, DTYPE_F32, DOT_F32)
DEFINE_ROW(row_avx512_bf16, TARGET_AVX512, DTYPE_BF16, dot_rows_avx512)
#endif

struct row_kernel {
    void (*run)(const struct linear *, const void *, int64_t, int64_t, void *);
    void (*prepare)(const struct linear *, const void *, const void *, void *, void *);
};

static struct row_kernel choose_row(const struct linear *op) {
#if PELTON_X86
    int isa = pelton_isa();
    if (isa == ISA_AVX512 && op->dtype == DTYPE_BF16)
        return (struct row_kernel){row_avx512_bf16, row_avx512_bf16_prepare};
    if (isa >= ISA_AVX2)
        return op->dtype == DTYPE_BF16 ? (struct row_kernel){row_avx2_bf16, row_avx2_bf16_prepare}
                                       : (struct row_kernel){row_avx2_f32, row_avx2_f32_prepare};
#endif
    return op->dtype == DTYPE_BF16 ? (struct row_kernel){row_plain_bf16, row_plain_bf16_prepare}
                                   : (struct row_kernel){row_plain_f32, row_plain_f32_prepare};
}

/* Results of one row. hidden [in]; residual [in] or NULL; residual_out [in] or NULL, may be either of them. */
EXPORT void pelton_linear_row(const struct linear *op, const void *hidden, const void *residual, void *residual_out, void *output) {
    struct row_kernel kernel = choose_row(op);
    float x[op->in_features]; /* room for either dtype */
    const void *in = hidden;
    if (op->norm != NULL) {
        kernel.prepare(op, hidden, residual, residual_out, x);
        in = x;
    }
    int64_t columns = op->activation == ACTIVATION_NONE ? op->out_features : op->out_features / 2;
    int64_t groups = (columns + 3) / 4;
#pragma omp parallel if (columns * op->in_features > 1 << 14)
    {
        int64_t threads = 1, thread = 0;
#ifdef _OPENMP
        threads = omp_get_num_threads(), thread = omp_get_thread_num();
#endif
        int64_t first = groups * thread / threads * 4, last = least(groups * (thread + 1) / threads * 4, columns);
        if (first < last)
            kernel.run(op, in, first, last, output);
    }
}

/* ---- residual and norm alone, of any number of rows ---- */

/* x [n, in] = norm(residual'), n = num_rows; row i reads row rows[i] of hidden and residual, or row i when rows is NULL. */
EXPORT void pelton_prepare(const struct linear *op, const void *hidden, const void *residual, void *residual_out, void *x,
                           const int64_t *rows, int64_t num_rows) {
    struct row_kernel kernel = choose_row(op);
    size_t row_bytes = (size_t)op->in_features * size_of(op->dtype);
#pragma omp parallel for schedule(static) if (num_rows > 3)
    for (int64_t row = 0; row < num_rows; row++) {
        size_t from = (size_t)(rows == NULL ? row : rows[row]) * row_bytes, to = (size_t)row * row_bytes;
        kernel.prepare(op, (const char *)hidden + from, residual == NULL ? NULL : (const char *)residual + from,
                       residual_out == NULL ? NULL : (char *)residual_out + to, (char *)x + to);
    }
}

/* ---- more rows ---- */

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

/* `finish` of one row of a panel, 16 at a time: loops as short as these are not vectorised by compilers. */
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

/* Columns of panel `index`: 32 results, or 16 of the gate and the 16 of up that belong to them. */
TARGET_AVX512 static void panel_avx512(const struct linear *op, const bf16 *x, int64_t num_rows, int64_t index, char *output,
                                       bf16 *panel, float *sums) {
    int64_t k = op->in_features, is_gated = op->activation != ACTIVATION_NONE;
    int64_t columns = is_gated ? op->out_features / 2 : op->out_features, width = is_gated ? 16 : 32;
    int64_t first = index * width, count = least(width, columns - first);
    const void *rows[PANEL];
    for (int64_t i = 0; i < PANEL; i++) {
        int64_t column = first + least(i % width, count - 1);
        rows[i] = (const bf16 *)op->weight + (i < width ? column : columns + column) * k;
    }
    avx512_pack_rows(rows, k, panel);
    size_t row_bytes = (size_t)op->output_stride * (op->is_logits ? sizeof(float) : sizeof(bf16));
    for (int64_t row = 0; row < num_rows; row += 12) {
        int64_t m = least(12, num_rows - row);
        memset(sums, 0, (size_t)(m * PANEL) * sizeof(float));
        avx512_multiply(x + row * k, k, panel, sums, PANEL, m, k);
        for (int64_t i = 0; i < m; i++)
            finish_panel(op, sums + i * PANEL, first, count, output + (row + i) * row_bytes);
    }
}

/* x [num_rows, in] bfloat16, in even -> output [num_rows, output_stride]. 1: this CPU has no AVX-512 BF16, or no memory. */
EXPORT int pelton_linear_rows(const struct linear *op, const bf16 *x, int64_t num_rows, void *output) {
    if (pelton_isa() != ISA_AVX512)
        return 1;
    int64_t width = op->activation == ACTIVATION_NONE ? 32 : 16;
    int64_t columns = op->activation == ACTIVATION_NONE ? op->out_features : op->out_features / 2;
    int64_t panels = (columns + width - 1) / width, blocks = (num_rows + ROW_BLOCK - 1) / ROW_BLOCK;
    size_t item = op->is_logits ? sizeof(float) : sizeof(bf16);
    int failed = 0;
#pragma omp parallel for schedule(static) reduction(| : failed)
    for (int64_t index = 0; index < panels * blocks; index++) {
        int64_t row = index / panels * ROW_BLOCK, room = round_up(op->in_features, 32);
        float *sums = pelton_scratch(12 * PANEL * sizeof(float) + (size_t)(room * PANEL) * sizeof(bf16));
        if (sums == NULL) {
            failed = 1;
            continue;
        }
        panel_avx512(op, x + row * op->in_features, least(ROW_BLOCK, num_rows - row), index % panels,
                     (char *)output + (size_t)(row * op->output_stride) * item, (bf16 *)(sums + 12 * PANEL), sums);
    }
    return failed;
}

#else

EXPORT int pelton_linear_rows(const struct linear *op, const bf16 *x, int64_t num_rows, void *output) {
    (void)op, (void)x, (void)num_rows, (void)output;
    return 1;
}

#endif
