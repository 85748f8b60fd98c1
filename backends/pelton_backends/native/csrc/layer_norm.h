/* What layer norms are called with; `library.py` mirrors the struct. */
#ifndef PELTON_LAYER_NORM_H
#define PELTON_LAYER_NORM_H

#include "common.h"

struct layer_norm {
    const float *weight, *bias; /* [size]; bias may be NULL */
    int64_t size;
    float eps;
};

/* hidden [num_rows, size] -> output; with a residual of their sum, which takes the residual's place. output may be hidden or residual. */
void pelton_layer_norm(const struct layer_norm *op, const float *hidden, float *residual, int64_t num_rows, float *output);

#endif
