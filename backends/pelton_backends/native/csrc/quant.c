/* Products with weights that stay in packed blocks, with what stands before and behind them, and rows of an embedding.

   Inputs are rounded to 16 bits in blocks of 32 with a float32 scale each, and kept as two int8: scale * (high + low / 254),
   the largest high being 127. So a block's product is two of integers, exact, and inputs lose less than bfloat16 does. Blocks
   are added up in float32, in order: a row's result is the same whichever rows are computed with it. Every instruction set
   does the same but for the fused multiply-adds of AVX2 and AVX-512.

   From MANY_ROWS rows of bfloat16 on AVX-512, where two products of int8 take longer than one of bfloat16, panels are
   dequantized to bfloat16 as they are read, for the products of linear_bf16.c. */
#include "quant.h"

#include "lines.h"

#if PELTON_ISA >= ISA_AVX2
#include <immintrin.h>
#endif

enum { LOW_STEPS = 254, TILE = 8, SPAN = 2 * QUANT_ROWS, BLOCK_OF_ROWS = 128, MANY_ROWS = 9 };

/* Rows of inputs: high and low parts [n, in], and for each block of them scale / 254 and, of q = 254 high + low,
   scale / 254 * sum(q) and -8 * sum(q). */
struct inputs {
    int8_t *high, *low;
    float *scale, *scaled_sum;
    int32_t *minus_8_sums;
    int64_t num_blocks;
};

/* Each instruction set has:
   - `multiply_panels`: sums of rows [row, row + m) by one or two panels of one kind: [m][SPAN], 16 a panel. m is at most TILE
   - `round_inputs`: a row of a call, after its norm, to `x`. */

INLINE float half_to_float(uint16_t half) {
    uint32_t bits = (uint32_t)(half & 0x7fffu) << 13, sign = (uint32_t)(half & 0x8000u) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f; /* the exponents' offsets differ by 112 */
    memcpy(&bits, &value, sizeof bits);
    bits |= sign | ((half & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u);
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE int32_t four_at(const int8_t *numbers, int64_t index) {
    int32_t four;
    memcpy(&four, numbers + 4 * index, sizeof four);
    return four;
}

INLINE uint16_t half_at(const uint8_t *memory, int64_t index) {
    uint16_t half;
    memcpy(&half, memory + 2 * index, sizeof half);
    return half;
}

INLINE int32_t number_at(const uint8_t *quants, int kind, int64_t row, int64_t i) {
    if (kind == QUANT_Q8_0)
        return (int8_t)quants[i / 4 * 64 + row * 4 + i % 4];
    uint8_t both = quants[i % 16 / 4 * 64 + row * 4 + i % 4];
    return (i < 16 ? both & 15 : both >> 4) - (kind == QUANT_Q4_0 ? 8 : 0);
}

INLINE const void *row_of(const struct linear *op, const struct rows *in, int64_t row) {
    return (const char *)in->hidden + (size_t)(row * op->in_features) * size_of(op->dtype);
}

#if PELTON_ISA < ISA_AVX512_BF16

/* ---- inputs to two int8 ---- */

/* The largest magnitude by its bits, so that a NaN wins and makes the scale one. */
INLINE void round_numbers(const struct inputs *x, int64_t row, const void *numbers, int dtype) {
    for (int64_t block = 0; block < x->num_blocks; block++) {
        float line[QUANT_BLOCK], scale, inverse;
        uint32_t largest = 0;
        for (int64_t i = 0; i < QUANT_BLOCK; i++) {
            uint32_t bits;
            line[i] = load(numbers, block * QUANT_BLOCK + i, dtype);
            memcpy(&bits, &line[i], sizeof bits);
            bits &= 0x7fffffffu;
            largest = bits > largest ? bits : largest;
        }
        memcpy(&scale, &largest, sizeof scale);
        inverse = scale > 0x1p-100f && scale < INFINITY ? 127.0f / scale : 0.0f;
        int64_t at = row * x->num_blocks + block;
        int8_t *high = x->high + at * QUANT_BLOCK, *low = x->low + at * QUANT_BLOCK;
        int32_t sum = 0;
        for (int64_t i = 0; i < QUANT_BLOCK; i++) {
            float scaled = line[i] * inverse;
            scaled = scaled == scaled ? scaled : 0.0f; /* NaN of a NaN or infinite input: its scale says so */
            float whole = rintf(scaled), rest = rintf((scaled - whole) * LOW_STEPS);
            high[i] = (int8_t)whole;
            low[i] = (int8_t)rest;
            sum += (int32_t)whole * LOW_STEPS + (int32_t)rest;
        }
        x->scale[at] = scale * (1.0f / (127 * LOW_STEPS));
        x->scaled_sum[at] = x->scale[at] * (float)sum;
        x->minus_8_sums[at] = -8 * sum;
    }
}

INLINE void round_row(const struct linear *op, const struct rows *in, int64_t row, const struct inputs *x, int dtype) {
    float room[op->in_features]; /* for either dtype */
    if (op->norm != NULL)
        pelton_prepare_row(op, in, row, room);
    round_numbers(x, row, op->norm != NULL ? room : row_of(op, in, row), dtype);
}

static void round_inputs(const struct linear *op, const struct rows *in, int64_t row, const struct inputs *x) {
    if (op->dtype == DTYPE_BF16)
        round_row(op, in, row, x, DTYPE_BF16);
    else
        round_row(op, in, row, x, DTYPE_F32);
}

#endif

#if PELTON_ISA < ISA_AVX2

/* ---- plain ---- */

/* A block's numbers as the record has them: [8][16][4]. */
INLINE void plain_unpack(const uint8_t *quants, int kind, int8_t *numbers) {
    int offset = kind == QUANT_Q4_0 ? 8 : 0;
    if (kind == QUANT_Q8_0)
        memcpy(numbers, quants, 512);
    else
        for (int64_t i = 0; i < 256; i++) {
            numbers[i] = (int8_t)((quants[i] & 15) - offset);
            numbers[256 + i] = (int8_t)((quants[i] >> 4) - offset);
        }
}

/* Loops of 64 that any compiler vectorises. */
static void plain_panel(const uint8_t *panel, int kind, const struct inputs *x, int64_t row, int64_t m, float *sums) {
    for (int64_t i = 0; i < m; i++)
        memset(sums + i * SPAN, 0, QUANT_ROWS * sizeof(float));
    for (int64_t block = 0; block < x->num_blocks; block++) {
        const uint8_t *record = panel + block * record_bytes(kind), *scales = record + quant_bytes(kind);
        int8_t numbers[512];
        float scale[QUANT_ROWS], minimum[QUANT_ROWS];
        plain_unpack(record, kind, numbers);
        for (int64_t column = 0; column < QUANT_ROWS; column++) {
            scale[column] = half_to_float(half_at(scales, column));
            minimum[column] = kind == QUANT_Q4_1 ? half_to_float(half_at(scales, QUANT_ROWS + column)) : 0.0f;
        }
        for (int64_t i = 0; i < m; i++) {
            int64_t at = (row + i) * x->num_blocks + block, from = at * QUANT_BLOCK;
            int32_t dots[64] = {0};
            for (int64_t group = 0; group < 8; group++) {
                int16_t factors[64];
                for (int64_t k = 0; k < 4; k++)
                    factors[k] = (int16_t)(x->high[from + group * 4 + k] * LOW_STEPS + x->low[from + group * 4 + k]);
                for (int64_t k = 4; k < 64; k += 4)
                    memcpy(factors + k, factors, 4 * sizeof factors[0]);
                for (int64_t k = 0; k < 64; k++)
                    dots[k] += (int16_t)numbers[group * 64 + k] * factors[k];
            }
            for (int64_t column = 0; column < QUANT_ROWS; column++) {
                const int32_t *four = dots + column * 4;
                float dot = (float)(four[0] + four[1] + four[2] + four[3]) * x->scale[at];
                sums[i * SPAN + column] += dot * scale[column] + minimum[column] * x->scaled_sum[at];
            }
        }
    }
}

static void multiply_panels(const uint8_t *const *panels, int64_t num_panels, int kind, const struct inputs *x, int64_t row,
                           int64_t m, float *sums) {
    for (int64_t n = 0; n < num_panels; n++)
        plain_panel(panels[n], kind, x, row, m, sums + n * QUANT_ROWS);
}

#elif PELTON_ISA < ISA_AVX512_BF16

/* ---- AVX2: half a panel at a time ---- */

/* Signed bytes by signed bytes: vpmaddubsw wants the first unsigned, and its 16-bit sums of two hold 2 * 128 * 127. */
INLINE __m256i avx2_dot(__m256i sums, __m256i weights, __m256i factors) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_sign_epi8(weights, weights), _mm256_sign_epi8(factors, weights));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

INLINE void avx2_half(const uint8_t *panel, int kind, const struct inputs *x, int64_t row, float *sums,
                                        int64_t half) {
    __m256 total = _mm256_setzero_ps();
    __m256i half_byte = _mm256_set1_epi8(15), eight = _mm256_set1_epi8(8);
    for (int64_t block = 0; block < x->num_blocks; block++) {
        const uint8_t *record = panel + block * record_bytes(kind), *quants = record + half * 32;
        const uint8_t *scales = record + quant_bytes(kind) + half * 16;
        int64_t at = row * x->num_blocks + block, from = at * QUANT_BLOCK;
        __m256i high = _mm256_setzero_si256(), low = high;
#pragma GCC unroll 8
        for (int group = 0; group < 8; group++) {
            __m256i weights = _mm256_loadu_si256((const __m256i *)(quants + (kind == QUANT_Q8_0 ? group : group % 4) * 64));
            if (kind != QUANT_Q8_0) {
                weights = _mm256_and_si256(group < 4 ? weights : _mm256_srli_epi16(weights, 4), half_byte);
                if (kind == QUANT_Q4_0)
                    weights = _mm256_sub_epi8(weights, eight);
            }
            high = avx2_dot(high, weights, _mm256_set1_epi32(four_at(x->high + from, group)));
            low = avx2_dot(low, weights, _mm256_set1_epi32(four_at(x->low + from, group)));
        }
        __m256 dot = _mm256_fmadd_ps(_mm256_cvtepi32_ps(high), _mm256_set1_ps(LOW_STEPS), _mm256_cvtepi32_ps(low));
        __m256 scaled = _mm256_mul_ps(dot, _mm256_set1_ps(x->scale[at]));
        total = _mm256_fmadd_ps(scaled, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)scales)), total);
        if (kind == QUANT_Q4_1) {
            __m256 minimum = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(scales + 2 * QUANT_ROWS)));
            total = _mm256_fmadd_ps(minimum, _mm256_set1_ps(x->scaled_sum[at]), total);
        }
    }
    _mm256_storeu_ps(sums + half * 8, total);
}

static void multiply_panels(const uint8_t *const *panels, int64_t num_panels, int kind, const struct inputs *x,
                                            int64_t row, int64_t m, float *sums) {
    for (int64_t half = 0; half < 2 * num_panels; half++)
        for (int64_t i = 0; i < m; i++) {
            const uint8_t *panel = panels[half / 2];
            float *at = sums + i * SPAN + half / 2 * QUANT_ROWS;
            if (kind == QUANT_Q8_0)
                avx2_half(panel, QUANT_Q8_0, x, row + i, at, half % 2);
            else if (kind == QUANT_Q4_0)
                avx2_half(panel, QUANT_Q4_0, x, row + i, at, half % 2);
            else
                avx2_half(panel, QUANT_Q4_1, x, row + i, at, half % 2);
        }
}

#else

/* ---- AVX-512: vpdpbusd, unsigned weights by signed inputs ---- */

/* Numbers 4 g .. 4 g + 3 of 16 rows in vector g, as unsigned bytes: Q8_0 with 128 added, Q4_0 as it is, with 8. */
INLINE void avx512_unpack(const uint8_t *quants, int kind, __m512i weights[8]) {
    if (kind == QUANT_Q8_0) {
#pragma GCC unroll 8
        for (int group = 0; group < 8; group++)
            weights[group] = _mm512_xor_si512(_mm512_loadu_si512(quants + group * 64), _mm512_set1_epi8(-128));
    } else {
        __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
        for (int group = 0; group < 4; group++) {
            __m512i both = _mm512_loadu_si512(quants + group * 64);
            weights[group] = _mm512_and_si512(both, low);
            weights[group + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        }
    }
}

/* m rows by N panels of one kind: the weights of a block are unpacked once for all rows, and each row's numbers are loaded
   once for both panels. */
INLINE void avx512_tile(const uint8_t *const *panels, int N, int kind, const struct inputs *x, int64_t row,
                                            int64_t m, float *sums) {
    __m512 totals[TILE][2];
    for (int64_t i = 0; i < m; i++)
        totals[i][0] = totals[i][1] = _mm512_setzero_ps();
    for (int64_t block = 0; block < x->num_blocks; block++) {
        int64_t at = row * x->num_blocks + block, offset = block * record_bytes(kind);
        __m512i weights[2][8];
        __m512 scale[2], minimum[2];
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) {
            const uint8_t *scales = panels[n] + offset + quant_bytes(kind);
            avx512_unpack(panels[n] + offset, kind, weights[n]);
            scale[n] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales));
            if (kind == QUANT_Q4_1)
                minimum[n] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(scales + 2 * QUANT_ROWS)));
        }
        for (int64_t i = 0; i < m; i++, at += x->num_blocks) {
            /* Takes away the 8 or 128 that were added to each weight. */
            __m512i start = kind == QUANT_Q4_1 ? _mm512_setzero_si512() : _mm512_set1_epi32(x->minus_8_sums[at]);
            if (kind == QUANT_Q8_0)
                start = _mm512_slli_epi32(start, 4);
            __m512i high[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()}, low[2] = {start, start};
#pragma GCC unroll 8
            for (int group = 0; group < 8; group++) {
                __m512i high_four = _mm512_set1_epi32(four_at(x->high + at * QUANT_BLOCK, group));
                __m512i low_four = _mm512_set1_epi32(four_at(x->low + at * QUANT_BLOCK, group));
#pragma GCC unroll 2
                for (int n = 0; n < N; n++) {
                    high[n] = _mm512_dpbusd_epi32(high[n], weights[n][group], high_four);
                    low[n] = _mm512_dpbusd_epi32(low[n], weights[n][group], low_four);
                }
            }
#pragma GCC unroll 2
            for (int n = 0; n < N; n++) {
                __m512 steps = _mm512_set1_ps(LOW_STEPS), total = totals[i][n];
                __m512 dot = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[n]), steps, _mm512_cvtepi32_ps(low[n]));
                total = _mm512_fmadd_ps(_mm512_mul_ps(dot, _mm512_set1_ps(x->scale[at])), scale[n], total);
                if (kind == QUANT_Q4_1)
                    total = _mm512_fmadd_ps(minimum[n], _mm512_set1_ps(x->scaled_sum[at]), total);
                totals[i][n] = total;
            }
        }
    }
    for (int64_t i = 0; i < m; i++)
        for (int n = 0; n < N; n++)
            _mm512_storeu_ps(sums + i * SPAN + n * QUANT_ROWS, totals[i][n]);
}

static void multiply_panels(const uint8_t *const *panels, int64_t num_panels, int kind,
                                                const struct inputs *x, int64_t row, int64_t m, float *sums) {
#define KIND(NAME)                                                        \
    case NAME:                                                            \
        if (m == 1) { /* memory decides: one stream, in order */          \
            for (int64_t n = 0; n < num_panels; n++)                      \
                avx512_tile(panels + n, 1, NAME, x, row, 1, sums + n * QUANT_ROWS); \
        } else if (num_panels == 2)                                       \
            avx512_tile(panels, 2, NAME, x, row, m, sums);                \
        else                                                              \
            avx512_tile(panels, 1, NAME, x, row, m, sums);                \
        break;
    switch (kind) { KIND(QUANT_Q8_0) KIND(QUANT_Q4_0) KIND(QUANT_Q4_1) }
#undef KIND
}

/* 16 numbers of up to 127 to their parts at `at`; returns 254 high + low. What is not finite becomes anything in range. */
INLINE __m512i avx512_split(__m512 numbers, const struct inputs *x, int64_t at) {
    __m512 steps = _mm512_set1_ps(LOW_STEPS), limit = _mm512_set1_ps(127.0f);
    numbers = _mm512_max_ps(_mm512_min_ps(numbers, limit), _mm512_sub_ps(_mm512_setzero_ps(), limit));
    __m512 whole = _mm512_roundscale_ps(numbers, _MM_FROUND_TO_NEAREST_INT);
    __m512i high = _mm512_cvtps_epi32(whole);
    __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_sub_ps(numbers, whole), steps));
    _mm_storeu_si128((__m128i *)(x->high + at), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128((__m128i *)(x->low + at), _mm512_cvtepi32_epi8(low));
    return _mm512_add_epi32(_mm512_mullo_epi32(high, _mm512_set1_epi32(LOW_STEPS)), low);
}

INLINE void avx512_round(const struct inputs *x, int64_t row, const void *numbers, int dtype) {
    __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    for (int64_t block = 0; block < x->num_blocks; block++) {
        int64_t at = row * x->num_blocks + block, from = block * QUANT_BLOCK;
        __m512 first = (__m512)load_lanes(numbers, from, dtype), second = (__m512)load_lanes(numbers, from + 16, dtype);
        __m512i bits = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(first), magnitude),
                                        _mm512_and_si512(_mm512_castps_si512(second), magnitude));
        uint32_t largest = _mm512_reduce_max_epu32(bits);
        float scale;
        memcpy(&scale, &largest, sizeof scale);
        __m512 inverse = _mm512_set1_ps(scale > 0x1p-100f && scale < INFINITY ? 127.0f / scale : 0.0f);
        __m512i sums = _mm512_add_epi32(avx512_split(_mm512_mul_ps(first, inverse), x, at * QUANT_BLOCK),
                                        avx512_split(_mm512_mul_ps(second, inverse), x, at * QUANT_BLOCK + 16));
        int32_t sum = _mm512_reduce_add_epi32(sums);
        x->scale[at] = scale * (1.0f / (127 * LOW_STEPS));
        x->scaled_sum[at] = x->scale[at] * (float)sum;
        x->minus_8_sums[at] = -8 * sum;
    }
}

static void round_inputs(const struct linear *op, const struct rows *in, int64_t row,
                                              const struct inputs *x) {
    float room[op->in_features]; /* for either dtype */
    if (op->norm != NULL)
        pelton_prepare_row(op, in, row, room);
    avx512_round(x, row, op->norm != NULL ? room : row_of(op, in, row), op->dtype);
}

/* Two panels [in / 2][32][2] of bfloat16, dequantized; NULL: zeros. Those `distance` panels further on are fetched. */
static void avx512_dequantize(const uint8_t *const *panels, const int *kinds, int64_t num_blocks,
                                                  int64_t distance, bf16 *result) {
    /* Of 16 even numbers before 16 odd ones: pairs. */
    __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
                                     3, 18, 2, 17, 1, 16, 0);
    /* Byte i of each 32-bit word, as a number. */
    __m512i bytes_of_words[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        bytes_of_words[i] = _mm512_or_si512(
            _mm512_broadcast_i32x4(_mm_setr_epi8(0, -1, -1, -1, 4, -1, -1, -1, 8, -1, -1, -1, 12, -1, -1, -1)), _mm512_set1_epi32(i));
    for (int n = 0; n < 2; n++)
        for (int64_t block = 0; block < num_blocks; block++) {
            bf16 *target = result + block * QUANT_BLOCK * PANEL + n * PANEL;
            if (panels[n] == NULL) {
                for (int64_t pair = 0; pair < QUANT_BLOCK / 2; pair++)
                    _mm512_store_si512(target + pair * 2 * PANEL, _mm512_setzero_si512());
                continue;
            }
            int64_t bytes = record_bytes(kinds[n]), ahead = distance * num_blocks * bytes;
            const uint8_t *record = panels[n] + block * bytes, *scales = record + quant_bytes(kinds[n]);
            for (int64_t line = 0; line < bytes; line += 64)
                _mm_prefetch((const char *)record + ahead + line, _MM_HINT_T1);
            __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales)), minimum;
            __m512i weights[8];
            avx512_unpack(record, kinds[n], weights);
            if (kinds[n] == QUANT_Q4_1)
                minimum = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(scales + 2 * QUANT_ROWS)));
            else
                minimum = _mm512_mul_ps(scale, _mm512_set1_ps(kinds[n] == QUANT_Q8_0 ? -128.0f : -8.0f));
#pragma GCC unroll 8
            for (int group = 0; group < 8; group++) {
                __m512 numbers[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    __m512i whole = _mm512_shuffle_epi8(weights[group], bytes_of_words[i]);
                    numbers[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), scale, minimum);
                }
#pragma GCC unroll 2
                for (int pair = 0; pair < 2; pair++) {
                    __m512i both = (__m512i)_mm512_cvtne2ps_pbh(numbers[2 * pair + 1], numbers[2 * pair]);
                    _mm512_store_si512(target + (group * 2 + pair) * 2 * PANEL, _mm512_permutexvar_epi16(order, both));
                }
            }
        }
}

#endif

/* ---- the seams ---- */

/* What one task computes, for some rows: 32 columns of a part, or 16 of the gate and the 16 of up that belong to them. */
struct span {
    const struct quant_part *part;
    int64_t first, count, column; /* rows of the part, and where they lie in the output */
};

INLINE int64_t span_columns(const struct quant *op) { return op->op.activation == ACTIVATION_NONE ? SPAN : QUANT_ROWS; }

INLINE int64_t num_spans(const struct quant *op) {
    int64_t spans = 0, width = span_columns(op), parts = op->op.activation == ACTIVATION_NONE ? op->num_parts : 1;
    for (int64_t i = 0; i < parts; i++)
        spans += (op->parts[i].num_rows + width - 1) / width;
    return spans;
}

INLINE struct span find_span(const struct quant *op, int64_t index) {
    int64_t width = span_columns(op), column = 0;
    const struct quant_part *part = op->parts;
    for (; index >= (part->num_rows + width - 1) / width; part++) {
        index -= (part->num_rows + width - 1) / width;
        column += part->num_rows;
    }
    int64_t first = index * width;
    return (struct span){part, first, least(width, part->num_rows - first), column + first};
}

static void span_rows(const struct quant *op, const struct inputs *x, struct span span, int64_t first_row, int64_t last_row,
                      char *output, struct turn *turn) {
    const struct quant_part *part = span.part;
    const struct engine *engine = pelton_engine(&op->op);
    int is_gated = op->op.activation != ACTIVATION_NONE;
    int64_t panel_bytes = x->num_blocks * record_bytes(part->kind), panel = span.first / QUANT_ROWS;
    const uint8_t *panels[2] = {part->panels + panel * panel_bytes, part->panels + (panel + 1) * panel_bytes};
    int64_t together = is_gated || span.count > QUANT_ROWS ? 2 : 1;
    if (is_gated) {
        panels[1] = part[1].panels + panel * x->num_blocks * record_bytes(part[1].kind);
        together = part[0].kind == part[1].kind ? 2 : 1;
    }
    size_t row_bytes = (size_t)op->op.output_stride * (op->op.is_logits ? sizeof(float) : size_of(op->op.dtype));
    float sums[TILE * SPAN];
    for (int64_t row = first_row; row < last_row; row += TILE) {
        int64_t m = least(TILE, last_row - row);
        multiply_panels(panels, together, part->kind, x, row, m, sums);
        if (is_gated && together == 1)
            multiply_panels(panels + 1, 1, part[1].kind, x, row, m, sums + QUANT_ROWS);
        if (!may_write(turn)) /* not asked twice: repeatable tasks have one tile */
            return;
        engine->finish(&op->op, sums, m, span.column, span.count, output + (size_t)row * row_bytes, row_bytes);
    }
}

#if PELTON_ISA >= ISA_AVX512_BF16

/* For `pelton_product`, whose panels are the spans here. */
static void make_panel(const void *weight, int64_t index, void *result) {
    const struct quant *op = weight;
    struct span span = find_span(op, index);
    int64_t num_blocks = op->op.in_features / QUANT_BLOCK, panel_bytes = num_blocks * record_bytes(span.part->kind);
    const uint8_t *panels[2] = {span.part->panels + span.first / QUANT_ROWS * panel_bytes, NULL};
    int kinds[2] = {span.part->kind, span.part->kind}, distance = 2;
    if (op->op.activation != ACTIVATION_NONE) {
        distance = 1;
        kinds[1] = span.part[1].kind;
        panels[1] = span.part[1].panels + span.first / QUANT_ROWS * num_blocks * record_bytes(kinds[1]);
    } else if (span.count > QUANT_ROWS) {
        panels[1] = panels[0] + panel_bytes;
    }
    avx512_dequantize(panels, kinds, num_blocks, distance, result);
}

/* Whether spans are the panels of `pelton_product`: each but the last is whole. */
static int has_whole_spans(const struct quant *op) {
    int64_t parts = op->op.activation == ACTIVATION_NONE ? op->num_parts : 1;
    for (int64_t i = 0; i + 1 < parts; i++)
        if (op->parts[i].num_rows % SPAN)
            return 0;
    return 1;
}

#endif

struct quant_call {
    const struct quant *op;
    struct rows in;
    struct inputs x;
    int64_t spans;
    char *output;
};

static void run_round(void *context, int64_t row, struct turn *turn) {
    const struct quant_call *call = context;
    (void)turn;
    round_inputs(&call->op->op, &call->in, row, &call->x);
}

static void run_span(void *context, int64_t index, struct turn *turn) {
    const struct quant_call *call = context;
    int64_t row = index / call->spans * BLOCK_OF_ROWS;
    struct span span = find_span(call->op, index % call->spans);
    span_rows(call->op, &call->x, span, row, least(row + BLOCK_OF_ROWS, call->in.num_rows), call->output, turn);
}

/* Rows -> output [num_rows, output_stride]; `rows` only with a norm. 1: no memory. */
EXPORT int pelton_quant(const struct quant *op, const void *hidden, const void *residual, void *residual_out,
                        const int64_t *rows, int64_t num_rows, void *output) {
    struct rows in = {hidden, residual, residual_out, rows, num_rows};
#if PELTON_ISA >= ISA_AVX512_BF16
    if (num_rows >= MANY_ROWS && op->op.dtype == DTYPE_BF16 && has_whole_spans(op)) {
        struct panel_source source = {make_panel, op};
        return pelton_product(&op->op, &in, output, &source);
    }
#endif
    int64_t num_blocks = op->op.in_features / QUANT_BLOCK;
    size_t blocks = (size_t)(num_rows * num_blocks);
    float *memory = pelton_shared(blocks * (2 * QUANT_BLOCK + 3 * sizeof(float)) + 1);
    if (memory == NULL)
        return 1;
    struct inputs x = {
        .high = (int8_t *)(memory + 3 * blocks), .low = (int8_t *)(memory + 3 * blocks) + blocks * QUANT_BLOCK,
        .scale = memory, .scaled_sum = memory + blocks, .minus_8_sums = (int32_t *)(memory + 2 * blocks),
        .num_blocks = num_blocks,
    };
    struct quant_call call = {op, in, x, num_spans(op), output};
    int64_t row_blocks = (num_rows + BLOCK_OF_ROWS - 1) / BLOCK_OF_ROWS;
    pool_do((struct pool_work){.run = run_round, .context = &call, .num_tasks = num_rows, .has_shares = 1});
    pool_do((struct pool_work){.run = run_span, .context = &call, .context_bytes = num_rows <= TILE ? sizeof call : 0,
                          .num_tasks = call.spans * row_blocks, .has_shares = 1});
    return 0;
}

struct quant_embed_call {
    const struct quant_embed *op;
    const int64_t *ids;
    void *output;
};

static void run_quant_embed(void *context, int64_t i, struct turn *turn) {
    const struct quant_embed_call *call = context;
    const struct quant_embed *op = call->op;
    int64_t num_blocks = op->hidden_size / QUANT_BLOCK, kind = op->part.kind, id = call->ids[i];
    const uint8_t *panel = op->part.panels + id / QUANT_ROWS * num_blocks * record_bytes(kind);
    int64_t row = id % QUANT_ROWS, at = i * op->hidden_size;
    (void)turn;
    for (int64_t block = 0; block < num_blocks; block++) {
        const uint8_t *record = panel + block * record_bytes(kind), *scales = record + quant_bytes(kind);
        float scale = half_to_float(half_at(scales, row));
        float minimum = kind == QUANT_Q4_1 ? half_to_float(half_at(scales, QUANT_ROWS + row)) : 0.0f;
        for (int64_t k = 0; k < QUANT_BLOCK; k++, at++) {
            float number = (float)number_at(record, kind, row, k) * scale + minimum;
            store(call->output, at, op->scale == 1.0f ? number : round_to(number, op->dtype) * op->scale, op->dtype);
        }
    }
}

/* output [num_ids, hidden_size]: rows ids[i], which are in range, rounded as the reference: number, times scale. */
EXPORT void pelton_quant_embed(const struct quant_embed *op, const int64_t *ids, int64_t num_ids, void *output) {
    struct quant_embed_call call = {op, ids, output};
    pool_do((struct pool_work){.run = run_quant_embed, .context = &call, .num_tasks = num_ids, .is_small = num_ids <= 8, .has_shares = 1});
}
