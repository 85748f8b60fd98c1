/* Products with a weight, with what stands before (residual, norms) and behind them (bias, activation).

   bfloat16 on AVX-512 goes to linear_avx512.c, for any number of rows. Here: one row by dot products on every other CPU and
   dtype, each thread with its share of the weight's rows; more rows than one are torch's there. And rows of an embedding. */
#include "linear.h"

enum { STRIP = 64 };

/* ---- lines of numbers ---- */

/* Everything is computed on float32 lines; these three know the dtype. */
static void widen_line(const void *from, int64_t count, float *line, int dtype) {
    if (dtype == DTYPE_F32)
        memcpy(line, from, (size_t)count * sizeof *line);
    else
        for (int64_t i = 0; i < count; i++)
            line[i] = to_float(((const bf16 *)from)[i]);
}

static void round_line(float *line, int64_t count, int dtype) {
    if (dtype == DTYPE_BF16)
        for (int64_t i = 0; i < count; i++)
            line[i] = to_float(to_bf16(line[i]));
}

static void narrow_line(const float *line, int64_t count, void *to, int dtype) {
    if (dtype == DTYPE_F32)
        memcpy(to, line, (size_t)count * sizeof *line);
    else
        for (int64_t i = 0; i < count; i++)
            ((bf16 *)to)[i] = to_bf16(line[i]);
}

INLINE const void *part(const void *numbers, int64_t first, int dtype) {
    return (const char *)numbers + (size_t)first * size_of(dtype);
}

/* ---- residual and norms ---- */

/* x * 1 / rms(x) * weight, of numbers that have the dtype's precision. */
static void norm_line(float *line, float *room, int64_t size, const void *weight, float eps,
                      int unit_offset, int dtype) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++)
        sum += line[i] * line[i];
    float factor = 1.0f / sqrtf(sum / (float)size + eps), offset = unit_offset ? 1.0f : 0.0f;
    for (int64_t i = 0; i < size; i++)
        line[i] *= factor;
    if (!unit_offset)
        round_line(line, size, dtype);
    widen_line(weight, size, room, dtype);
    for (int64_t i = 0; i < size; i++)
        line[i] *= offset + room[i];
    round_line(line, size, dtype);
}

/* Row `row` of a call: residual' to its place where that is wanted, norm(residual') to `x`. */
static void prepare_row(const struct linear *op, const struct rows *in, int64_t row, void *x) {
    int64_t size = op->in_features, from = (in->rows == NULL ? row : in->rows[row]) * size;
    int dtype = op->dtype;
    float line[size], room[size];
    widen_line(part(in->hidden, from, dtype), size, line, dtype);
    if (op->post_norm != NULL)
        norm_line(line, room, size, op->post_norm, op->post_eps, op->post_unit_offset, dtype);
    if (in->residual != NULL) {
        widen_line(part(in->residual, from, dtype), size, room, dtype);
        for (int64_t i = 0; i < size; i++)
            line[i] += room[i];
        round_line(line, size, dtype);
    }
    if (in->residual_out != NULL)
        narrow_line(line, size, (void *)part(in->residual_out, row * size, dtype), dtype);
    norm_line(line, room, size, op->norm, op->eps, op->unit_offset, dtype);
    narrow_line(line, size, x, dtype);
}

/* ---- what follows a product ---- */

static void add_bias(const struct linear *op, float *line, int64_t first, int64_t count) {
    float bias[STRIP];
    if (op->bias == NULL)
        return;
    widen_line(part(op->bias, first, op->dtype), count, bias, op->dtype);
    for (int64_t i = 0; i < count; i++)
        line[i] += bias[i];
}

static void activate_line(float *line, int64_t count, int activation) {
    if (activation == ACTIVATION_SILU)
        for (int64_t i = 0; i < count; i++)
            line[i] = line[i] / (1.0f + fast_exp(-line[i]));
    else if (activation == ACTIVATION_GELU)
        for (int64_t i = 0; i < count; i++)
            line[i] = 0.5f * line[i] * (1.0f + erff(line[i] * 0.70710678f));
    else
        for (int64_t i = 0; i < count; i++) {
            float x = line[i];
            line[i] = 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
        }
}

static void finish_line(const struct linear *op, float *gate, float *up, int64_t first, int64_t count,
                        void *output) {
    int dtype = op->dtype;
    add_bias(op, gate, first, count);
    if (op->is_logits) {
        round_line(gate, count, dtype);
        for (int64_t i = 0; i < count; i++)
            ((float *)output)[first + i] = op->soft_cap > 0.0f ? op->soft_cap * tanhf(gate[i] / op->soft_cap) : gate[i];
        return;
    }
    if (op->activation != ACTIVATION_NONE) {
        add_bias(op, up, op->out_features / 2 + first, count);
        round_line(gate, count, dtype);
        round_line(up, count, dtype);
        activate_line(gate, count, op->activation);
        round_line(gate, count, dtype);
        for (int64_t i = 0; i < count; i++)
            gate[i] *= up[i];
    }
    narrow_line(gate, count, (void *)part(output, first, dtype), dtype);
}

/* ---- one row ---- */

static void dot_rows(const void *weight, const void *x, int64_t size, int64_t first, int64_t count, float *results, int dtype) {
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

/* ---- for other files ---- */

void pelton_prepare_row(const struct linear *op, const struct rows *in, int64_t row, void *x) {
#if PELTON_ISA >= ISA_AVX512_BF16
    if (op->dtype == DTYPE_BF16) {
        pelton_prepare_avx512(op, in, row, x);
        return;
    }
#endif
    prepare_row(op, in, row, x);
}

void pelton_finish(const struct linear *op, float *gate, float *up, int64_t first, int64_t count, void *output) {
    finish_line(op, gate, up, first, count, output);
}

/* ---- entries ---- */

struct row_call {
    const struct linear *op;
    const void *x; /* [in_features] */
    void *output;
};

static void run_strip(void *context, int64_t strip, struct turn *turn) {
    const struct row_call *call = context;
    const struct linear *op = call->op;
    int64_t columns = num_columns(op), size = op->in_features, first = strip * STRIP, count = least(STRIP, columns - first);
    float gate[STRIP], up[STRIP];
    dot_rows(op->weight, call->x, size, first, count, gate, op->dtype);
    if (op->activation != ACTIVATION_NONE)
        dot_rows(op->weight, call->x, size, columns + first, count, up, op->dtype);
    if (may_write(turn))
        finish_line(op, gate, up, first, count, call->output);
}

static int linear_row(const struct linear *op, const struct rows *in, void *output) {
    size_t bytes = (size_t)op->in_features * size_of(op->dtype);
    void *x = pelton_shared(bytes);
    if (x == NULL)
        return LINEAR_NO_MEMORY;
    if (op->norm != NULL)
        pelton_prepare_row(op, in, 0, x);
    else
        memcpy(x, in->hidden, bytes);
    struct row_call call = {op, x, output};
    int64_t columns = num_columns(op);
    pool_do((struct pool_work){.run = run_strip, .context = &call, .context_bytes = sizeof call, .num_tasks = (columns + STRIP - 1) / STRIP,
                          .is_small = columns * op->in_features <= 1 << 14, .has_shares = 1});
    return LINEAR_DONE;
}

/* Rows -> output [num_rows, output_stride]. LINEAR_ONE_ROW_ONLY: nothing was done; `pelton_prepare`, and torch. */
EXPORT int pelton_linear(const struct linear *op, const void *hidden, const void *residual, void *residual_out,
                         const int64_t *rows, int64_t num_rows, void *output) {
    struct rows in = {hidden, residual, residual_out, rows, num_rows};
#if PELTON_ISA >= ISA_AVX512_BF16
    if (op->dtype == DTYPE_BF16 && op->in_features % 2 == 0)
        return pelton_linear_avx512(op, &in, output, NULL) ? LINEAR_NO_MEMORY : LINEAR_DONE;
#endif
    if (num_rows != 1)
        return LINEAR_ONE_ROW_ONLY;
    return linear_row(op, &in, output);
}

struct prepare_call {
    const struct linear *op;
    struct rows in;
    char *x;
};

static void run_prepare(void *context, int64_t row, struct turn *turn) {
    const struct prepare_call *call = context;
    (void)turn;
    pelton_prepare_row(call->op, &call->in, row, call->x + (size_t)(row * call->op->in_features) * size_of(call->op->dtype));
}

/* Residual and norm alone: x [num_rows, in_features]. */
EXPORT void pelton_prepare(const struct linear *op, const void *hidden, const void *residual, void *residual_out, void *x,
                           const int64_t *rows, int64_t num_rows) {
    struct prepare_call call = {op, {hidden, residual, residual_out, rows, num_rows}, x};
    pool_do((struct pool_work){.run = run_prepare, .context = &call, .num_tasks = num_rows, .is_small = num_rows <= 3, .has_shares = 1});
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

struct embed_call {
    const struct embed *op;
    const int64_t *ids;
    char *output;
};

static void run_embed(void *context, int64_t i, struct turn *turn) {
    const struct embed_call *call = context;
    const struct embed *op = call->op;
    char *row = call->output + (size_t)(i * op->hidden_size) * size_of(op->dtype);
    (void)turn;
    if (op->dtype == DTYPE_BF16)
        embed_row(op, call->ids[i], row, DTYPE_BF16);
    else
        embed_row(op, call->ids[i], row, DTYPE_F32);
}

/* ids [num_ids], each a row of the matrix -> output [num_ids, hidden_size], rounded as the reference: number, times scale. */
EXPORT void pelton_embed(const struct embed *op, const int64_t *ids, int64_t num_ids, void *output) {
    struct embed_call call = {op, ids, output};
    pool_do((struct pool_work){.run = run_embed, .context = &call, .num_tasks = num_ids, .is_small = num_ids <= 8, .has_shares = 1});
}
