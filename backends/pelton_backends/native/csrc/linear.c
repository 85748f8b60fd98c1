/* Entries of products with a plain weight, and rows of an embedding. */
#include "float_kernels.h"

#if PELTON_ISA >= ISA_AVX512_BF16
struct float_kernels pelton_float;

SHARED void pelton_take_float(const struct float_kernels *kernels) { pelton_float = *kernels; }
#endif

SHARED const struct engine *pelton_engine(const struct linear *op) {
#if PELTON_ISA >= ISA_AVX512_BF16
    if (op->dtype == DTYPE_BF16 && op->in_features % 2 == 0)
        return &pelton_bf16;
#endif
    return op->dtype == DTYPE_BF16 ? pelton_float.bf16 : pelton_float.f32;
}

/* Whether the op has to have the library of kernels in float32 arithmetic. */
EXPORT int pelton_product_takes_float(const struct linear *op) {
#if PELTON_ISA >= ISA_AVX512_BF16
    return pelton_engine(op) != &pelton_bf16 || finishes_in_float(op);
#else
    (void)op;
    return 0;
#endif
}

/* Rows -> output [num_rows, output_stride]; `rows` only with a norm. 1: no memory. */
EXPORT int pelton_linear(const struct linear *op, const void *hidden, const void *residual, void *residual_out,
                         const int64_t *rows, int64_t num_rows, void *output) {
    struct rows in = {hidden, residual, residual_out, rows, num_rows};
    return pelton_product(op, &in, output, NULL);
}

/* ---- rows of an embedding ---- */

INLINE void embed_row(const struct embed *op, int64_t id, char *output, int dtype) {
    int64_t size = op->hidden_size, row_bytes = size * (int64_t)size_of(dtype);
    if (op->is_packed) { /* words of 4 bytes, PANEL of them apart: rows have an even number of bfloat16 */
        const char *from = (const char *)op->weight + id / PANEL * PANEL * row_bytes + id % PANEL * 4;
        for (int64_t byte = 0; byte < row_bytes; byte += 4)
            memcpy(output + byte, from + PANEL * byte, 4);
    } else {
        memcpy(output, (const char *)op->weight + id * row_bytes, (size_t)row_bytes);
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
