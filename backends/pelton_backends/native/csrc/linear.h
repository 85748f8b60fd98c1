/* What products are called with; `library.py` mirrors the struct. */
#ifndef PELTON_LINEAR_H
#define PELTON_LINEAR_H

#include "common.h"
#include "pool.h"

enum { ACTIVATION_NONE = -1, ACTIVATION_SILU = 0, ACTIVATION_GELU = 1, ACTIVATION_GELU_TANH = 2 };

struct linear {
    const void *weight;                 /* [out_features, in_features], or panels where is_packed (linear_avx512.c) */
    const void *bias;                   /* [out_features] or NULL */
    const void *norm, *post_norm;       /* [in_features] or NULL */
    int64_t in_features, out_features;  /* with an activation: gate rows, then up rows */
    int64_t output_stride;              /* numbers between rows of the output */
    float eps, post_eps, soft_cap;      /* soft_cap 0: none */
    int32_t unit_offset, post_unit_offset, activation, is_logits, dtype, is_packed;
};

/* Rows of one call. Row i of a product reads row rows[i] of hidden and residual, row i where rows is NULL. */
struct rows {
    const void *hidden, *residual; /* [*, in_features]; residual may be NULL */
    void *residual_out;            /* NULL, or where residual' goes: may be hidden or residual */
    const int64_t *rows;           /* only with a norm */
    int64_t num_rows;
};

enum { LINEAR_DONE = 0, LINEAR_NO_MEMORY = 1, LINEAR_ONE_ROW_ONLY = 2 };

/* Row `row` of a call: residual' to its place where that is wanted, norm(residual') to `x`. */
void pelton_prepare_row(const struct linear *op, const struct rows *in, int64_t row, void *x);

/* Up to 64 results of a row, from column `first` on: bias, activation, soft cap; `output` is the row's. Overwrites the sums. */
void pelton_finish(const struct linear *op, float *gate, float *up, int64_t first, int64_t count, void *output);

/* A weight in a form of its own: `make` writes panel `index` of it, as linear_avx512.c orders them. */
struct panel_source {
    void (*make)(const void *weight, int64_t index, bf16 *panel);
    const void *weight;
};

/* bfloat16 on AVX-512, in_features even, any number of rows; nonzero: out of memory. `source`: NULL, or in place of the op's
   weight. And residual and norm of one row. */
int pelton_linear_avx512(const struct linear *op, const struct rows *in, void *output, const struct panel_source *source);
void pelton_prepare_avx512(const struct linear *op, const struct rows *in, int64_t row, void *x);

/* Rows of a matrix [*, hidden_size], which may be in panels. */
struct embed {
    const void *weight;
    int64_t hidden_size;
    float scale; /* 1: none */
    int32_t dtype, is_packed;
};

INLINE int64_t num_columns(const struct linear *op) {
    return op->activation == ACTIVATION_NONE ? op->out_features : op->out_features / 2;
}

#endif
