/* Products with a weight, with what stands before (residual, norms) and behind them (bias, activation).

   bfloat16 on AVX-512 goes to linear_avx512.c, for any number of rows. Here: one row by dot products on every other CPU and
   dtype, each thread with its share of the weight's rows; more rows than one are torch's there. And rows of an embedding. */
#include "seam.h"

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

enum { STRIP = 64 };

/* Results [first, last), a strip at a time. */
INLINE void run_row(const struct linear *op, const void *x, int64_t first, int64_t last, void *output, int dtype) {
    float gate[STRIP], up[STRIP];
    for (int64_t at = first; at < last; at += STRIP) {
        int64_t count = least(STRIP, last - at);
        dot_rows(op->weight, x, op->in_features, at, count, gate, dtype);
        if (op->activation != ACTIVATION_NONE)
            dot_rows(op->weight, x, op->in_features, op->out_features / 2 + at, count, up, dtype);
        finish(op, gate, up, at, count, output, dtype);
    }
}

#define DEFINE_ROW(NAME, TARGET, DTYPE)                                                                             \
    TARGET static void NAME(const struct linear *op, const void *x, int64_t first, int64_t last, void *output) {    \
        run_row(op, x, first, last, output, DTYPE);                                                                 \
    }                                                                                                               \
    TARGET static void NAME##_prepare(const struct linear *op, const struct rows *in, int64_t row, void *x) {       \
        prepare_row(op, in, row, x, DTYPE);                                                                         \
    }

DEFINE_ROW(plain_bf16, , DTYPE_BF16)
DEFINE_ROW(plain_f32, , DTYPE_F32)
#if PELTON_X86
DEFINE_ROW(avx2_bf16, TARGET_AVX2, DTYPE_BF16)
DEFINE_ROW(avx2_f32, TARGET_AVX2, DTYPE_F32)
#endif

struct row_kernel {
    void (*run)(const struct linear *, const void *, int64_t, int64_t, void *);
    void (*prepare)(const struct linear *, const struct rows *, int64_t, void *);
};

static struct row_kernel choose_row(const struct linear *op) {
    int is_bf16 = op->dtype == DTYPE_BF16;
#if PELTON_X86
    if (pelton_isa() == ISA_AVX512 && is_bf16)
        return (struct row_kernel){avx2_bf16, pelton_prepare_avx512};
    if (pelton_isa() >= ISA_AVX2)
        return is_bf16 ? (struct row_kernel){avx2_bf16, avx2_bf16_prepare} : (struct row_kernel){avx2_f32, avx2_f32_prepare};
#endif
    return is_bf16 ? (struct row_kernel){plain_bf16, plain_bf16_prepare} : (struct row_kernel){plain_f32, plain_f32_prepare};
}

static void linear_row(const struct linear *op, const struct rows *in, void *output) {
    struct row_kernel kernel = choose_row(op);
    float room[op->in_features]; /* for either dtype */
    const void *x = in->hidden;
    if (op->norm != NULL) {
        kernel.prepare(op, in, 0, room);
        x = room;
    }
    int64_t columns = num_columns(op), groups = (columns + 3) / 4;
#pragma omp parallel if (columns * op->in_features > 1 << 14)
    {
        int64_t threads = num_threads(), thread = this_thread();
        int64_t first = groups * thread / threads * 4, last = least(groups * (thread + 1) / threads * 4, columns);
        if (first < last)
            kernel.run(op, x, first, last, output);
    }
}

/* Rows -> output [num_rows, output_stride]. LINEAR_ONE_ROW_ONLY: nothing was done; `pelton_prepare`, and torch. */
EXPORT int pelton_linear(const struct linear *op, const void *hidden, const void *residual, void *residual_out,
                         const int64_t *rows, int64_t num_rows, void *output) {
    struct rows in = {hidden, residual, residual_out, rows, num_rows};
#if PELTON_X86
    if (op->is_packed || (pelton_isa() == ISA_AVX512 && op->dtype == DTYPE_BF16 && op->in_features % 2 == 0))
        return pelton_linear_avx512(op, &in, output) ? LINEAR_NO_MEMORY : LINEAR_DONE;
#endif
    if (num_rows != 1)
        return LINEAR_ONE_ROW_ONLY;
    linear_row(op, &in, output);
    return LINEAR_DONE;
}

/* Residual and norm alone: x [num_rows, in_features]. */
EXPORT void pelton_prepare(const struct linear *op, const void *hidden, const void *residual, void *residual_out, void *x,
                           const int64_t *rows, int64_t num_rows) {
    struct rows in = {hidden, residual, residual_out, rows, num_rows};
    struct row_kernel kernel = choose_row(op);
    size_t row_bytes = (size_t)op->in_features * size_of(op->dtype);
#pragma omp parallel for schedule(static) if (num_rows > 3)
    for (int64_t row = 0; row < num_rows; row++)
        kernel.prepare(op, &in, row, (char *)x + (size_t)row * row_bytes);
}

/* ---- rows of an embedding ---- */

INLINE void embed_row(const struct embed *op, int64_t id, char *output, int dtype) {
    int64_t size = op->hidden_size;
    if (op->is_packed) { /* pairs of numbers, PANEL of them apart; size is even, the dtype bfloat16 */
        const char *from = (const char *)op->weight + (id / PANEL * PANEL * size + id % PANEL * 2) * (int64_t)sizeof(bf16);
        for (int64_t i = 0; i < size / 2; i++)
            memcpy(output + 4 * i, from + 4 * PANEL * i, 4);
    } else {
        size_t row_bytes = (size_t)size * size_of(dtype);
        memcpy(output, (const char *)op->weight + (size_t)id * row_bytes, row_bytes);
    }
    if (op->scale != 1.0f)
        for (int64_t i = 0; i < size; i++)
            store(output, i, load(output, i, dtype) * op->scale, dtype);
}

/* ids [num_ids], each a row of the matrix -> output [num_ids, hidden_size], rounded as the reference: number, times scale. */
EXPORT void pelton_embed(const struct embed *op, const int64_t *ids, int64_t num_ids, void *output) {
    size_t row_bytes = (size_t)op->hidden_size * size_of(op->dtype);
#pragma omp parallel for schedule(static) if (num_ids > 8)
    for (int64_t i = 0; i < num_ids; i++) {
        char *row = (char *)output + (size_t)i * row_bytes;
        if (op->dtype == DTYPE_BF16)
            embed_row(op, ids[i], row, DTYPE_BF16);
        else
            embed_row(op, ids[i], row, DTYPE_F32);
    }
}
