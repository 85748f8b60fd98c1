/* What a layer of experts is called with; `moe.py` mirrors the struct. */
#ifndef PELTON_MOE_H
#define PELTON_MOE_H

#include "quant.h"

struct moe {
    struct linear gate_up, down;      /* this rank's first expert's: `weight_stride` and `bias_stride` bytes on are the next one's */
    int64_t weight_stride[2], bias_stride[2];
    struct quant_part parts[3];       /* the same of gate, up and down in packed blocks, in place of both weights; panels NULL: none */
    int64_t part_stride[3];
    const void *router, *router_bias; /* [experts, hidden], [experts] or NULL */
    const float *correction;          /* [experts] or NULL */
    int64_t *load;                    /* [experts] or NULL: added to */
    int64_t num_experts, top_k, num_groups, top_groups;
    int64_t first_expert, num_held;   /* places whose matrices are here: of experts without copies their numbers */
    const int32_t *copies;            /* [experts, 1 + most_copies] or NULL: how many places an expert has, and which */
    int64_t most_copies;
    float scale;
    int32_t router_dtype, bias_dtype, is_sigmoid, is_renormalized, is_top2, scales_input;
};

#endif
