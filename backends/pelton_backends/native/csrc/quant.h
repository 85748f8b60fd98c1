/* What products with packed blocks are called with; `quant.py` mirrors the structs.

   A weight [rows, in] in blocks of 32 numbers lies in panels of 16 rows. A panel is in / 32 records; a record holds the
   same block of its 16 rows, interleaved so that four bytes of every row fill one vector of 64:
   - quants: Q8_0 [8][16][4] int8; Q4_0 and Q4_1 [4][16][4] bytes, the low halves numbers 0..15 of a block, the high ones 16..31
   - scales [16] float16, and for Q4_1 minima [16] float16.
   These are the bytes of GGUF's blocks, no more and no fewer; rows behind the last are zeros. */
#ifndef PELTON_QUANT_H
#define PELTON_QUANT_H

#include "linear.h"

enum { QUANT_BLOCK = 32, QUANT_ROWS = 16, MOST_PARTS = 3, QUANT_TILE = 8, QUANT_SPAN = 2 * QUANT_ROWS, QUANT_MANY_ROWS = 9 };

/* Q8_0: scale * int8. Q4_0: scale * (half - 8). Q4_1: scale * half + minimum. */
enum { QUANT_Q8_0 = 0, QUANT_Q4_0 = 1, QUANT_Q4_1 = 2 };

struct quant_part {
    const uint8_t *panels;
    int64_t num_rows;
    int32_t kind;
};

/* Parts lie below each other; with an activation there are two, gate and up. `op.weight` is not read. */
struct quant {
    struct linear op;
    struct quant_part parts[MOST_PARTS];
    int64_t num_parts;
};

/* Rows of an embedding. */
struct quant_embed {
    struct quant_part part;
    int64_t hidden_size;
    float scale; /* 1: none */
    int32_t dtype;
};

INLINE int64_t quant_bytes(int kind) { return kind == QUANT_Q8_0 ? 512 : 256; }
INLINE int64_t record_bytes(int kind) { return quant_bytes(kind) + (kind == QUANT_Q4_1 ? 64 : 32); }

/* ---- parts of a product, for experts (moe.c) ---- */

/* Rows of inputs: high and low parts [n, in], and for each block of them scale / 254 and, of q = 254 high + low,
   scale / 254 * sum(q) and -8 * sum(q). */
struct inputs {
    int8_t *high, *low;
    int16_t *words; /* q, where products are of 16 bits */
    float *scale, *scaled_sum;
    int32_t *minus_8_sums;
    int64_t num_blocks;
};

/* Memory for rows of inputs, and their places in it. */
int64_t pelton_quant_input_bytes(int64_t num_rows, int64_t num_blocks);
struct inputs pelton_quant_inputs(char *memory, int64_t num_rows, int64_t num_blocks);

/* Round numbers [in] to row `row`. */
void pelton_quant_round(const void *numbers, int dtype, int64_t row, const struct inputs *x);

/* Sums [m][QUANT_SPAN] of rows [row, row + m), at most QUANT_TILE, by span `span`: 32 rows of a part, or with an activation 16 of the
   gate and the 16 of up that belong to them. */
void pelton_quant_sums(const struct quant *op, const struct inputs *x, int64_t span, int64_t row, int64_t m, float *sums);

/* From QUANT_MANY_ROWS rows on it is faster to dequantize spans to panels of this engine; NULL: it is not. */
const struct engine *pelton_quant_engine(const struct linear *op);

/* Span `index` of a `struct quant`, dequantized to a panel of that engine. */
void pelton_quant_panel(const void *weight, int64_t index, void *panel);

#endif
