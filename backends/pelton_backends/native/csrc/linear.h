/* What products are called with; `library.py` mirrors the struct. */
#ifndef PELTON_LINEAR_H
#define PELTON_LINEAR_H

#include "pool.h"

enum {
    ACTIVATION_NONE = -1, ACTIVATION_SILU = 0, ACTIVATION_GELU = 1, ACTIVATION_GELU_TANH = 2, ACTIVATION_SWIGLU_OAI = 3,
    ACTIVATION_SILU_CLAMPED = 4
};

struct linear {
    const void *weight;                 /* [out_features, in_features], or panels where is_packed */
    const void *bias;                   /* [out_features] or NULL */
    const void *norm, *post_norm;       /* [in_features] or NULL */
    int64_t in_features, out_features;  /* with an activation: gate rows, then up rows */
    int64_t output_stride;              /* numbers between rows of the output */
    float eps, post_eps, soft_cap;      /* soft_cap 0: none; of an activation that clamps gate and up, to what */
    int32_t unit_offset, post_unit_offset, activation, is_logits, dtype, is_packed;
    int32_t bare_activation;            /* of results without a gate: its number and 1; 0: none */
};

/* Rows of one call. Row i of a product reads row rows[i] of hidden and residual, row i where rows is NULL. */
struct rows {
    const void *hidden, *residual; /* [*, in_features]; residual may be NULL */
    void *residual_out;            /* NULL, or where residual' goes: may be hidden or residual */
    const int64_t *rows;           /* only with a norm */
    int64_t num_rows;
};

/* A weight's panels: `width` columns of the output each, of `columns`. */
struct shape {
    int64_t k, width, columns, num_panels;
};

/* How one dtype is multiplied. Rows of the input go in blocks, rows of the weight in panels of PANEL; both hold `k` rounded up to
   `step` numbers of each row. */
struct engine {
    int64_t most_rows; /* of a block */
    int64_t dot_rows;  /* of a call: more are worth packing a plain weight */
    int64_t near_rows; /* of a call that memory decides: the core follows the stream by itself */
    int64_t fetch_far; /* bytes ahead in a weight that one block of more rows reads */
    int64_t x_bytes, weight_bytes, step; /* of a number of a packed row, of a panel */
    void (*prepare)(const struct linear *op, const struct rows *in, int64_t row, void *x); /* as `pelton_prepare_row` */
    void (*pack_panel)(const struct shape *shape, const void *weight, int64_t index, void *panel);
    void (*pack_block)(const void *rows, int64_t m, int64_t k, void *packed);
    /* A packed block times a panel -> sums [m][PANEL]; reads `fetch_bytes` at `fetch` into a cache. Each sum is added up in the
       order of k, whatever m is. */
    void (*multiply)(const void *rows, const void *panel, int64_t k, float *sums, const char *fetch, int64_t fetch_bytes,
                     int64_t m);
    /* For many rows, or NULL. A part, `part` numbers of each row of a panel, stays in the L1 cache while all blocks of a group meet it.
       `pack_part` packs numbers [start, start + count) of a block as a block of their own; `multiply_part` adds their products to the
       sums of the parts before. Sums are those of `multiply`. */
    int64_t part, tile; /* rows that a block is best cut at: those that meet a panel at once, if they are fewer */
    void (*pack_part)(const void *rows, int64_t m, int64_t k, int64_t start, int64_t count, void *packed);
    void (*multiply_part)(const void *rows, const void *panel, int64_t start, int64_t count, float *sums, int64_t m);
    /* `count` rows of a plain weight by up to `dot_rows` rows -> sums [m][PANEL]. The rows are as `spread_rows` leaves them: up to
       `k` rounded up to PANEL numbers of 4 bytes each. */
    void (*spread_rows)(const void *rows, int64_t m, int64_t k, void *spread);
    void (*dots)(const void *weight, const void *rows, int64_t k, int64_t count, float *sums, int64_t m);
    /* Up to PANEL results of `m` rows, from column `first` on: bias, activation, soft cap. With an activation, sums [PANEL / 2] of
       the gate and the up that belong to them. */
    void (*finish)(const struct linear *op, float *sums, int64_t m, int64_t first, int64_t count, char *output, size_t row_bytes);
};

/* pelton_vec_mixed: rows in bfloat16, panels in float32; only for a `panel_source`. */
extern const struct engine pelton_vec_f32, pelton_vec_bf16, pelton_vec_mixed, pelton_bf16;

/* The fastest that there is for the op. */
const struct engine *pelton_engine(const struct linear *op);

/* What `pelton_bf16` leaves to float32 arithmetic behind its sums. */
INLINE int finishes_in_float(const struct linear *op) {
    return op->soft_cap > 0.0f || op->activation > ACTIVATION_SILU || op->bare_activation;
}

/* Row `row` of a call: residual' to its place where that is wanted, norm(residual') to `x`. */
INLINE void pelton_prepare_row(const struct linear *op, const struct rows *in, int64_t row, void *x) {
    pelton_engine(op)->prepare(op, in, row, x);
}

/* A weight in a form of its own: `make` writes panel `index` of it, as the engine orders them. */
struct panel_source {
    void (*make)(const void *weight, int64_t index, void *panel);
    const void *weight;
    const struct engine *engine; /* in place of the op's */
};

/* Rows of a call -> output [num_rows, output_stride]. `source`: NULL, or in place of the op's weight. Nonzero: no memory. */
int pelton_product(const struct linear *op, const struct rows *in, void *output, const struct panel_source *source);

/* Bring a weight into panels, in its own memory. 0: done; 1: it stays as it is, for want of memory or for its shape. */
int pelton_pack(const struct linear *op, void *weight);

/* Rows of a matrix [*, hidden_size], which may be in panels. */
struct embed {
    const void *weight;
    int64_t hidden_size;
    float scale; /* 1: none */
    int32_t dtype, is_packed;
};

INLINE struct shape shape_of(const struct linear *op) {
    int is_gated = op->activation != ACTIVATION_NONE;
    int64_t width = is_gated ? PANEL / 2 : PANEL, columns = is_gated ? op->out_features / 2 : op->out_features;
    return (struct shape){op->in_features, width, columns, (columns + width - 1) / width};
}

/* The row of the weight that column `i` of panel `index` is; columns behind the last repeat it. */
INLINE int64_t weight_row(const struct shape *shape, int64_t index, int64_t i) {
    int64_t first = index * shape->width, column = first + least(i % shape->width, shape->columns - first - 1);
    return i < shape->width ? column : shape->columns + column;
}

#endif
