/* Products in float32 arithmetic over the vectors of vec.h, weights in bfloat16 or float32: what every instruction set can.

   A panel is PANEL rows of a weight: [in / 2][PANEL][2] bfloat16, as linear_bf16.c has it, so that widening a number is one
   operation and no shuffle; or [in][PANEL] float32. A block of rows is [in][rows of the block] float32: each of its numbers meets
   as many vectors of the panel as leave all sums in registers. */
#include "activate.h"

enum {
    PANEL_VECS = PANEL / LANES,
    LINE_BYTES = 4 * PANEL,                     /* of a panel: a pair of bfloat16 or a float32 for each of its columns */
    MOST_ROWS = NUM_REGISTERS * LANES == 512 ? 12 : 6,
    MOST_SUMS = NUM_REGISTERS == 32 ? 24 : 12,  /* registers; the others have weights, a factor and a mask */
    MOST_WIDE_SUMS = NUM_REGISTERS == 32 ? 24 : 8,
    CHUNK = 128,                                /* lines of a panel that stay in the L1 cache while their vectors take turns */
    TILE_ROWS = NUM_REGISTERS == 16 && PANEL_VECS == 4 ? 3 : MOST_ROWS, /* that whole lines meet, where a part is in the L1 cache */
    DOT_ROWS = 4,
};

/* Vectors of a panel that M rows meet at once. */
#define VECS_OF(M) ((M)*PANEL_VECS <= MOST_WIDE_SUMS ? PANEL_VECS : (M)*4 <= MOST_WIDE_SUMS && PANEL_VECS > 4 ? 4 : 2)

/* Where bfloat16 has products of its own (linear_bf16.c), it comes here with an odd number of inputs only: panels are made float32 as
   they are read, and half of this file need not be compiled. */
#define HAS_BF16_PANELS (PELTON_ISA < ISA_AVX512_BF16)

/* The sums stay in their registers: compilers that mix the two halves of a step run out of them. */
#if defined(__x86_64__)
#define KEEP(REGISTER) __asm__("" : "+x"(REGISTER))
#elif defined(__aarch64__)
#define KEEP(REGISTER) __asm__("" : "+w"(REGISTER))
#else
#define KEEP(REGISTER) (void)0
#endif

/* ---- a block of rows times a panel ---- */

INLINE void add_products(const float *factors, const vec *weights, vec sums[][PANEL_VECS], int M, int V) {
#pragma GCC unroll 12
    for (int row = 0; row < M; row++) {
        vec factor = vec_all(factors[row]);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++)
            sums[row][v] += weights[v] * factor;
#pragma GCC unroll 8
        for (int v = 0; v < V; v++)
            KEEP(sums[row][v]);
    }
}

/* Rows times V vectors of one line of a panel, which is one step or (bfloat16) two. */
INLINE void add_line(const float *factors, const char *line, vec sums[][PANEL_VECS], int M, int V, int dtype) {
    vec weights[PANEL_VECS];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++)
        weights[v] = dtype == DTYPE_BF16 ? vec_first(vec_load_bits(line + v * VEC_BYTES)) : vec_load(line + v * VEC_BYTES);
    add_products(factors, weights, sums, M, V);
    if (dtype != DTYPE_BF16)
        return;
#pragma GCC unroll 8
    for (int v = 0; v < V; v++)
        weights[v] = vec_second(vec_load_bits(line + v * VEC_BYTES));
    add_products(factors + M, weights, sums, M, V);
}

/* Rows [k][M] times a panel -> sums [M][PANEL]. Each sum is added up in the order of k, however many rows there are. Reads
   `fetch_bytes` bytes at `fetch` into the L2 cache on the way. */
INLINE void multiply_block(const float *rows, const char *panel, int64_t k, float *result, const char *fetch,
                           int64_t fetch_bytes, int M, int dtype) {
    int V = VECS_OF(M), width = dtype == DTYPE_BF16 ? 2 * M : M;
    int64_t lines = dtype == DTYPE_BF16 ? k / 2 : k, turns = lines * (PANEL_VECS / V);
    int64_t step = (fetch_bytes + turns - 1) / most(turns, 1);
    for (int64_t start = 0; start < most(lines, 1); start += CHUNK) {
        int64_t count = least(CHUNK, lines - start);
#pragma GCC unroll 1
        for (int first = 0; first < PANEL_VECS; first += V) {
            const float *factors = rows + start * width;
            const char *line = panel + start * LINE_BYTES + first * VEC_BYTES;
            float *to = result + first * LANES;
            vec sums[MOST_ROWS][PANEL_VECS];
#pragma GCC unroll 12
            for (int row = 0; row < M; row++)
#pragma GCC unroll 8
                for (int v = 0; v < V; v++)
                    sums[row][v] = start == 0 ? vec_all(0.0f) : vec_load(to + row * PANEL + v * LANES);
            for (int64_t i = 0; i < count; i++) {
#pragma GCC unroll 2
                for (int byte = 0; byte < V * VEC_BYTES; byte += 64)
                    __builtin_prefetch(fetch + byte, 0, 2);
                add_line(factors, line, sums, M, V, dtype);
                factors += width, line += LINE_BYTES, fetch += step;
            }
#pragma GCC unroll 12
            for (int row = 0; row < M; row++)
#pragma GCC unroll 8
                for (int v = 0; v < V; v++)
                    vec_store(to + row * PANEL + v * LANES, sums[row][v]);
        }
    }
}

#define ROWS(M, DTYPE)                                                          \
    case M:                                                                     \
        multiply_block(rows, panel, k, sums, fetch, fetch_bytes, M, DTYPE);     \
        break;
#define EACH_ROWS(DTYPE) ROWS(1, DTYPE) ROWS(2, DTYPE) ROWS(3, DTYPE) ROWS(4, DTYPE) ROWS(5, DTYPE) ROWS(6, DTYPE)
#define EACH_MORE_ROWS(DTYPE) ROWS(7, DTYPE) ROWS(8, DTYPE) ROWS(9, DTYPE) ROWS(10, DTYPE) ROWS(11, DTYPE) ROWS(12, DTYPE)
#if VEC_BYTES < 64
#undef EACH_MORE_ROWS
#define EACH_MORE_ROWS(DTYPE)
#endif

/* The same of tiles, whose sums leave a register for each of a line's vectors and for a factor. */
#if VEC_BYTES == 32
#define VECS_OF_TILE(M) PANEL_VECS
#define EACH_TILE TILE(1) TILE(2) TILE(3)
#elif VEC_BYTES == 64
#define VECS_OF_TILE(M) PANEL_VECS
#define EACH_TILE                                                                       \
    TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10)    \
    TILE(11) TILE(12)
#else
#define VECS_OF_TILE(M) VECS_OF(M)
#define EACH_TILE TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#endif

#if HAS_BF16_PANELS
static void multiply_bf16(const void *rows, const void *panel, int64_t k, float *sums, const char *fetch, int64_t fetch_bytes,
                          int64_t m) {
    switch (m) { EACH_ROWS(DTYPE_BF16) EACH_MORE_ROWS(DTYPE_BF16) }
}
#endif

static void multiply_f32(const void *rows, const void *panel, int64_t k, float *sums, const char *fetch, int64_t fetch_bytes,
                         int64_t m) {
    switch (m) { EACH_ROWS(DTYPE_F32) EACH_MORE_ROWS(DTYPE_F32) }
}

/* M rows of a block of `stride` times `count` lines of a panel, added to sums [M][PANEL]. */
INLINE void add_lines(const float *rows, int64_t stride, const char *lines, int64_t count, float *result, int is_first, int M) {
    int V = VECS_OF_TILE(M);
#pragma GCC unroll 1
    for (int first = 0; first < PANEL_VECS; first += V) {
        const float *factors = rows;
        const char *line = lines + first * VEC_BYTES;
        float *to = result + first * LANES;
        vec sums[MOST_ROWS][PANEL_VECS];
#pragma GCC unroll 12
        for (int row = 0; row < M; row++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++)
                sums[row][v] = is_first ? vec_all(0.0f) : vec_load(to + row * PANEL + v * LANES);
        for (int64_t i = 0; i < count; i++) {
            add_line(factors, line, sums, M, V, DTYPE_F32);
            factors += stride, line += LINE_BYTES;
        }
#pragma GCC unroll 12
        for (int row = 0; row < M; row++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++)
                vec_store(to + row * PANEL + v * LANES, sums[row][v]);
    }
}

#define TILE(M)                                                                                 \
    case M:                                                                                     \
        add_lines(rows, m, lines, count, sums, start == 0, M);                                  \
        break;

static void multiply_part_f32(const void *block, const void *panel, int64_t start, int64_t count, float *sums, int64_t m) {
    const float *rows = block;
    const char *lines = (const char *)panel + start * LINE_BYTES;
    for (int64_t left = m; left > 0; left -= TILE_ROWS, rows += TILE_ROWS, sums += TILE_ROWS * PANEL)
        switch (least(left, TILE_ROWS)) { EACH_TILE }
}

/* ---- panels of a plain weight ---- */

#if HAS_BF16_PANELS
static void pack_panel_bf16(const struct shape *shape, const void *weight, int64_t index, void *panel) {
    for (int64_t column = 0; column < PANEL; column++) {
        const bf16 *row = (const bf16 *)weight + weight_row(shape, index, column) * shape->k;
        bf16 *to = (bf16 *)panel + 2 * column;
        for (int64_t i = 0; i < shape->k / 2; i++)
            memcpy(to + i * 2 * PANEL, row + 2 * i, 2 * sizeof *row);
        if (shape->k % 2) {
            to[(shape->k - 1) * PANEL] = row[shape->k - 1];
            to[(shape->k - 1) * PANEL + 1] = 0;
        }
    }
}

#endif

/* A panel in float32 of either dtype. */
INLINE void pack_wide_panel(const struct shape *shape, const void *weight, int64_t index, void *panel, int dtype) {
    for (int64_t column = 0; column < PANEL; column++) {
        int64_t row = weight_row(shape, index, column) * shape->k;
        for (int64_t i = 0; i < shape->k; i++)
            ((float *)panel)[i * PANEL + column] = load(weight, row + i, dtype);
    }
}

static void pack_panel_f32(const struct shape *shape, const void *weight, int64_t index, void *panel) {
    pack_wide_panel(shape, weight, index, panel, DTYPE_F32);
}

#if !HAS_BF16_PANELS
static void pack_panel_wide(const struct shape *shape, const void *weight, int64_t index, void *panel) {
    pack_wide_panel(shape, weight, index, panel, DTYPE_BF16);
}
#endif

/* ---- rows ---- */

/* `k` numbers of `m` rows, `stride` numbers apart -> [k][m] float32. Vectors are written over each other's ends, which the next ones
   repair. */
INLINE void pack_block(const void *rows, int64_t m, int64_t k, int64_t stride, float *to, int dtype) {
    enum { GROUPS = (MOST_ROWS + LANES - 1) / LANES };
    int64_t i = 0, step = (GROUPS * LANES + m - 1) / m; /* so many numbers of each row have room for what is written behind */
    if (m == 1) {
        for (; i < k; i += LANES)
            store_part(to, i, load_part(rows, i, k - i, dtype), k - i, DTYPE_F32);
        return;
    }
    for (; i + LANES + step <= k; i += LANES) {
        vec numbers[GROUPS][LANES];
        int64_t groups = (m + LANES - 1) / LANES;
        for (int64_t group = 0; group < groups; group++) {
#pragma GCC unroll 16
            for (int row = 0; row < LANES; row++)
                numbers[group][row] = load_lanes(rows, least(group * LANES + row, m - 1) * stride + i, dtype);
            vec_transpose(numbers[group]);
        }
        for (int64_t number = 0; number < LANES; number++)
            for (int64_t group = 0; group < groups; group++)
                vec_store(to + (i + number) * m + group * LANES, numbers[group][number]);
    }
    for (; i < k; i++)
        for (int64_t row = 0; row < m; row++)
            to[i * m + row] = load(rows, row * stride + i, dtype);
}

static void pack_block_bf16(const void *rows, int64_t m, int64_t k, void *to) {
    pack_block(rows, m, k, k, to, DTYPE_BF16);
    if (k % 2 && HAS_BF16_PANELS)
        memset((float *)to + k * m, 0, (size_t)m * sizeof(float));
}

static void pack_block_f32(const void *rows, int64_t m, int64_t k, void *to) { pack_block(rows, m, k, k, to, DTYPE_F32); }

static void pack_part_f32(const void *rows, int64_t m, int64_t k, int64_t start, int64_t count, void *to) {
    pack_block((const float *)rows + start, m, count, k, to, DTYPE_F32);
}

/* ---- few rows times a plain weight ---- */

INLINE int64_t padded(int64_t k, int dtype) { return round_up(k, dtype == DTYPE_BF16 ? 2 * LANES : LANES); }

/* Rows for dots [m][padded(k)] float32, zeros behind the last number: of LANES pairs of bfloat16 first the first ones. */
INLINE void spread_rows(const void *rows, int64_t m, int64_t k, float *to, int dtype) {
    int64_t stride = padded(k, dtype);
    for (int64_t row = 0; row < m; row++)
        for (int64_t i = 0; i < stride; i++) {
            int64_t from = dtype == DTYPE_BF16 ? i / (2 * LANES) * 2 * LANES + i % LANES * 2 + i / LANES % 2 : i;
            to[row * stride + i] = from < k ? load(rows, row * k + from, dtype) : 0.0f;
        }
}

#if HAS_BF16_PANELS
static void spread_rows_bf16(const void *rows, int64_t m, int64_t k, void *to) { spread_rows(rows, m, k, to, DTYPE_BF16); }
#endif
static void spread_rows_f32(const void *rows, int64_t m, int64_t k, void *to) { spread_rows(rows, m, k, to, DTYPE_F32); }

/* Vectors of weights from number `i` on, two of bfloat16. Behind the last number are zeros. */
INLINE void load_weights(const char *row, int64_t i, int64_t k, vec weights[2], int dtype) {
    int64_t bytes = (k - i) * (int64_t)size_of(dtype);
    char rest[VEC_BYTES] = {0};
    const char *from = row + i * (int64_t)size_of(dtype);
    if (bytes < VEC_BYTES)
        from = memcpy(rest, from, (size_t)bytes);
    if (dtype == DTYPE_BF16) {
        weights[0] = vec_first(vec_load_bits(from));
        weights[1] = vec_second(vec_load_bits(from));
    } else {
        weights[0] = vec_load(from);
    }
}

/* Dot products of M rows with `count` rows of a weight, read one after the other -> sums [M][PANEL]. */
INLINE void dots(const char *weight, const float *rows, int64_t k, int64_t count, float *result, int M, int dtype) {
    int64_t stride = padded(k, dtype), step = dtype == DTYPE_BF16 ? 2 * LANES : LANES;
    for (int64_t column = 0; column < count; column++) {
        vec sums[DOT_ROWS][2], weights[2];
#pragma GCC unroll 4
        for (int row = 0; row < M; row++)
            sums[row][0] = sums[row][1] = vec_all(0.0f);
        for (int64_t i = 0; i < k; i += step) {
            const char *line = weight + column * k * (int64_t)size_of(dtype);
            load_weights(line, i, k, weights, dtype);
            __builtin_prefetch(line + i * (int64_t)size_of(dtype) + 1024, 0, 3);
#pragma GCC unroll 4
            for (int row = 0; row < M; row++) {
                sums[row][0] += weights[0] * vec_load(rows + row * stride + i);
                if (dtype == DTYPE_BF16)
                    sums[row][1] += weights[1] * vec_load(rows + row * stride + i + LANES);
            }
        }
#pragma GCC unroll 4
        for (int row = 0; row < M; row++)
            result[row * PANEL + column] = vec_sum(sums[row][0] + sums[row][1]);
    }
}

#define DOTS(M, DTYPE)                                          \
    case M:                                                     \
        dots(weight, rows, k, count, sums, M, DTYPE);           \
        break;

#if HAS_BF16_PANELS
static void dots_bf16(const void *weight, const void *rows, int64_t k, int64_t count, float *sums, int64_t m) {
    switch (m) { DOTS(1, DTYPE_BF16) DOTS(2, DTYPE_BF16) DOTS(3, DTYPE_BF16) DOTS(4, DTYPE_BF16) }
}
#endif

static void dots_f32(const void *weight, const void *rows, int64_t k, int64_t count, float *sums, int64_t m) {
    switch (m) { DOTS(1, DTYPE_F32) DOTS(2, DTYPE_F32) DOTS(3, DTYPE_F32) DOTS(4, DTYPE_F32) }
}

/* ---- residual and norms ---- */

/* Square root of the mean square, inverted. */
INLINE float norm_factor(const float *line, int64_t size, float eps) {
    vec sums[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) {
            vec numbers = vec_load(line + i + part * LANES);
            sums[part] += numbers * numbers;
        }
    for (; i < size; i += LANES) {
        vec numbers = load_part(line, i, size - i, DTYPE_F32);
        sums[0] += numbers * numbers;
    }
    return 1.0f / sqrtf(vec_sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / (float)size + eps);
}

INLINE vec normed(vec numbers, float factor, vec weight, int unit_offset, int dtype) {
    numbers = numbers * factor;
    return vec_round(unit_offset ? numbers * (1.0f + weight) : vec_round(numbers, dtype) * weight, dtype);
}

INLINE const void *row_at(const void *numbers, int64_t first, int dtype) {
    return (const char *)numbers + (size_t)first * size_of(dtype);
}

INLINE void prepare_row(const struct linear *op, const struct rows *in, int64_t row, void *x, int dtype) {
    int64_t size = op->in_features, from = (in->rows == NULL ? row : in->rows[row]) * size;
    const void *hidden = row_at(in->hidden, from, dtype);
    const void *residual = in->residual == NULL ? NULL : row_at(in->residual, from, dtype);
    void *residual_out = in->residual_out == NULL ? NULL : (void *)row_at(in->residual_out, row * size, dtype);
    float line[size], factor = 0.0f;
    for (int64_t i = 0; i < size; i += LANES)
        store_part(line, i, load_part(hidden, i, size - i, dtype), size - i, DTYPE_F32);
    if (op->post_norm != NULL)
        factor = norm_factor(line, size, op->post_eps);
    for (int64_t i = 0; i < size; i += LANES) {
        vec numbers = load_part(line, i, size - i, DTYPE_F32);
        if (op->post_norm != NULL)
            numbers = normed(numbers, factor, load_part(op->post_norm, i, size - i, dtype), op->post_unit_offset, dtype);
        if (residual != NULL)
            numbers = vec_round(numbers + load_part(residual, i, size - i, dtype), dtype);
        if (residual_out != NULL)
            store_part(residual_out, i, numbers, size - i, dtype);
        store_part(line, i, numbers, size - i, DTYPE_F32);
    }
    factor = norm_factor(line, size, op->eps);
    for (int64_t i = 0; i < size; i += LANES) {
        vec numbers = load_part(line, i, size - i, DTYPE_F32), weight = load_part(op->norm, i, size - i, dtype);
        store_part(x, i, normed(numbers, factor, weight, op->unit_offset, dtype), size - i, dtype);
    }
}

static void prepare_bf16(const struct linear *op, const struct rows *in, int64_t row, void *x) {
    prepare_row(op, in, row, x, DTYPE_BF16);
}

static void prepare_f32(const struct linear *op, const struct rows *in, int64_t row, void *x) {
    prepare_row(op, in, row, x, DTYPE_F32);
}

/* ---- what follows a product ---- */

static __attribute__((noinline)) vec capped(vec x, float soft_cap) {
    for (int i = 0; i < LANES; i++)
        x[i] = soft_cap * tanhf(x[i] / soft_cap);
    return x;
}

/* Numbers of `bias` from `first` on, zeros without one. */
INLINE void load_bias(const struct linear *op, int64_t first, int64_t count, float *bias, int dtype) {
    for (int64_t i = 0; i < round_up(count, LANES); i += LANES)
        vec_store(bias + i, op->bias == NULL ? vec_all(0.0f) : load_part(op->bias, first + i, count - i, dtype));
}

INLINE void finish_gated(const struct linear *op, const float *sums, int64_t m, int64_t first, int64_t count, char *output,
                         size_t row_bytes, int is_silu, int dtype) {
    float bias[PANEL], up_bias[PANEL];
    load_bias(op, first, count, bias, dtype);
    load_bias(op, op->out_features / 2 + first, count, up_bias, dtype);
    for (int64_t row = 0; row < m; row++, sums += PANEL, output += row_bytes)
        for (int64_t i = 0; i < count; i += LANES) {
            vec gate = vec_round(vec_load(sums + i) + vec_load(bias + i), dtype);
            vec up = vec_round(vec_load(sums + PANEL / 2 + i) + vec_load(up_bias + i), dtype);
            vec active = vec_round(is_silu ? silu(gate) : activate(gate, op->activation), dtype);
            store_part(output, first + i, active * up, count - i, dtype);
        }
}

/* Of clamped numbers: gpt-oss, gate sigmoid(1.702 gate) (up + 1); Hy4, silu(gate) up. */
INLINE void finish_clamped(const struct linear *op, const float *sums, int64_t m, int64_t first, int64_t count, char *output,
                           size_t row_bytes, int is_oai, int dtype) {
    float bias[PANEL], up_bias[PANEL];
    load_bias(op, first, count, bias, dtype);
    load_bias(op, op->out_features / 2 + first, count, up_bias, dtype);
    vec limit = vec_all(op->soft_cap > 0.0f ? op->soft_cap : INFINITY);
    for (int64_t row = 0; row < m; row++, sums += PANEL, output += row_bytes)
        for (int64_t i = 0; i < count; i += LANES) {
            vec gate = vec_round(vec_load(sums + i) + vec_load(bias + i), dtype);
            vec up = vec_round(vec_load(sums + PANEL / 2 + i) + vec_load(up_bias + i), dtype);
            gate = vec_select(gate > limit, limit, gate);
            up = vec_select(up > limit, limit, vec_select(up < -limit, -limit, up));
            if (!is_oai) {
                store_part(output, first + i, vec_round(silu(gate), dtype) * up, count - i, dtype);
                continue;
            }
            vec sigmoid = vec_round(1.0f / (1.0f + vec_exp(-vec_round(1.702f * gate, dtype))), dtype);
            store_part(output, first + i, vec_round(gate * sigmoid, dtype) * vec_round(up + 1.0f, dtype), count - i, dtype);
        }
}

INLINE void finish_plain(const struct linear *op, const float *sums, int64_t m, int64_t first, int64_t count, char *output,
                         size_t row_bytes, int is_logits, int activation, int dtype) {
    float bias[PANEL];
    load_bias(op, first, count, bias, dtype);
    for (int64_t row = 0; row < m; row++, sums += PANEL, output += row_bytes)
        for (int64_t i = 0; i < count; i += LANES) {
            vec numbers = vec_load(sums + i) + vec_load(bias + i);
            if (is_logits)
                numbers = vec_round(numbers, dtype);
            if (is_logits && op->soft_cap > 0.0f)
                numbers = capped(numbers, op->soft_cap);
            if (activation != ACTIVATION_NONE)
                numbers = activate(vec_round(numbers, dtype), activation);
            store_part(output, first + i, numbers, count - i, is_logits ? DTYPE_F32 : dtype);
        }
}

/* What does not change within a call is decided outside of the loops: a number that is taken out of a vector there keeps the vector
   in memory. */
INLINE void finish_rows(const struct linear *op, const float *sums, int64_t m, int64_t first, int64_t count, char *output,
                        size_t row_bytes, int dtype) {
    if (op->activation == ACTIVATION_SILU)
        finish_gated(op, sums, m, first, count, output, row_bytes, 1, dtype);
    else if (op->activation == ACTIVATION_SWIGLU_OAI)
        finish_clamped(op, sums, m, first, count, output, row_bytes, 1, dtype);
    else if (op->activation == ACTIVATION_SILU_CLAMPED)
        finish_clamped(op, sums, m, first, count, output, row_bytes, 0, dtype);
    else if (op->activation != ACTIVATION_NONE)
        finish_gated(op, sums, m, first, count, output, row_bytes, 0, dtype);
    else if (op->is_logits)
        finish_plain(op, sums, m, first, count, output, row_bytes, 1, ACTIVATION_NONE, dtype);
    else if (op->bare_activation == 0)
        finish_plain(op, sums, m, first, count, output, row_bytes, 0, ACTIVATION_NONE, dtype);
    else if (op->bare_activation == ACTIVATION_GELU + 1)
        finish_plain(op, sums, m, first, count, output, row_bytes, 0, ACTIVATION_GELU, dtype);
    else
        finish_plain(op, sums, m, first, count, output, row_bytes, 0, op->bare_activation - 1, dtype);
}

static void finish_bf16(const struct linear *op, float *sums, int64_t m, int64_t first, int64_t count, char *output,
                        size_t row_bytes) {
    finish_rows(op, sums, m, first, count, output, row_bytes, DTYPE_BF16);
}

static void finish_f32(const struct linear *op, float *sums, int64_t m, int64_t first, int64_t count, char *output,
                       size_t row_bytes) {
    finish_rows(op, sums, m, first, count, output, row_bytes, DTYPE_F32);
}

/* Few rows whose vectors are a whole line follow the stream that the core fetches by itself; others look further ahead. */
enum { NEAR_ROWS = PANEL_VECS == 2 ? 4 : MOST_WIDE_SUMS / PANEL_VECS, FETCH_FAR = 14 << 10 };

#if HAS_BF16_PANELS
const struct engine pelton_vec_bf16 = {
    .most_rows = MOST_ROWS, .dot_rows = DOT_ROWS, .near_rows = NEAR_ROWS, .fetch_far = FETCH_FAR, .x_bytes = sizeof(float),
    .weight_bytes = sizeof(bf16), .step = 2, .pack_panel = pack_panel_bf16, .pack_block = pack_block_bf16,
    .multiply = multiply_bf16, .spread_rows = spread_rows_bf16, .dots = dots_bf16, .prepare = prepare_bf16, .finish = finish_bf16,
};
#else
const struct engine pelton_vec_bf16 = {
    .most_rows = MOST_ROWS, .near_rows = NEAR_ROWS, .fetch_far = FETCH_FAR, .x_bytes = sizeof(float), .weight_bytes = sizeof(float),
    .step = 1, .pack_panel = pack_panel_wide, .pack_block = pack_block_bf16, .multiply = multiply_f32, .prepare = prepare_bf16,
    .finish = finish_bf16,
};
#endif

const struct engine pelton_vec_f32 = {
    .most_rows = MOST_ROWS, .dot_rows = DOT_ROWS, .near_rows = NEAR_ROWS, .fetch_far = FETCH_FAR, .x_bytes = sizeof(float),
    .weight_bytes = sizeof(float), .step = 1, .pack_panel = pack_panel_f32, .pack_block = pack_block_f32,
    .multiply = multiply_f32, .part = CHUNK, .tile = TILE_ROWS < MOST_ROWS ? TILE_ROWS : 1, .pack_part = pack_part_f32, .multiply_part = multiply_part_f32, .spread_rows = spread_rows_f32, .dots = dots_f32, .prepare = prepare_f32, .finish = finish_f32,
};

SHARED const struct engine pelton_vec_mixed = {
    .most_rows = MOST_ROWS, .near_rows = NEAR_ROWS, .fetch_far = FETCH_FAR, .x_bytes = sizeof(float),
    .weight_bytes = sizeof(float), .step = 1, .pack_block = pack_block_bf16, .multiply = multiply_f32, .prepare = prepare_bf16,
    .finish = finish_bf16,
};
