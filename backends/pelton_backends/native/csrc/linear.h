/* What products are called with; `library.py` mirrors the struct. */
#ifndef PELTON_LINEAR_H
#define PELTON_LINEAR_H

#include "common.h"

#ifdef _OPENMP
#include <omp.h>
#endif

enum { ACTIVATION_NONE = -1, ACTIVATION_SILU = 0, ACTIVATION_GELU = 1, ACTIVATION_GELU_TANH = 2 };

struct linear {
    const void *weight;                 /* [out_features, in_features] */
    const void *bias;                   /* [out_features] or NULL */
    const void *norm, *post_norm;       /* [in_features] or NULL */
    int64_t in_features, out_features;  /* with an activation: gate rows, then up rows */
    int64_t output_stride;              /* numbers between rows of the output */
    float eps, post_eps, soft_cap;      /* soft_cap 0: none */
    int32_t unit_offset, post_unit_offset, activation, is_logits, dtype;
};

#endif
