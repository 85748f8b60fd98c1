/* Adapters: what low-rank matrices add to the rows of a product, each row by the slot that it uses.

   First every row meets the A of its slot (rank numbers for each part of the product), then B: [rank][columns], so that a column is
   a lane. Sums are float32. A row without an adapter is left as it is; where an activation follows, all rows take it. */
#include "activate.h"

enum {
    COLUMNS = 512,           /* of a task of the second stage */
    SMALL_LORA = 1 << 15,    /* multiplications of a stage: no more are worth a second thread */
    TOGETHER = 4,            /* vectors that are summed beside each other: of columns, or of rows of A */
};

struct lora {
    const void *a, *b;    /* slot 0: [parts * rank, in_features], [rank, columns] */
    const int32_t *slots; /* of each row, -1 for none */
    const void *norm;     /* [in_features] or NULL */
    const int64_t *ends;  /* of each part: the column behind its last */
    int64_t slot_stride, in_features, rank, num_parts;
    float eps;
    int32_t unit_offset, activation, dtype;
    int32_t pair; /* 0: gate's columns, then up's; otherwise so many of gate's, as many of up's, and so on */
};

struct lora_call {
    const struct lora *op;
    const char *x;
    char *output, *activated; /* activated: where the result goes with an activation */
    int64_t num_rows, columns, num_chunks, num_shares; /* chunks of columns, shares of A's rows */
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

/* LANES rows of A from `row` on times x. */
INLINE void dots(const void *a, int64_t row, int64_t k, const float *x, float *low, int dtype) {
    vec lanes[LANES];
    int64_t full = k - k % LANES;
    for (int first = 0; first < LANES; first += TOGETHER) {
        vec sums[TOGETHER] = {{0}};
        for (int64_t i = 0; i < full; i += LANES) {
            vec numbers = vec_load(x + i);
#pragma GCC unroll 4
            for (int j = 0; j < TOGETHER; j++)
                sums[j] += load_lanes(a, (row + first + j) * k + i, dtype) * numbers;
        }
        if (full < k) {
            vec numbers = load_part(x, full, k - full, DTYPE_F32);
            for (int j = 0; j < TOGETHER; j++)
                sums[j] += load_part(a, (row + first + j) * k + full, k - full, dtype) * numbers;
        }
        for (int j = 0; j < TOGETHER; j++)
            lanes[first + j] = sums[j];
    }
    vec_store(low, sum_each(lanes));
}

/* A share of A's rows times a row of x. */
static void shrink_share(void *context, int64_t task, struct turn *turn) {
    const struct lora_call *call = context;
    const struct lora *op = call->op;
    int64_t row = task / call->num_shares, share = task % call->num_shares;
    int64_t count = op->num_parts * op->rank, k = op->in_features, slot = op->slots[row], groups = count / LANES;
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
    float *low = call->low + row * count;
    widen_x(op, call->x + (size_t)(row * k) * item, x);
    int64_t last = first_piece(groups, call->num_shares, share + 1) * LANES;
    for (int64_t j = first_piece(groups, call->num_shares, share) * LANES; j < last; j += LANES) {
        if (op->dtype == DTYPE_BF16)
            dots(a, j, k, x, low + j, DTYPE_BF16);
        else
            dots(a, j, k, x, low + j, DTYPE_F32);
    }
}

/* NUM vectors of columns: to each what the adapter adds. */
INLINE void add_columns(const struct lora *op, const void *b, const float *low, int64_t column, int64_t columns, vec *sums,
                        int num, int dtype) {
    for (int64_t j = 0; j < op->rank; j++) {
#pragma GCC unroll 4
        for (int v = 0; v < num; v++)
            sums[v] += load_lanes(b, j * columns + column + v * LANES, dtype) * low[j];
    }
}

/* Where the product has column `column` of the gate, of `width`; of up. */
INLINE int64_t gate_place(const struct lora *op, int64_t column) {
    return op->pair == 0 ? column : column / op->pair * (2 * op->pair) + column % op->pair;
}

INLINE int64_t up_place(const struct lora *op, int64_t column, int64_t width) {
    return op->pair == 0 ? width + column : gate_place(op, column) + op->pair;
}

/* TOGETHER full vectors of a row's product, and what the adapter adds, rounded. */
INLINE void added_columns(const struct lora *op, const void *b, const float *low, int64_t column, int64_t columns, vec *sums,
                          int dtype) {
    if (b == NULL)
        return;
    add_columns(op, b, low, column, columns, sums, TOGETHER, dtype);
#pragma GCC unroll 4
    for (int v = 0; v < TOGETHER; v++)
        sums[v] = vec_round(sums[v], dtype);
}

/* LANES columns of a row from `column` on, `count` of them: the product, which lies at `place`, and what the adapter adds, rounded. */
INLINE vec added(const struct lora *op, const void *b, const float *low, const void *output, int64_t place, int64_t column,
                 int64_t count, int64_t columns, int dtype) {
    vec numbers = load_part(output, place, count, dtype);
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
        int64_t i = first;
        for (; i + TOGETHER * LANES <= last; i += TOGETHER * LANES) {
            vec gate[TOGETHER], up[TOGETHER];
            for (int v = 0; v < TOGETHER; v++) {
                gate[v] = load_lanes(output, gate_place(op, i + v * LANES), dtype);
                up[v] = load_lanes(output, up_place(op, i + v * LANES, width), dtype);
            }
            added_columns(op, b, low, i, columns, gate, dtype);
            added_columns(op, b, low + op->rank, width + i, columns, up, dtype);
#pragma GCC unroll 4
            for (int v = 0; v < TOGETHER; v++)
                store_lanes(to, i + v * LANES, vec_round(activate(gate[v], op->activation), dtype) * up[v], dtype);
        }
        for (; i < last; i += LANES) {
            vec gate = added(op, b, low, output, gate_place(op, i), i, last - i, columns, dtype);
            vec up = added(op, b, low + op->rank, output, up_place(op, i, width), width + i, last - i, columns, dtype);
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
        for (; count >= TOGETHER * LANES; i += TOGETHER * LANES, count -= TOGETHER * LANES) {
            vec sums[TOGETHER];
            for (int v = 0; v < TOGETHER; v++)
                sums[v] = load_lanes(output, i + v * LANES, dtype);
            added_columns(op, b, low + part * op->rank, i, columns, sums, dtype);
#pragma GCC unroll 4
            for (int v = 0; v < TOGETHER; v++)
                store_lanes(output, i + v * LANES, sums[v], dtype);
        }
        if (count == 0)
            continue;
        store_part(output, i, added(op, b, low + part * op->rank, output, i, i, count, columns, dtype), count, dtype);
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
    int64_t threads = pool_num_threads(), num_chunks = (width + COLUMNS - 1) / COLUMNS;
    struct lora_call call = {
        op, x, output, activated, num_rows, columns, num_chunks, num_rows < 2 * threads ? threads : 1, low, &no_memory,
    };
    int64_t shrunk = num_used * count * op->in_features, grown = num_used * op->rank * columns;
    struct pool_work shrink = {shrink_share, &call, num_rows * call.num_shares, 0, shrunk < SMALL_LORA, 0};
    struct pool_work grow = {expand_chunk, &call, num_rows * num_chunks, 0, grown < SMALL_LORA, 0};
    pool_do(shrink);
    if (!no_memory)
        pool_do(grow);
    return no_memory;
}
