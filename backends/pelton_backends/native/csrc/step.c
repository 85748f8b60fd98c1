/* Before a step's forward pass its inputs, behind it the best token of every row. */
#include "pool.h"
#include "step.h"

/* ---- inputs ---- */

static void write_tokens(const struct inputs *op, int64_t slot, int64_t context, int64_t start, int64_t count) {
    const struct batch *batch = op->batch;
    for (int64_t i = 0; i < count; i++) {
        int64_t position = context + i;
        op->positions[start + i] = position;
        op->input_ids[start + i] = batch->token_ids[slot * batch->token_stride + least(position, batch->max_model_len)];
    }
    for (int64_t index = 0; index < op->num_groups; index++) {
        const struct group *group = op->groups + index;
        const int32_t *table = group->table + slot * group->table_stride;
        for (int64_t i = 0; i < count; i++) {
            int64_t position = context + i;
            group->slot_mapping[start + i] = table[position / group->block_size] * group->block_size + position % group->block_size;
        }
    }
}

/* The kernel blocks that hold a row's tokens; a row without any points at block 0. */
static void write_tables(const struct inputs *op, int64_t slot, int64_t row, int64_t length) {
    for (int64_t index = 0; index < op->num_groups; index++) {
        const struct group *group = op->groups + index;
        const int32_t *table = group->table + slot * group->table_stride;
        int32_t *to = group->block_table + row * group->block_table_stride;
        for (int64_t block = 0; block * group->block_size < most(length, 1); block++)
            for (int64_t part = 0; part < group->ratio; part++)
                to[block * group->ratio + part] = length > 0 ? (int32_t)(table[block] * group->ratio + part) : 0;
    }
}

/* slots, scheduled [num_rows]; rows with nothing scheduled and tokens behind the last row are padding. */
EXPORT void pelton_prepare_inputs(const struct inputs *op, const int64_t *slots, const int64_t *scheduled, int64_t num_rows,
                                  int64_t num_tokens) {
    int64_t start = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t context = op->batch->num_computed_tokens[slots[row]], count = scheduled[row];
        int64_t length = count > 0 ? context + count : 0;
        write_tokens(op, slots[row], context, start, count);
        write_tables(op, slots[row], row, length);
        start += count;
        op->seq_lens[row] = (int32_t)length;
        op->query_start[row + 1] = (int32_t)start;
    }
    for (int64_t token = start; token < num_tokens; token++) {
        op->positions[token] = op->input_ids[token] = 0;
        for (int64_t index = 0; index < op->num_groups; index++)
            op->groups[index].slot_mapping[token] = -1;
    }
}

/* ---- the best token ---- */

/* One part of a row. */
struct best {
    float value;
    int32_t place, has_nan;
};

static struct best find_best(const float *numbers, int64_t first, int64_t last) {
    float best = -INFINITY;
    int32_t num_nan = 0;
#pragma omp simd reduction(max : best) reduction(+ : num_nan)
    for (int64_t i = first; i < last; i++) {
        best = numbers[i] > best ? numbers[i] : best;
        num_nan += numbers[i] != numbers[i];
    }
    int64_t place = first;
    while (place < last && numbers[place] != best)
        place++;
    return (struct best){best, (int32_t)(place < last ? place : first), num_nan > 0};
}

enum { PARTS = 8, NOT_FINITE = 1 };

static void take_token(const struct batch *batch, int64_t slot, struct best best, int32_t *result) {
    result[0] = result[1] = 0;
    if (slot == batch->padding_slot)
        return;
    int64_t position = batch->num_computed_tokens[slot] + 1;
    result[0] = best.place, result[1] = best.has_nan || isinf(best.value) ? NOT_FINITE : 0;
    batch->token_ids[slot * batch->token_stride + least(position, batch->max_model_len)] = best.place;
    batch->num_computed_tokens[slot] = position;
}

struct best_call {
    const float *logits;
    int64_t stride, vocab_size, parts, width;
    struct best *found; /* [num_rows, parts] */
};

static void run_best(void *context, int64_t index, struct turn *turn) {
    const struct best_call *call = context;
    int64_t first = least(index % call->parts * call->width, call->vocab_size), last = least(first + call->width, call->vocab_size);
    struct best best = find_best(call->logits + index / call->parts * call->stride, first, last);
    (void)turn;
    call->found[index] = best;
}

/* logits: num_rows rows, `stride` numbers apart, of which the first vocab_size count; slots [num_rows]; result [num_rows, 2]:
   token and error code. The first of equal tokens wins. Tokens are put into the batch. */
EXPORT int pelton_take_best(const struct batch *batch, const float *logits, int64_t stride, int64_t vocab_size, const int64_t *slots,
                            int64_t num_rows, int32_t *result) {
    int64_t parts = num_rows < PARTS ? PARTS : 1, width = (vocab_size + parts - 1) / parts;
    struct best *found = pelton_shared((size_t)(num_rows * parts) * sizeof *found);
    if (found == NULL)
        return num_rows > 0;
    struct best_call call = {logits, stride, vocab_size, parts, width, found};
    pool_do((struct pool_work){.run = run_best, .context = &call, .num_tasks = num_rows * parts, .is_small = num_rows * vocab_size <= 1 << 14});
    for (int64_t row = 0; row < num_rows; row++) {
        struct best best = found[row * parts];
        for (int64_t part = 1; part < parts; part++) {
            struct best other = found[row * parts + part];
            int32_t has_nan = best.has_nan | other.has_nan;
            best = other.value > best.value ? other : best;
            best.has_nan = has_nan;
        }
        take_token(batch, slots[row], best, result + 2 * row);
    }
    return 0;
}
