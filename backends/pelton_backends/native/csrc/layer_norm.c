/* Layer norms in float32, with the sum before them. */
#include "layer_norm.h"
#include "lines.h"
#include "pool.h"

enum { TASK_ROWS = 16, SMALL_NORMS = 1 << 13 /* numbers: no more are worth a second thread */ };

struct norm_call {
    const struct layer_norm *op;
    const float *hidden;
    float *residual, *output; /* residual: NULL, or what is added, and where the sum goes */
    int64_t num_rows;
};

/* Of the numbers of a line less `less`, or of their squares. */
INLINE float mean_of(const float *line, int64_t size, float less, int is_squared) {
    vec sums[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) {
            vec numbers = vec_load(line + i + part * LANES) - less;
            sums[part] += is_squared ? numbers * numbers : numbers;
        }
    float sum = 0.0f;
    for (int64_t last = size - size % LANES; i < last; i += LANES) {
        vec numbers = vec_load(line + i) - less;
        sums[0] += is_squared ? numbers * numbers : numbers;
    }
    for (; i < size; i++)
        sum += is_squared ? (line[i] - less) * (line[i] - less) : line[i] - less;
    return (sum + vec_sum((sums[0] + sums[1]) + (sums[2] + sums[3]))) / (float)size;
}

static void norm_row(const struct norm_call *call, int64_t row) {
    const struct layer_norm *op = call->op;
    int64_t size = op->size, i = 0;
    const float *line = call->hidden + row * size;
    float *output = call->output + row * size;
    if (call->residual != NULL) {
        float *sum = call->residual + row * size;
        for (; i + LANES <= size; i += LANES)
            vec_store(sum + i, vec_load(line + i) + vec_load(sum + i));
        for (; i < size; i++)
            sum[i] += line[i];
        line = sum;
    }
    float mean = mean_of(line, size, 0.0f, 0), factor = 1.0f / sqrtf(mean_of(line, size, mean, 1) + op->eps);
    for (i = 0; i < size; i += LANES) {
        vec numbers = (load_part(line, i, size - i, DTYPE_F32) - mean) * factor * load_part(op->weight, i, size - i, DTYPE_F32);
        if (op->bias != NULL)
            numbers += load_part(op->bias, i, size - i, DTYPE_F32);
        store_part(output, i, numbers, size - i, DTYPE_F32);
    }
}

static void norm_rows(void *context, int64_t task, struct turn *turn) {
    const struct norm_call *call = context;
    (void)turn;
    for (int64_t row = task * TASK_ROWS; row < least((task + 1) * TASK_ROWS, call->num_rows); row++)
        norm_row(call, row);
}

EXPORT void pelton_layer_norm(const struct layer_norm *op, const float *hidden, float *residual, int64_t num_rows, float *output) {
    struct norm_call call = {op, hidden, residual, output, num_rows};
    pool_do((struct pool_work){.run = norm_rows, .context = &call, .num_tasks = (num_rows + TASK_ROWS - 1) / TASK_ROWS, .has_shares = 1,
                          .is_small = num_rows * op->size <= SMALL_NORMS});
}
