/* Adapters: what low-rank matrices add to the rows of a product, each row by the slot that it uses.

   First every row meets the A of its slot (rank numbers for each part of the product), then B: [rank][columns], so that a column is
   a lane. Sums are float32. A row without an adapter is left as it is; where an activation follows, all rows take it. */
#include "activate.h"

enum {
    COLUMNS = 512,           /* of a task of the second stage */
    SMALL_LORA = 1 << 17,    /* multiplications of a call: no more are worth a second thread */
};

struct lora {
    const void *a, *b;    /* slot 0: [parts * rank, in_features], [rank, columns] */
    const int32_t *slots; /* of each row, -1 for none */
    const void *norm;     /* [in_features] or NULL */
    const int64_t *ends;  /* of each part: the column behind its last */
    int64_t slot_stride, in_features, rank, num_parts;
    float eps;
    int32_t unit_offset, activation, dtype;
};

struct lora_call {
    const struct lora *op;
    const char *x;
    char *output, *activated; /* activated: where the result goes with an activation */
    int64_t num_rows, columns, num_chunks;
    float *low; /* [rows][parts * rank] */
    int *failed;
};

INLINE int64_t lora_columns(const struct lora *op) { return op->ends[op->num_parts - 1]; }

/* A row in float32, normed where there is a norm, as the reference rounds it. */
static void widen_x(const struct lora *op, const char *row, float *x) {
    int64_t k = op->in_features, i;
    vec squares = {0};
    for (i = 0; i < k; i += LANES) {
        vec numbers = load_part(row, i, k - i, op->dtype);
        vec_store(x + i, numbers);
        squares += numbers * numbers;
    }
    if (op->norm == NULL)
        return;
    float factor = 1.0f / sqrtf(vec_sum(squares) / (float)k + op->eps);
    for (i = 0; i < k; i += LANES) {
        vec weight = load_part(op->norm, i, k - i, op->dtype), number = vec_load(x + i) * factor;
        number = op->unit_offset ? number * (1.0f + weight) : vec_round(number, op->dtype) * weight;
        vec_store(x + i, vec_round(number, op->dtype));
    }
}

INLINE void dots4(const void *a, int64_t row, int64_t k, const float *x, float *low, int dtype) {
    vec sums[4] = {{0}};
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) {
        vec numbers = vec_load(x + i);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
            sums[j] += load_lanes(a, (row + j) * k + i, dtype) * numbers;
    }
    for (int j = 0; j < 4; j++) {
        low[j] = vec_sum(sums[j]);
        for (int64_t rest = i; rest < k; rest++)
            low[j] += load(a, (row + j) * k + rest, dtype) * x[rest];
    }
}

static void shrink_row(void *context, int64_t row, struct turn *turn) {
    const struct lora_call *call = context;
    const struct lora *op = call->op;
    int64_t count = op->num_parts * op->rank, k = op->in_features, slot = op->slots[row];
    (void)turn;
    if (slot < 0)
        return;
    float *x = pelton_scratch((size_t)(round_up(k, LANES) + LANES) * sizeof(float));
    if (x == NULL) {
        *call->failed = 1;
        return;
    }
    size_t item = size_of(op->dtype);
    const void *a = (const char *)op->a + (size_t)(slot * op->slot_stride) * item;
    widen_x(op, call->x + (size_t)(row * k) * item, x);
    for (int64_t j = 0; j < count; j += 4) {
        if (op->dtype == DTYPE_BF16)
            dots4(a, j, k, x, call->low + row * count + j, DTYPE_BF16);
        else
            dots4(a, j, k, x, call->low + row * count + j, DTYPE_F32);
    }
}

/* LANES columns of a row from `column` on, `count` of them: the product and what the adapter adds, rounded. */
INLINE vec added(const struct lora *op, const void *b, const float *low, const void *output, int64_t column, int64_t count,
                 int64_t columns, int dtype) {
    vec numbers = load_part(output, column, count, dtype);
    if (b == NULL)
        return numbers;
    for (int64_t j = 0; j < op->rank; j++)
        numbers += load_part(b, j * columns + column, count, dtype) * low[j];
    return vec_round(numbers, dtype);
}

INLINE void expand(const struct lora_call *call, int64_t row, int64_t first, int64_t last, int dtype) {
    const struct lora *op = call->op;
    int64_t slot = op->slots[row], columns = call->columns, part = 0;
    size_t item = size_of(dtype);
    const void *b = slot < 0 ? NULL : (const char *)op->b + (size_t)(slot * op->slot_stride) * item;
    const float *low = call->low + row * op->num_parts * op->rank;
    char *output = call->output + (size_t)(row * columns) * item;
    if (op->activation != ACTIVATION_NONE) {
        int64_t width = columns / 2;
        char *to = call->activated + (size_t)(row * width) * item;
        for (int64_t i = first; i < last; i += LANES) {
            vec gate = added(op, b, low, output, i, last - i, columns, dtype);
            vec up = added(op, b, low + op->rank, output, width + i, last - i, columns, dtype);
            store_part(to, i, vec_round(activate(gate, op->activation), dtype) * up, last - i, dtype);
        }
        return;
    }
    if (b == NULL)
        return;
    for (int64_t i = first; i < last;) {
        while (i >= op->ends[part])
            part++;
        int64_t count = least(last, op->ends[part]) - i;
        store_part(output, i, added(op, b, low + part * op->rank, output, i, count, columns, dtype), count, dtype);
        i += least(count, LANES);
    }
}

static void expand_chunk(void *context, int64_t task, struct turn *turn) {
    const struct lora_call *call = context;
    int64_t width = call->op->activation == ACTIVATION_NONE ? call->columns : call->columns / 2;
    int64_t row = task / call->num_chunks, first = task % call->num_chunks * COLUMNS, last = least(first + COLUMNS, width);
    (void)turn;
    if (call->op->dtype == DTYPE_BF16)
        expand(call, row, first, last, DTYPE_BF16);
    else
        expand(call, row, first, last, DTYPE_F32);
}

/* x [rows, in_features], output [rows, columns], written where no activation follows; else activated [rows, columns / 2] is.
   Nonzero: no memory. */
EXPORT int pelton_lora(const struct lora *op, const void *x, void *output, void *activated, int64_t num_rows) {
    int64_t columns = lora_columns(op), width = op->activation == ACTIVATION_NONE ? columns : columns / 2;
    int64_t count = op->num_parts * op->rank, num_used = 0;
    int no_memory = 0;
    float *low = pelton_shared((size_t)(num_rows * count) * sizeof(float));
    if (low == NULL)
        return 1;
    for (int64_t row = 0; row < num_rows; row++)
        num_used += op->slots[row] >= 0;
    struct lora_call call = {op, x, output, activated, num_rows, columns, (width + COLUMNS - 1) / COLUMNS, low, &no_memory};
    int64_t work = num_used * (count * op->in_features + op->rank * columns);
    struct pool_work shrink = {shrink_row, &call, num_rows, 0, work < SMALL_LORA, 0};
    struct pool_work grow = {expand_chunk, &call, num_rows * call.num_chunks, 0, work < SMALL_LORA, 0};
    pool_do(shrink);
    if (!no_memory)
        pool_do(grow);
    return no_memory;
}
