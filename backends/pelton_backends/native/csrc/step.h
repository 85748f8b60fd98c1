/* What the ops around a step's forward pass are called with; `step.py` mirrors the structs. */
#ifndef PELTON_STEP_H
#define PELTON_STEP_H

#include "common.h"

/* The batch by slot. */
struct batch {
    int32_t *token_ids;            /* [slots, max_model_len + 1], rows token_stride apart */
    int64_t *num_computed_tokens;
    int64_t token_stride, max_model_len, padding_slot;
};

/* A KV group: where its block tables and slots are read and written. A block has `ratio` kernel blocks. */
struct group {
    const int32_t *table;
    int64_t table_stride;
    int32_t *block_table;
    int64_t block_table_stride;
    int64_t *slot_mapping;
    int64_t block_size, ratio;
};

struct inputs {
    const struct batch *batch;
    int64_t *input_ids, *positions;
    int32_t *query_start, *seq_lens; /* query_start[0] is 0 */
    const struct group *groups;
    int64_t num_groups;
};

#endif
