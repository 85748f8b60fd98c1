/* Products of bfloat16 by vdpbf16ps, which adds two products of 16 columns and one row at once; in_features even.

   A panel is PANEL rows of a weight (with an activation: 16 of the gate and the 16 of up that belong to them) as
   [in / 2][PANEL][2]. Rows of the input go in blocks of BLOCK, as [in / 2][rows of the block][2]: 24 of 32 registers are sums, two
   a panel's vectors, and every operand is read in one stream. */
#include "float_kernels.h"
#include "tile_avx512.h"

#if PELTON_ISA >= ISA_AVX512_BF16

enum {
    BLOCK = 12,
    DOT_ROWS = 4, /* of a plain weight: more rows are worth packing it */
    /* Ahead in a weight that one block of rows reads. While memory decides, the core follows the stream by itself and is only
       disturbed from further on (4 rows: 40 GB/s at 0.5 KiB, 31 at 2 KiB); while sums do, it looks too little ahead (8 rows: 40
       GB/s from 8 KiB on, 29 at 0.5 KiB). EPYC 9004, 64 GB/s. */
    NEAR_ROWS = 4,
    FETCH_NEAR = 512,
    FETCH_FAR = 12 << 10,
};

/* Panel `index` of a weight [out, in]. */
static void pack_panel(const struct shape *shape, const void *weight, int64_t index, void *panel) {
    const void *rows[PANEL];
    for (int64_t i = 0; i < PANEL; i++)
        rows[i] = (const bf16 *)weight + weight_row(shape, index, i) * shape->k;
    avx512_pack_rows(rows, shape->k, panel);
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

static void multiply(const void *rows, const void *panel, int64_t k, float *sums, const char *fetch, int64_t fetch_bytes,
                     int64_t m) {
    int64_t pairs = k / 2, step = (fetch_bytes + pairs - 1) / pairs;
    switch (m) {
#define ROWS(M)                                         \
    case M:                                             \
        block(rows, panel, pairs, sums, fetch, step, M); \
        break;
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#undef ROWS
    }
}

/* ---- rows ---- */

/* `m` rows of `k` numbers -> [k / 2][m][2]. */
static void pack_block(const void *from, int64_t m, int64_t k, void *packed) {
    const bf16 *rows = from;
    uint32_t *a = packed;
    __mmask16 used = (__mmask16)((1u << m) - 1u);
    if (m < 4) { /* a transposition takes as long for one row as for 16 */
        for (int64_t row = 0; row < m; row++)
            for (int64_t i = 0; i < k / 2; i++)
                memcpy(a + i * m + row, rows + row * k + 2 * i, sizeof *a);
        return;
    }
    for (int64_t i = 0; i < k; i += 32) {
        int64_t left = least(k - i, 32);
        __mmask32 mask = left == 32 ? 0xffffffffu : (1u << left) - 1u;
        __m512i words[16];
#pragma GCC unroll 16
        for (int row = 0; row < 16; row++)
            words[row] = row < m ? _mm512_maskz_loadu_epi16(mask, rows + row * k + i) : _mm512_setzero_si512();
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

/* As `prepare_row` of linear_vec.c. */
static void prepare(const struct linear *op, const struct rows *in, int64_t row, void *x) {
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

static void dot_rows(const void *weight, const void *rows, int64_t k, int64_t count, float *sums, int64_t m) {
    switch (m) {
#define ROWS(M)                                \
    case M:                                    \
        dots(weight, rows, k, count, sums, M); \
        break;
        ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#undef ROWS
    }
}

/* As they are. */
static void spread_rows(const void *rows, int64_t m, int64_t k, void *spread) {
    memcpy(spread, rows, (size_t)(m * k) * sizeof(bf16));
}

/* ---- what follows a product ---- */

INLINE __m512 widen(__m256i numbers) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}

INLINE __m256i narrow(__m512 numbers) { return (__m256i)_mm512_cvtneps_pbh(numbers); }

INLINE __m512 with_bias(const struct linear *op, __m512 sums, __mmask16 mask, int64_t column) {
    if (op->bias == NULL)
        return sums;
    return _mm512_add_ps(sums, widen(_mm256_maskz_loadu_epi16(mask, (const bf16 *)op->bias + column)));
}

/* Of one row, without an activation but SiLU, and without a soft cap. */
INLINE void finish_row(const struct linear *op, const float *sums, int64_t first, int64_t count, void *output) {
    if (op->activation == ACTIVATION_SILU) {
        __mmask16 mask = (__mmask16)((1u << count) - 1u);
        __m512 gate = widen(narrow(with_bias(op, _mm512_loadu_ps(sums), mask, first)));
        __m512 up = widen(narrow(with_bias(op, _mm512_loadu_ps(sums + 16), mask, op->out_features / 2 + first)));
        __m512 one = _mm512_set1_ps(1.0f), above = avx512_exp(_mm512_sub_ps(_mm512_setzero_ps(), gate));
        __m512 active = widen(narrow(_mm512_div_ps(gate, _mm512_add_ps(one, above))));
        _mm256_mask_storeu_epi16((bf16 *)output + first, mask, narrow(_mm512_mul_ps(active, up)));
    } else {
        for (int64_t i = 0; i < count; i += 16) {
            __mmask16 mask = (__mmask16)((1u << least(count - i, 16)) - 1u);
            __m256i rounded = narrow(with_bias(op, _mm512_loadu_ps(sums + i), mask, first + i));
            if (op->is_logits)
                _mm512_mask_storeu_ps((float *)output + first + i, mask, widen(rounded));
            else
                _mm256_mask_storeu_epi16((bf16 *)output + first + i, mask, rounded);
        }
    }
}

static void finish(const struct linear *op, float *sums, int64_t m, int64_t first, int64_t count, char *output,
                   size_t row_bytes) {
    if (finishes_in_float(op)) {
        pelton_float.bf16->finish(op, sums, m, first, count, output, row_bytes);
        return;
    }
    for (int64_t row = 0; row < m; row++)
        finish_row(op, sums + row * PANEL, first, count, output + (size_t)row * row_bytes);
}

SHARED const struct engine pelton_bf16 = {
    .most_rows = BLOCK, .dot_rows = DOT_ROWS, .near_rows = NEAR_ROWS, .fetch_far = FETCH_FAR, .x_bytes = sizeof(bf16),
    .weight_bytes = sizeof(bf16), .step = 2, .prepare = prepare, .pack_panel = pack_panel, .pack_block = pack_block,
    .multiply = multiply, .spread_rows = spread_rows, .dots = dot_rows, .finish = finish,
};

#endif
