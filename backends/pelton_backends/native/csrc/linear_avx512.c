/* Products of bfloat16 on AVX-512, any number of rows.

   The weight is read as panels: PANEL of its rows (with an activation: 16 of the gate and the 16 of up that belong to them) as
   [in / 2][PANEL][2], so that vdpbf16ps adds two products of 16 columns and one row at once. `pelton_pack` brings a weight into
   that order in its own memory; one that stays plain for others is packed a panel at a time as it is read.

   Rows of the input go in blocks of BLOCK, as [in / 2][rows of the block][2]: 24 of 32 registers are sums, two a panel's
   vectors, and every operand is read in one stream. Threads first norm and pack rows, then multiply groups of blocks with panels.
   With few rows a task may be run twice: its sums are kept until it is known whose count. */
#include "seam.h"

#if PELTON_ISA >= ISA_AVX512_BF16

enum {
    BLOCK = 12,
    DOT_ROWS = 4,              /* of a plain weight: more rows are worth packing it */
    /* From here on a thread multiplies rows that it packed itself, so that they need not leave its cache: 6 % at 64 and 128 rows
       where the cores share no L3, nothing where they do. With fewer rows, reading the weight twice costs more. */
    MANY_ROWS = 64,
    GROUP_ROWS = 32,           /* of one thread, at least */
    GROUP_BYTES = 512 << 10,   /* packed rows that panels are multiplied with before others: half of an L2 cache */
    /* Ahead in a weight that one block of rows reads. While memory decides, the core follows the stream by itself and is only
       disturbed from further on (4 rows: 40 GB/s at 0.5 KiB, 31 at 2 KiB); while sums do, it looks too little ahead (8 rows: 40
       GB/s from 8 KiB on, 29 at 0.5 KiB). EPYC 9004, 64 GB/s. */
    FEW_ROWS = 4,
    FETCH_NEAR = 512,
    FETCH_FAR = 12 << 10,
};

/* ---- panels ---- */

struct shape {
    int64_t k, width, columns, num_panels; /* width: columns of the output in a panel */
};

INLINE struct shape shape_of(const struct linear *op) {
    int64_t width = op->activation == ACTIVATION_NONE ? PANEL : PANEL / 2, columns = num_columns(op);
    return (struct shape){op->in_features, width, columns, (columns + width - 1) / width};
}

/* Panel `index` of a weight [out, in]. */
static void pack_panel(const struct shape *shape, const bf16 *weight, int64_t index, bf16 *panel) {
    int64_t first = index * shape->width, count = least(shape->width, shape->columns - first);
    const void *rows[PANEL];
    for (int64_t i = 0; i < PANEL; i++) {
        int64_t column = first + least(i % shape->width, count - 1);
        rows[i] = weight + (i < shape->width ? column : shape->columns + column) * shape->k;
    }
    avx512_pack_rows(rows, shape->k, panel);
}

struct packing {
    struct shape shape;
    const bf16 *plain;
    bf16 *panels;
};

static void run_pack(void *context, int64_t index, struct turn *turn) {
    const struct packing *packing = context;
    (void)turn;
    pack_panel(&packing->shape, packing->plain, index, packing->panels + index * PANEL * packing->shape.k);
}

/* Bring a weight into panels, in its own memory. 0: done; 1: it stays as it is, for want of memory or for its shape. */
EXPORT int pelton_pack(const struct linear *op, bf16 *weight) {
    struct shape shape = shape_of(op);
    if (op->dtype != DTYPE_BF16 || shape.columns % shape.width || shape.k % 2 ||
        (uintptr_t)weight % 64)
        return 1;
    size_t bytes = (size_t)(op->out_features * shape.k) * sizeof(bf16);
    bf16 *plain = malloc(bytes);
    if (plain == NULL)
        return 1;
    memcpy(plain, weight, bytes);
    struct packing packing = {shape, plain, weight};
    pool_do((struct pool_work){.run = run_pack, .context = &packing, .num_tasks = shape.num_panels, .has_shares = 1});
    free(plain);
    return 0;
}

/* ---- a block of rows times a panel ---- */

/* a [pairs][M][2] times panel [pairs][PANEL][2] -> sums [M][PANEL]. Reads `fetch` into the L2 cache, `step` bytes a pair. */
INLINE void block(const uint32_t *a, const bf16 *panel, int64_t pairs, float *sums, const char *fetch,
                                int64_t step, int M) {
    __m512 low[BLOCK], high[BLOCK];
#pragma GCC unroll 12
    for (int row = 0; row < M; row++)
        low[row] = high[row] = _mm512_setzero_ps();
    for (int64_t i = 0; i < pairs; i++) {
        __m512bh left = (__m512bh)_mm512_load_si512(panel), right = (__m512bh)_mm512_load_si512(panel + PANEL);
        _mm_prefetch(fetch, _MM_HINT_T1);
        _mm_prefetch(fetch + 64, _MM_HINT_T1);
#pragma GCC unroll 12
        for (int row = 0; row < M; row++) {
            __m512bh factor = (__m512bh)_mm512_set1_epi32((int)a[row]);
            low[row] = _mm512_dpbf16_ps(low[row], left, factor);
            high[row] = _mm512_dpbf16_ps(high[row], right, factor);
        }
        a += M, panel += 2 * PANEL, fetch += step;
    }
#pragma GCC unroll 12
    for (int row = 0; row < M; row++) {
        _mm512_storeu_ps(sums + row * PANEL, low[row]);
        _mm512_storeu_ps(sums + row * PANEL + 16, high[row]);
    }
}

static __attribute__((noinline)) void multiply(const uint32_t *a, const bf16 *panel, int64_t pairs, float *sums,
                                                             const char *fetch, int64_t step, int64_t m) {
    switch (m) {
#define ROWS(M)                                         \
    case M:                                             \
        block(a, panel, pairs, sums, fetch, step, M); \
        break;
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#undef ROWS
    }
}

/* ---- rows ---- */

/* `m` rows of `k` numbers, `stride` apart -> [k / 2][m][2]. */
static void pack_block(const bf16 *rows, int64_t stride, int64_t m, int64_t k, uint32_t *a) {
    __mmask16 used = (__mmask16)((1u << m) - 1u);
    if (m < 4) { /* a transposition takes as long for one row as for 16 */
        for (int64_t row = 0; row < m; row++)
            for (int64_t i = 0; i < k / 2; i++)
                memcpy(a + i * m + row, rows + row * stride + 2 * i, sizeof *a);
        return;
    }
    for (int64_t i = 0; i < k; i += 32) {
        int64_t left = least(k - i, 32);
        __mmask32 mask = left == 32 ? 0xffffffffu : (1u << left) - 1u;
        __m512i words[16];
#pragma GCC unroll 16
        for (int row = 0; row < 16; row++)
            words[row] = row < m ? _mm512_maskz_loadu_epi16(mask, rows + row * stride + i) : _mm512_setzero_si512();
        transpose_16(words);
        if (left == 32) {
#pragma GCC unroll 16
            for (int pair = 0; pair < 16; pair++)
                _mm512_mask_storeu_epi32(a + (i / 2 + pair) * m, used, words[pair]);
        } else {
            for (int64_t pair = 0; pair < left / 2; pair++)
                _mm512_mask_storeu_epi32(a + (i / 2 + pair) * m, used, words[pair]);
        }
    }
}

/* 32 numbers in float32: those at even places, and those at odd ones, which is cheaper than keeping their order. */
struct pair {
    __m512 even, odd;
};

INLINE struct pair split(__m512i numbers) {
    __m512i odd = _mm512_and_si512(numbers, _mm512_set1_epi32((int)0xffff0000u));
    return (struct pair){_mm512_castsi512_ps(_mm512_slli_epi32(numbers, 16)), _mm512_castsi512_ps(odd)};
}

INLINE __m512i joined(struct pair pair) {
    __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                     19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(pair.odd, pair.even));
}

INLINE __m512i read(const void *line, int64_t i, __mmask32 mask) {
    return _mm512_maskz_loadu_epi16(mask, (const bf16 *)line + i);
}

INLINE void write(void *line, int64_t i, __mmask32 mask, __m512i numbers) {
    _mm512_mask_storeu_epi16((bf16 *)line + i, mask, numbers);
}

INLINE struct pair scaled(struct pair pair, __m512 factor) {
    return (struct pair){_mm512_mul_ps(pair.even, factor), _mm512_mul_ps(pair.odd, factor)};
}

INLINE __m512i normed(__m512i numbers, __m512 factor, __m512i weight, int unit_offset) {
    struct pair x = scaled(split(numbers), factor), w = split(weight);
    if (unit_offset) {
        __m512 one = _mm512_set1_ps(1.0f);
        w = (struct pair){_mm512_add_ps(one, w.even), _mm512_add_ps(one, w.odd)};
    } else {
        x = split(joined(x));
    }
    return joined((struct pair){_mm512_mul_ps(x.even, w.even), _mm512_mul_ps(x.odd, w.odd)});
}

INLINE struct pair add_squares(struct pair sums, __m512i numbers) {
    struct pair x = split(numbers);
    return (struct pair){_mm512_fmadd_ps(x.even, x.even, sums.even), _mm512_fmadd_ps(x.odd, x.odd, sums.odd)};
}

INLINE __m512 norm_factor(struct pair squares, int64_t size, float eps) {
    float sum = _mm512_reduce_add_ps(_mm512_add_ps(squares.even, squares.odd));
    return _mm512_set1_ps(1.0f / sqrtf(sum / (float)size + eps));
}

struct line {
    const bf16 *hidden, *residual;
    bf16 *residual_out, *x;
};

/* Up to 32 numbers of residual' from `i` on, kept in `x` until they are normed. */
INLINE __m512i add_part(const struct linear *op, const struct line *line, __m512 factor, int64_t i,
                                      __mmask32 mask) {
    __m512i numbers = read(line->hidden, i, mask);
    if (op->post_norm != NULL)
        numbers = normed(numbers, factor, read(op->post_norm, i, mask), op->post_unit_offset);
    if (line->residual != NULL) {
        struct pair a = split(numbers), b = split(read(line->residual, i, mask));
        numbers = joined((struct pair){_mm512_add_ps(a.even, b.even), _mm512_add_ps(a.odd, b.odd)});
    }
    if (line->residual_out != NULL)
        write(line->residual_out, i, mask, numbers);
    write(line->x, i, mask, numbers);
    return numbers;
}

/* Loops over a line: whole vectors without masks, and what is left. */
#define EACH_PART(SIZE, WORK)                                     \
    do {                                                          \
        int64_t i = 0;                                            \
        for (; i + 32 <= (SIZE); i += 32) {                       \
            __mmask32 mask = 0xffffffffu;                         \
            WORK;                                                 \
        }                                                         \
        if (i < (SIZE)) {                                         \
            __mmask32 mask = (1u << ((SIZE) - i)) - 1u;           \
            WORK;                                                 \
        }                                                         \
    } while (0)

/* As linear.c's `prepare_row`. */
void pelton_prepare_avx512(const struct linear *op, const struct rows *in, int64_t row, void *x) {
    int64_t size = op->in_features, from = (in->rows == NULL ? row : in->rows[row]) * size;
    struct line line = {
        .hidden = (const bf16 *)in->hidden + from,
        .residual = in->residual == NULL ? NULL : (const bf16 *)in->residual + from,
        .residual_out = in->residual_out == NULL ? NULL : (bf16 *)in->residual_out + row * size,
        .x = x,
    };
    if (row + 1 < in->num_rows) { /* the next row's, which another core may have written */
        const char *next = (const char *)in->hidden + (in->rows == NULL ? row + 1 : in->rows[row + 1]) * size * 2;
        for (int64_t byte = 0; byte < size * 2; byte += 64)
            _mm_prefetch(next + byte, _MM_HINT_T0);
    }
    __m512 factor = _mm512_setzero_ps();
    struct pair squares = {factor, factor};
    if (op->post_norm != NULL) {
        EACH_PART(size, squares = add_squares(squares, read(line.hidden, i, mask)));
        factor = norm_factor(squares, size, op->post_eps);
        squares.even = squares.odd = _mm512_setzero_ps();
    }
    EACH_PART(size, squares = add_squares(squares, add_part(op, &line, factor, i, mask)));
    factor = norm_factor(squares, size, op->eps);
    EACH_PART(size, write(x, i, mask, normed(read(x, i, mask), factor, read(op->norm, i, mask), op->unit_offset)));
}

/* ---- few rows times a plain weight ---- */

/* Dot products of M rows with `count` rows of a weight, read one after the other -> sums [M][PANEL]. */
INLINE void dots(const bf16 *weight, const bf16 *x, int64_t k, int64_t count, float *sums, int M) {
    int64_t whole = k / 64 * 64;
    for (int64_t column = 0; column < count; column++) {
        const bf16 *w = weight + column * k;
        __m512 even[DOT_ROWS], odd[DOT_ROWS];
#pragma GCC unroll 4
        for (int row = 0; row < M; row++)
            even[row] = odd[row] = _mm512_setzero_ps();
        for (int64_t i = 0; i < whole; i += 64) {
            __m512bh left = (__m512bh)_mm512_loadu_si512(w + i), right = (__m512bh)_mm512_loadu_si512(w + i + 32);
            _mm_prefetch((const char *)(w + i) + FETCH_NEAR, _MM_HINT_T0);
            _mm_prefetch((const char *)(w + i) + FETCH_NEAR + 64, _MM_HINT_T0);
#pragma GCC unroll 4
            for (int row = 0; row < M; row++) {
                even[row] = _mm512_dpbf16_ps(even[row], left, (__m512bh)_mm512_loadu_si512(x + row * k + i));
                odd[row] = _mm512_dpbf16_ps(odd[row], right, (__m512bh)_mm512_loadu_si512(x + row * k + i + 32));
            }
        }
        for (int64_t i = whole; i < k; i += 32) {
            __mmask32 mask = k - i >= 32 ? 0xffffffffu : (1u << (k - i)) - 1u;
            __m512bh left = (__m512bh)_mm512_maskz_loadu_epi16(mask, w + i);
#pragma GCC unroll 4
            for (int row = 0; row < M; row++)
                even[row] = _mm512_dpbf16_ps(even[row], left, (__m512bh)_mm512_maskz_loadu_epi16(mask, x + row * k + i));
        }
#pragma GCC unroll 4
        for (int row = 0; row < M; row++)
            sums[row * PANEL + column] = _mm512_reduce_add_ps(_mm512_add_ps(even[row], odd[row]));
    }
}

static __attribute__((noinline)) void dot_rows(const bf16 *weight, const bf16 *x, int64_t k, int64_t count,
                                                             float *sums, int64_t m) {
    switch (m) {
#define ROWS(M)                               \
    case M:                                   \
        dots(weight, x, k, count, sums, M); \
        break;
        ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#undef ROWS
    }
}

/* ---- threads ---- */

/* What threads share in one call. Rows are cut into blocks, blocks into groups; a task is one group times one panel. */
struct call {
    const struct linear *op;
    struct rows in;
    struct panel_source source; /* make is NULL: the op's weight */
    struct shape shape;
    char *output;
    size_t row_bytes; /* of the output */
    int64_t num_blocks, num_groups;
    int is_few, is_dots;
    bf16 *x;     /* dots: normed rows */
    uint32_t *a; /* else: packed ones */
    _Atomic int has_failed; /* a thread had no memory for a task that runs once */
};

/* One thread's memory. */
struct room {
    float *sums;        /* [BLOCK][PANEL], where few of all rows */
    bf16 *rows, *panel; /* [BLOCK][k], [k / 2][PANEL][2] */
};

INLINE int64_t block_start(const struct call *call, int64_t block) { return call->in.num_rows * block / call->num_blocks; }

INLINE int64_t group_start(const struct call *call, int64_t group) { return call->num_blocks * group / call->num_groups; }

INLINE void *cut(char **memory, int64_t bytes) {
    void *start = *memory;
    *memory += round_up(bytes, 64);
    return start;
}

/* NULL sums: no memory. */
static struct room make_room(const struct call *call) {
    int64_t line = call->shape.k * (int64_t)sizeof(bf16), sums = most(call->is_few ? call->in.num_rows : 0, BLOCK) * PANEL * 4;
    char *memory = pelton_scratch((size_t)(sums + (BLOCK + PANEL) * line + 4 * 64));
    struct room room = {0};
    if (memory != NULL)
        room.sums = cut(&memory, sums), room.rows = cut(&memory, BLOCK * line), room.panel = cut(&memory, PANEL * line);
    return room;
}

/* Norm and pack one block. */
static void prepare_block(const struct call *call, int64_t block, const struct room *room) {
    int64_t k = call->shape.k, first = block_start(call, block), m = block_start(call, block + 1) - first;
    const bf16 *rows = (const bf16 *)call->in.hidden + first * k;
    if (call->op->norm != NULL) {
        for (int64_t i = 0; i < m; i++)
            pelton_prepare_avx512(call->op, &call->in, first + i, room->rows + i * k);
        rows = room->rows;
    }
    pack_block(rows, k, m, k, call->a + first * (k / 2));
}

static void run_preparation(void *context, int64_t block, struct turn *turn) {
    struct call *call = context;
    struct room room = make_room(call);
    (void)turn;
    if (room.sums != NULL)
        prepare_block(call, block, &room);
    else
        call->has_failed = 1;
}

/* The sums of all rows, a line of PANEL each. */
static void dot_task(const struct call *call, int64_t column, int64_t count, float *sums) {
    const struct shape *shape = &call->shape;
    const bf16 *weight = (const bf16 *)call->op->weight + column * shape->k;
    dot_rows(weight, call->x, shape->k, count, sums, call->in.num_rows);
    if (shape->width < PANEL)
        dot_rows(weight + shape->columns * shape->k, call->x, shape->k, count, sums + PANEL / 2, call->in.num_rows);
}

static void finish_rows(const struct call *call, const float *sums, int64_t first_row, int64_t m, int64_t column, int64_t count) {
    for (int64_t i = 0; i < m; i++)
        finish_panel(call->op, (float *)sums + i * PANEL, column, count, call->output + (size_t)(first_row + i) * call->row_bytes);
}

static void run_products(void *context, int64_t task, struct turn *turn) {
    struct call *call = context;
    const struct linear *op = call->op;
    const struct shape *shape = &call->shape;
    int64_t k = shape->k, index = task % shape->num_panels, group = task / shape->num_panels;
    int64_t column = index * shape->width, count = least(shape->width, shape->columns - column);
    struct room room = make_room(call);
    if (room.sums == NULL) {
        call->has_failed = 1;
        return;
    }
    if (call->is_dots) {
        dot_task(call, column, count, room.sums);
        if (may_write(turn))
            finish_rows(call, room.sums, 0, call->in.num_rows, column, count);
        return;
    }
    const bf16 *weight = (const bf16 *)op->weight + index * PANEL * k, *panel = weight;
    if (call->source.make != NULL) {
        call->source.make(call->source.weight, index, room.panel);
        weight = panel = room.panel;
    } else if (!op->is_packed) {
        pack_panel(shape, op->weight, index, room.panel);
        panel = room.panel;
    }
    /* The next panel is fetched while this one is used, a part with every block. */
    int64_t first = group_start(call, group), last = group_start(call, group + 1), pairs = k / 2;
    int64_t panel_bytes = PANEL * k * (int64_t)sizeof(bf16), part = panel_bytes / (last - first), ahead = panel_bytes;
    if (last - first == 1 && op->is_packed)
        ahead = call->in.num_rows <= FEW_ROWS ? FETCH_NEAR : FETCH_FAR;
    const char *fetch = (const char *)weight + ahead;
    for (int64_t block = first; block < last; block++) {
        int64_t row = block_start(call, block), m = block_start(call, block + 1) - row;
        float *sums = room.sums + (call->is_few ? row * PANEL : 0);
        multiply(call->a + row * pairs, panel, pairs, sums, fetch, (part + pairs - 1) / pairs, m);
        fetch += part;
        if (!call->is_few)
            finish_rows(call, sums, row, m, column, count);
    }
    if (may_write(turn) && call->is_few)
        finish_rows(call, room.sums, 0, call->in.num_rows, column, count);
}

int pelton_linear_avx512(const struct linear *op, const struct rows *in, void *output, const struct panel_source *source) {
    int64_t k = op->in_features, num_rows = in->num_rows, line = k * (int64_t)sizeof(bf16), threads = pool_num_threads();
    if (num_rows == 0)
        return 0;
    struct call call = {
        .op = op,
        .in = *in,
        .shape = shape_of(op),
        .output = output,
        .row_bytes = (size_t)op->output_stride * (op->is_logits ? sizeof(float) : sizeof(bf16)),
        .num_groups = 1,
        .is_few = num_rows < MANY_ROWS,
        .is_dots = !op->is_packed && source == NULL && num_rows <= DOT_ROWS,
    };
    if (source != NULL)
        call.source = *source;
    if (!call.is_few) {
        call.num_groups = most((num_rows * line + GROUP_BYTES - 1) / GROUP_BYTES, least(threads, num_rows / GROUP_ROWS));
        if (call.num_groups > threads)
            call.num_groups = round_up(call.num_groups, threads);
    }
    call.num_blocks = round_up((num_rows + BLOCK - 1) / BLOCK, call.num_groups);

    void *rows = pelton_shared((size_t)(num_rows * line));
    struct room room = make_room(&call); /* of this thread, which runs what others have no memory for */
    if (rows == NULL || room.sums == NULL)
        return 1;
    int is_small = num_rows * op->out_features * k <= 1 << 16;
    if (call.is_dots) {
        call.x = rows;
        for (int64_t row = 0; row < num_rows; row++)
            if (op->norm != NULL)
                pelton_prepare_avx512(op, in, row, call.x + row * k);
            else
                memcpy(call.x + row * k, (const bf16 *)in->hidden + row * k, (size_t)line);
    } else {
        call.a = rows;
        pool_do((struct pool_work){.run = run_preparation, .context = &call, .num_tasks = call.num_blocks, .is_small = is_small, .has_shares = 1});
    }
    pool_do((struct pool_work){.run = run_products, .context = &call, .context_bytes = call.is_few ? sizeof call : 0,
                          .num_tasks = call.shape.num_panels * call.num_groups, .is_small = is_small, .has_shares = 1});
    return call.has_failed;
}

#else

EXPORT int pelton_pack(const struct linear *op, bf16 *weight) {
    (void)op, (void)weight;
    return 1;
}

#endif
