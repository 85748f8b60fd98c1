/* Products with weights that stay in packed blocks, with what stands before and behind them, and rows of an embedding.

   Inputs are rounded to 16 bits in blocks of 32 with a float32 scale each, and kept as two int8: scale * (high + low / 254),
   the largest high being 127. So a block's product is two of integers, exact, and inputs lose less than bfloat16 does. Blocks
   are added up in float32, in order: a row's result is the same whichever rows are computed with it. Every instruction set
   does the same but for the fused multiply-adds of AVX2 and AVX-512.

   From QUANT_MANY_ROWS rows of bfloat16 on, panels are dequantized as they are read where two products of int8 take longer than one of
   the others: to bfloat16 where that has a product (linear_bf16.c), to float32 where there are no products of bytes
   (linear_vec.c). */
#include "quant.h"

#include "lines.h"

#if PELTON_ISA >= ISA_AVX2
#include <immintrin.h>
#endif

/* Products of unsigned and signed bytes, sums of four in one instruction. */
#define HAS_DOT_BYTES (PELTON_ISA == ISA_AVX2_VNNI || PELTON_ISA >= ISA_AVX512_VNNI)
/* Products in 16 bits, where there are none. */
#define HAS_WORDS (PELTON_ISA >= ISA_AVX2 && !HAS_DOT_BYTES)

enum { LOW_STEPS = 254, TILE = QUANT_TILE, SPAN = QUANT_SPAN, BLOCK_OF_ROWS = 128, TASK_SPANS = 8 };

/* Each instruction set has:
   - `multiply_panels`: sums of rows [row, row + m) by one or two panels of one kind: [m][SPAN], 16 a panel. m is at most TILE
   - `round_inputs`: a row of a call, after its norm, to `x`. */

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

/* ---- inputs to two int8 ---- */

typedef int8_t loose_bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

/* LANES numbers of up to 127 to their parts; returns 254 high + low. A NaN becomes 0: it comes of an infinite or NaN input, whose
   block's scale says so. */
INLINE ivec split_numbers(vec numbers, const struct inputs *x, int64_t at) {
    const float magic = 12582912.0f; /* adding it rounds to a whole number */
    numbers = (vec)((ivec)numbers & (numbers == numbers));
    vec whole = (numbers + magic) - magic, rest = ((numbers - whole) * LOW_STEPS + magic) - magic;
    ivec high = __builtin_convertvector(whole, ivec), low = __builtin_convertvector(rest, ivec);
    *(loose_bytes *)(x->high + at) = __builtin_convertvector(high, loose_bytes);
    *(loose_bytes *)(x->low + at) = __builtin_convertvector(low, loose_bytes);
    return high * LOW_STEPS + low;
}

/* The largest magnitude by its bits, so that a NaN wins and makes the scale one. */
INLINE void round_numbers(const struct inputs *x, int64_t row, const void *numbers, int dtype) {
    for (int64_t block = 0; block < x->num_blocks; block++) {
        int64_t at = row * x->num_blocks + block;
        ivec largest = {0}, sums = {0};
        float scale = 0.0f, inverse;
        int32_t bits = 0, sum = 0;
#pragma GCC unroll 8
        for (int64_t i = 0; i < QUANT_BLOCK; i += LANES) {
            ivec magnitude = (ivec)load_lanes(numbers, block * QUANT_BLOCK + i, dtype) & INT32_MAX;
            largest = (ivec)vec_select(magnitude > largest, (vec)magnitude, (vec)largest);
        }
        for (int i = 0; i < LANES; i++)
            bits = largest[i] > bits ? largest[i] : bits;
        memcpy(&scale, &bits, sizeof scale);
        inverse = scale > 0x1p-100f && scale < INFINITY ? 127.0f / scale : 0.0f;
#pragma GCC unroll 8
        for (int64_t i = 0; i < QUANT_BLOCK; i += LANES)
            sums += split_numbers(load_lanes(numbers, block * QUANT_BLOCK + i, dtype) * inverse, x, at * QUANT_BLOCK + i);
        for (int i = 0; i < LANES; i++)
            sum += sums[i];
        for (int i = 0; i < QUANT_BLOCK && HAS_WORDS; i++) { /* 0 2 1 3, as `widen` has the bytes of a weight */
            int64_t from = at * QUANT_BLOCK + (i & ~3) + (i & 1) * 2 + (i >> 1 & 1);
            x->words[at * QUANT_BLOCK + i] = (int16_t)(x->high[from] * LOW_STEPS + x->low[from]);
        }
        x->scale[at] = scale * (1.0f / (127 * LOW_STEPS));
        x->scaled_sum[at] = x->scale[at] * (float)sum;
        x->minus_8_sums[at] = -8 * sum;
    }
}

void pelton_quant_round(const void *numbers, int dtype, int64_t row, const struct inputs *x) {
    if (dtype == DTYPE_BF16)
        round_numbers(x, row, numbers, DTYPE_BF16);
    else
        round_numbers(x, row, numbers, DTYPE_F32);
}

static void round_inputs(const struct linear *op, const struct rows *in, int64_t row, const struct inputs *x) {
    float room[op->in_features]; /* for either dtype */
    const void *numbers = (const char *)in->hidden + (size_t)(row * op->in_features) * size_of(op->dtype);
    if (op->norm != NULL)
        pelton_prepare_row(op, in, row, room);
    pelton_quant_round(op->norm != NULL ? room : numbers, op->dtype, row, x);
}

int64_t pelton_quant_input_bytes(int64_t num_rows, int64_t num_blocks) {
    return num_rows * num_blocks * (QUANT_BLOCK * (2 + (HAS_WORDS ? 2 : 0)) + 3 * (int64_t)sizeof(float)) + 1;
}

struct inputs pelton_quant_inputs(char *memory, int64_t num_rows, int64_t num_blocks) {
    int64_t blocks = num_rows * num_blocks, numbers = blocks * QUANT_BLOCK;
    struct inputs x = {.words = (int16_t *)memory, .num_blocks = num_blocks};
    x.scale = (float *)(memory + numbers * (HAS_WORDS ? 2 : 0));
    x.scaled_sum = x.scale + blocks;
    x.minus_8_sums = (int32_t *)(x.scaled_sum + blocks);
    x.high = (int8_t *)(x.minus_8_sums + blocks);
    x.low = x.high + numbers;
    return x;
}

/* ---- blocks of weights ---- */

enum { PARTS = QUANT_ROWS / LANES }; /* of a panel, LANES columns each */

/* LANES float16. */
INLINE vec load_scales(const uint8_t *scales) {
#if PELTON_ISA >= ISA_AVX512
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales));
#elif PELTON_ISA >= ISA_AVX2
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)scales));
#else
    vec numbers = {0};
    for (int i = 0; i < LANES; i++)
        numbers[i] = half_to_float(half_at(scales, i));
    return numbers;
#endif
}

/* Numbers 4 g .. 4 g + 3 of LANES rows in vector g, as bytes: Q8_0's signed, Q4_0's as they are, with 8. */
INLINE void unpack(const uint8_t *quants, int kind, uvec weights[8]) {
    if (kind == QUANT_Q8_0) {
#pragma GCC unroll 8
        for (int group = 0; group < 8; group++)
            weights[group] = vec_load_bits(quants + group * 64);
    } else {
#pragma GCC unroll 4
        for (int group = 0; group < 4; group++) {
            uvec both = vec_load_bits(quants + group * 64);
            weights[group] = both & 0x0f0f0f0fu;
            weights[group + 4] = (both >> 4) & 0x0f0f0f0fu;
        }
    }
}

#if PELTON_ISA >= ISA_AVX2

/* ---- dot products of bytes ---- */

/* A vector of four bytes of one block's part of one row, in each place. */
INLINE ivec four_bytes(const int8_t *numbers, int64_t index) {
    int32_t four;
    memcpy(&four, numbers + 4 * index, sizeof four);
    return four - (ivec){0};
}

#if HAS_DOT_BYTES

INLINE ivec dot_bytes(ivec sums, uvec weights, ivec factors) {
#if PELTON_ISA >= ISA_AVX512_VNNI
    return (ivec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)factors);
#else
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)factors);
#endif
}

/* As unsigned bytes: Q8_0's with 128 added. */
INLINE void unsign(int kind, uvec weights[8]) {
#pragma GCC unroll 8
    for (int group = 0; group < 8 && kind == QUANT_Q8_0; group++)
        weights[group] ^= 0x80808080u;
}

/* Without an overflow where the number is whatever memory held: of a row that a tile has and the step has not. */
INLINE int32_t times_16(int32_t number) { return (int32_t)((uint32_t)number * 16u); }

/* Weights by a row's block: 254 high + low is what they give. */
INLINE void dot_block(const uvec weights[8], const struct inputs *x, int64_t at, int kind, ivec *high, ivec *low) {
    /* Takes away the 8 or 128 that were added to each weight. */
    int32_t start = kind == QUANT_Q4_1 ? 0 : kind == QUANT_Q4_0 ? x->minus_8_sums[at] : times_16(x->minus_8_sums[at]);
    *high = (ivec){0}, *low = start - (ivec){0};
#pragma GCC unroll 8
    for (int group = 0; group < 8; group++) {
        *high = dot_bytes(*high, weights[group], four_bytes(x->high + at * QUANT_BLOCK, group));
        *low = dot_bytes(*low, weights[group], four_bytes(x->low + at * QUANT_BLOCK, group));
    }
}

#else

/* Products of unsigned and signed bytes, sums of two in 16 bits each. Of weights up to 15 eight such sums fit into 16 bits. */
INLINE ivec dot_pairs(uvec weights, ivec factors) {
#if PELTON_ISA >= ISA_AVX512
    return (ivec)_mm512_maddubs_epi16((__m512i)weights, (__m512i)factors);
#else
    return (ivec)_mm256_maddubs_epi16((__m256i)weights, (__m256i)factors);
#endif
}

INLINE ivec add_pairs(ivec sums, ivec pairs) {
#if PELTON_ISA >= ISA_AVX512
    return (ivec)_mm512_add_epi16((__m512i)sums, (__m512i)pairs);
#else
    return (ivec)_mm256_add_epi16((__m256i)sums, (__m256i)pairs);
#endif
}

/* Both 16-bit numbers of each place, multiplied and added up. */
INLINE ivec dot_words(ivec words, ivec factors) {
#if PELTON_ISA >= ISA_AVX512
    return (ivec)_mm512_madd_epi16((__m512i)words, (__m512i)factors);
#else
    return (ivec)_mm256_madd_epi16((__m256i)words, (__m256i)factors);
#endif
}

typedef int16_t words_vec __attribute__((vector_size(VEC_BYTES)));

#endif

#if HAS_WORDS

/* Weights of a block's part in 16 bits: even and odd bytes of each group apart. */
INLINE void widen(const uint8_t *quants, int kind, ivec words[16]) {
    uvec weights[8];
    unpack(quants, kind, weights);
#pragma GCC unroll 8
    for (int group = 0; group < 8; group++) {
        words_vec both = (words_vec)weights[group];
        words[2 * group] = kind == QUANT_Q8_0 ? (ivec)(both << 8 >> 8) : (ivec)(weights[group] & 0x00ff00ffu);
        words[2 * group + 1] = kind == QUANT_Q8_0 ? (ivec)(both >> 8) : (ivec)((weights[group] >> 8) & 0x00ff00ffu);
    }
}

/* m rows by a panel. The weights of a block are widened once for all rows, so that each of them takes two products and two sums for 32
   weights, whatever the kind: with eight rows an expert's matrices took 0.6 of the time that products of bytes take (EPYC, AVX2). */
INLINE void multiply_tile(const uint8_t *const *panels, int N, int kind, const struct inputs *x, int64_t row, int64_t m,
                          float *sums) {
    vec totals[TILE][PARTS];
    (void)N;
    for (int64_t i = 0; i < m; i++)
        for (int part = 0; part < PARTS; part++)
            totals[i][part] = vec_all(0.0f);
    for (int64_t block = 0; block < x->num_blocks; block++) {
        const uint8_t *record = *panels + block * record_bytes(kind), *scales = record + quant_bytes(kind);
        ivec words[PARTS][16];
        vec scale[PARTS], minimum[PARTS];
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            widen(record + part * VEC_BYTES, kind, words[part]);
            scale[part] = load_scales(scales + part * (VEC_BYTES / 2)), minimum[part] = vec_all(0.0f);
            if (kind == QUANT_Q4_1)
                minimum[part] = load_scales(scales + 2 * QUANT_ROWS + part * (VEC_BYTES / 2));
        }
        int64_t at = row * x->num_blocks + block;
        for (int64_t i = 0; i < m; i++, at += x->num_blocks) {
            const int8_t *factors = (const int8_t *)(x->words + at * QUANT_BLOCK);
            ivec dots[PARTS];
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++)
                dots[part] = (kind == QUANT_Q4_0 ? x->minus_8_sums[at] : 0) - (ivec){0};
#pragma GCC unroll 16
            for (int n = 0; n < 16; n++) {
                ivec factor = four_bytes(factors, n);
#pragma GCC unroll 2
                for (int part = 0; part < PARTS; part++) {
                    dots[part] += dot_words(words[part][n], factor);
                    __asm__("" : "+x"(dots[part])); /* in this order: another one takes more registers than there are */
                }
            }
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++) {
                vec total = totals[i][part] + __builtin_convertvector(dots[part], vec) * x->scale[at] * scale[part];
                totals[i][part] = kind == QUANT_Q4_1 ? total + minimum[part] * x->scaled_sum[at] : total;
            }
        }
    }
    for (int64_t i = 0; i < m; i++)
        for (int part = 0; part < PARTS; part++)
            vec_store(sums + i * SPAN + part * LANES, totals[i][part]);
}

#else

/* m rows by N panels of one kind: the weights of a block are unpacked once for all rows. */
INLINE void multiply_tile(const uint8_t *const *panels, int N, int kind, const struct inputs *x, int64_t row, int64_t m,
                          float *sums) {
    vec totals[TILE][2 * PARTS];
    for (int64_t i = 0; i < m; i++)
        for (int part = 0; part < N * PARTS; part++)
            totals[i][part] = vec_all(0.0f);
    for (int64_t block = 0; block < x->num_blocks; block++)
        for (int part = 0; part < N * PARTS; part++) {
            const uint8_t *record = panels[part / PARTS] + block * record_bytes(kind) + part % PARTS * VEC_BYTES;
            const uint8_t *scales = record + quant_bytes(kind) - part % PARTS * (VEC_BYTES / 2);
            uvec weights[8];
            unpack(record, kind, weights);
#if HAS_DOT_BYTES
            unsign(kind, weights);
#endif
            vec scale = load_scales(scales), minimum = vec_all(0.0f);
            if (kind == QUANT_Q4_1)
                minimum = load_scales(scales + 2 * QUANT_ROWS);
            int64_t at = row * x->num_blocks + block;
            for (int64_t i = 0; i < m; i++, at += x->num_blocks) {
                ivec high, low;
                dot_block(weights, x, at, kind, &high, &low);
                vec dot = __builtin_convertvector(high, vec) * (float)LOW_STEPS + __builtin_convertvector(low, vec);
                vec total = totals[i][part] + dot * x->scale[at] * scale;
                totals[i][part] = kind == QUANT_Q4_1 ? total + minimum * x->scaled_sum[at] : total;
            }
        }
    for (int64_t i = 0; i < m; i++)
        for (int part = 0; part < N * PARTS; part++)
            vec_store(sums + i * SPAN + part * LANES, totals[i][part]);
}

#endif

#if !HAS_DOT_BYTES

/* Weights by one row's block, 254 high + low: a factor serves all parts, so that none leaves its register. Q8_0 has room for two products
   of 8 bits in 16 but no more, so it is multiplied in 16 bits, even and odd bytes apart. */
INLINE void dot_row(const uint8_t *record, const struct inputs *x, int64_t at, int kind, ivec high[PARTS], ivec low[PARTS]) {
    ivec ones = 0x00010001 - (ivec){0}, high_pairs[PARTS], low_pairs[PARTS];
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++)
        high[part] = low[part] = high_pairs[part] = low_pairs[part] = (ivec){0};
#pragma GCC unroll 8
    for (int group = 0; group < 8; group++) {
        if (kind != QUANT_Q8_0 && group == 4)
            break;
        const int8_t *words = (const int8_t *)(x->words + at * QUANT_BLOCK);
        const int8_t *highs = x->high + at * QUANT_BLOCK, *lows = x->low + at * QUANT_BLOCK;
        ivec first = kind == QUANT_Q8_0 ? four_bytes(words, 2 * group) : four_bytes(highs, group);
        ivec second = kind == QUANT_Q8_0 ? four_bytes(words, 2 * group + 1) : four_bytes(highs, group + 4);
        ivec third = kind == QUANT_Q8_0 ? first : four_bytes(lows, group), fourth = kind == QUANT_Q8_0 ? first : four_bytes(lows, group + 4);
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            uvec both = vec_load_bits(record + group * 64 + part * VEC_BYTES);
            if (kind == QUANT_Q8_0) {
                low[part] += dot_words((ivec)((words_vec)both << 8 >> 8), first);
                low[part] += dot_words((ivec)((words_vec)both >> 8), second);
                continue;
            }
            uvec near = both & 0x0f0f0f0fu, far = (both >> 4) & 0x0f0f0f0fu;
            high_pairs[part] = add_pairs(high_pairs[part], add_pairs(dot_pairs(near, first), dot_pairs(far, second)));
            low_pairs[part] = add_pairs(low_pairs[part], add_pairs(dot_pairs(near, third), dot_pairs(far, fourth)));
        }
    }
#pragma GCC unroll 2
    for (int part = 0; part < PARTS && kind != QUANT_Q8_0; part++) {
        high[part] = dot_words(high_pairs[part], ones), low[part] = dot_words(low_pairs[part], ones);
        if (kind == QUANT_Q4_0)
            low[part] += x->minus_8_sums[at];
    }
}

/* A row does not keep the memory busy by itself: fetching ahead saves 6 % with Q4_1 and 19 % with Q8_0 on AVX2 (EPYC 9004). */
enum { FETCH_AHEAD = 2048 };

INLINE void multiply_row(const uint8_t *panel, int kind, const struct inputs *x, int64_t row, float *sums) {
    vec totals[PARTS];
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++)
        totals[part] = vec_all(0.0f);
    for (int64_t block = 0, at = row * x->num_blocks; block < x->num_blocks; block++, at++) {
        const uint8_t *record = panel + block * record_bytes(kind), *scales = record + quant_bytes(kind);
        ivec high[PARTS], low[PARTS];
#pragma GCC unroll 9
        for (int64_t byte = 0; byte < record_bytes(kind); byte += 64)
            __builtin_prefetch(record + FETCH_AHEAD + byte, 0, 3);
        dot_row(record, x, at, kind, high, low);
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            vec dot = __builtin_convertvector(high[part], vec) * (float)LOW_STEPS + __builtin_convertvector(low[part], vec);
            totals[part] += dot * x->scale[at] * load_scales(scales + part * (VEC_BYTES / 2));
            if (kind == QUANT_Q4_1)
                totals[part] += load_scales(scales + 2 * QUANT_ROWS + part * (VEC_BYTES / 2)) * x->scaled_sum[at];
        }
    }
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++)
        vec_store(sums + part * LANES, totals[part]);
}

#endif

INLINE void multiply_panel(const uint8_t *const *panel, int kind, const struct inputs *x, int64_t row, int64_t m, float *sums) {
    if (m > 1)
        multiply_tile(panel, 1, kind, x, row, m, sums);
    else
#if HAS_DOT_BYTES
        multiply_tile(panel, 1, kind, x, row, 1, sums);
#else
        multiply_row(*panel, kind, x, row, sums);
#endif
}

static void multiply_panels(const uint8_t *const *panels, int64_t num_panels, int kind, const struct inputs *x, int64_t row,
                            int64_t m, float *sums) {
    for (int64_t n = 0; n < num_panels; n++) { /* one stream, in order */
        switch (kind) {
        case QUANT_Q8_0:
            multiply_panel(panels + n, QUANT_Q8_0, x, row, m, sums + n * QUANT_ROWS);
            break;
        case QUANT_Q4_0:
            multiply_panel(panels + n, QUANT_Q4_0, x, row, m, sums + n * QUANT_ROWS);
            break;
        case QUANT_Q4_1:
            multiply_panel(panels + n, QUANT_Q4_1, x, row, m, sums + n * QUANT_ROWS);
            break;
        }
    }
}

#else

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

#endif

/* ---- dequantized panels ---- */

#if PELTON_ISA >= ISA_AVX512_BF16

/* Two panels [in / 2][32][2] of bfloat16, dequantized; NULL: zeros. Those `distance` panels further on are fetched. */
static void dequantize(const uint8_t *const *panels, const int *kinds, int64_t num_blocks, int64_t distance, void *to) {
    bf16 *result = to;
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
            vec scale = load_scales(scales), minimum;
            uvec weights[8];
            unpack(record, kinds[n], weights);
            unsign(kinds[n], weights);
            minimum = kinds[n] == QUANT_Q4_1 ? load_scales(scales + 2 * QUANT_ROWS)
                                             : scale * (kinds[n] == QUANT_Q8_0 ? -128.0f : -8.0f);
#pragma GCC unroll 8
            for (int group = 0; group < 8; group++) {
                __m512 numbers[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    __m512i whole = _mm512_shuffle_epi8((__m512i)weights[group], bytes_of_words[i]);
                    numbers[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), (__m512)scale, (__m512)minimum);
                }
#pragma GCC unroll 2
                for (int pair = 0; pair < 2; pair++) {
                    __m512i both = (__m512i)_mm512_cvtne2ps_pbh(numbers[2 * pair + 1], numbers[2 * pair]);
                    _mm512_store_si512(target + (group * 2 + pair) * 2 * PANEL, _mm512_permutexvar_epi16(order, both));
                }
            }
        }
}

#else

/* Two panels as [in][32] of float32, dequantized; NULL: zeros. Those `distance` panels further on are fetched. */
static void dequantize(const uint8_t *const *panels, const int *kinds, int64_t num_blocks, int64_t distance, void *to) {
    for (int n = 0; n < 2; n++)
        for (int64_t block = 0; block < num_blocks; block++) {
            float *target = (float *)to + block * QUANT_BLOCK * PANEL + n * QUANT_ROWS;
            if (panels[n] == NULL) {
                for (int64_t i = 0; i < QUANT_BLOCK; i++)
                    memset(target + i * PANEL, 0, QUANT_ROWS * sizeof(float));
                continue;
            }
            int64_t bytes = record_bytes(kinds[n]);
            const uint8_t *record = panels[n] + block * bytes;
            for (int64_t line = 0; line < bytes; line += 64)
                __builtin_prefetch(record + distance * num_blocks * bytes + line, 0, 2);
            for (int part = 0; part < PARTS; part++, record += VEC_BYTES, target += LANES) {
                const uint8_t *scales = record + quant_bytes(kinds[n]) - part * (VEC_BYTES / 2);
                vec scale = load_scales(scales), minimum = scale * (kinds[n] == QUANT_Q4_0 ? -8.0f : 0.0f);
                uvec weights[8];
                unpack(record, kinds[n], weights);
                if (kinds[n] == QUANT_Q4_1)
                    minimum = load_scales(scales + 2 * QUANT_ROWS);
#pragma GCC unroll 8
                for (int group = 0; group < 8; group++)
#pragma GCC unroll 4
                    for (int i = 0; i < 4; i++) {
                        ivec whole = (ivec)(weights[group] << (24 - 8 * i)) >> 24;
                        vec_store(target + (group * 4 + i) * PANEL, __builtin_convertvector(whole, vec) * scale + minimum);
                    }
            }
        }
}

#endif

/* ---- the fused ops ---- */

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

/* Sums of a span with rows [row, row + m), m at most TILE. */
static void add_span(const struct quant *op, const struct inputs *x, struct span span, int64_t row, int64_t m, float *sums) {
    const struct quant_part *part = span.part;
    int is_gated = op->op.activation != ACTIVATION_NONE;
    int64_t panel_bytes = x->num_blocks * record_bytes(part->kind), panel = span.first / QUANT_ROWS;
    const uint8_t *panels[2] = {part->panels + panel * panel_bytes, part->panels + (panel + 1) * panel_bytes};
    int64_t together = is_gated || span.count > QUANT_ROWS ? 2 : 1;
    if (is_gated) {
        panels[1] = part[1].panels + panel * x->num_blocks * record_bytes(part[1].kind);
        together = part[0].kind == part[1].kind ? 2 : 1;
    }
    multiply_panels(panels, together, part->kind, x, row, m, sums);
    if (is_gated && together == 1)
        multiply_panels(panels + 1, 1, part[1].kind, x, row, m, sums + QUANT_ROWS);
}

static void finish_span(const struct quant *op, struct span span, int64_t row, int64_t m, float *sums, char *output) {
    size_t row_bytes = (size_t)op->op.output_stride * (op->op.is_logits ? sizeof(float) : size_of(op->op.dtype));
    pelton_engine(&op->op)->finish(&op->op, sums, m, span.column, span.count, output + (size_t)row * row_bytes, row_bytes);
}

void pelton_quant_sums(const struct quant *op, const struct inputs *x, int64_t span, int64_t row, int64_t m, float *sums) {
    add_span(op, x, find_span(op, span), row, m, sums);
}

void pelton_quant_panel(const void *weight, int64_t index, void *result) {
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
    dequantize(panels, kinds, num_blocks, distance, result);
}

/* Whether spans are the panels of `pelton_product`: each but the last is whole. */
static int has_whole_spans(const struct quant *op) {
    int64_t parts = op->op.activation == ACTIVATION_NONE ? op->num_parts : 1;
    for (int64_t i = 0; i + 1 < parts; i++)
        if (op->parts[i].num_rows % SPAN)
            return 0;
    return 1;
}

/* Of dequantized panels, where they are faster from QUANT_MANY_ROWS rows on. */
const struct engine *pelton_quant_engine(const struct linear *op) {
#if PELTON_ISA >= ISA_AVX512_BF16
    return op->dtype == DTYPE_BF16 ? &pelton_bf16 : NULL;
#elif PELTON_ISA < ISA_AVX2
    return op->dtype == DTYPE_BF16 ? &pelton_vec_mixed : NULL;
#else
    (void)op;
    return NULL;
#endif
}

struct quant_call {
    const struct quant *op;
    struct rows in;
    struct inputs x;
    int64_t spans, parts; /* of which a task has one */
    char *output;
};

static void run_round(void *context, int64_t row, struct turn *turn) {
    const struct quant_call *call = context;
    (void)turn;
    round_inputs(&call->op->op, &call->in, row, &call->x);
}

/* Few rows: some spans, written together. */
static void run_spans(void *context, int64_t task, struct turn *turn) {
    const struct quant_call *call = context;
    int64_t begin = first_piece(call->spans, call->parts, task), end = first_piece(call->spans, call->parts, task + 1);
    int64_t m = call->in.num_rows;
    float sums[TASK_SPANS][TILE * SPAN];
    for (int64_t index = begin; index < end; index++)
        add_span(call->op, &call->x, find_span(call->op, index), 0, m, sums[index - begin]);
    if (!may_write(turn))
        return;
    for (int64_t index = begin; index < end; index++)
        finish_span(call->op, find_span(call->op, index), 0, m, sums[index - begin], call->output);
}

/* More of them: a span for a block of rows. */
static void run_rows(void *context, int64_t index, struct turn *turn) {
    const struct quant_call *call = context;
    int64_t first = index / call->spans * BLOCK_OF_ROWS, last = least(first + BLOCK_OF_ROWS, call->in.num_rows);
    struct span span = find_span(call->op, index % call->spans);
    float sums[TILE * SPAN];
    (void)turn;
    for (int64_t row = first; row < last; row += TILE) {
        int64_t m = least(TILE, last - row);
        add_span(call->op, &call->x, span, row, m, sums);
        finish_span(call->op, span, row, m, sums, call->output);
    }
}

/* Rows -> output [num_rows, output_stride]; `rows` only with a norm. 1: no memory. */
EXPORT int pelton_quant(const struct quant *op, const void *hidden, const void *residual, void *residual_out,
                        const int64_t *rows, int64_t num_rows, void *output) {
    struct rows in = {hidden, residual, residual_out, rows, num_rows};
    const struct engine *engine = pelton_quant_engine(&op->op);
    if (num_rows >= QUANT_MANY_ROWS && engine != NULL && has_whole_spans(op)) {
        struct panel_source source = {pelton_quant_panel, op, engine};
        return pelton_product(&op->op, &in, output, &source);
    }
    int64_t num_blocks = op->op.in_features / QUANT_BLOCK;
    char *memory = pelton_shared((size_t)pelton_quant_input_bytes(num_rows, num_blocks));
    if (memory == NULL)
        return 1;
    struct inputs x = pelton_quant_inputs(memory, num_rows, num_blocks);
    int64_t spans = num_spans(op), row_blocks = (num_rows + BLOCK_OF_ROWS - 1) / BLOCK_OF_ROWS;
    struct quant_call call = {op, in, x, spans, pool_cut(spans, TASK_SPANS), output};
    pool_do((struct pool_work){.run = run_round, .context = &call, .num_tasks = num_rows, .has_shares = 1});
    if (num_rows <= TILE)
        pool_do((struct pool_work){.run = run_spans, .context = &call, .context_bytes = sizeof call, .num_tasks = call.parts, .has_shares = 1});
    else
        pool_do((struct pool_work){.run = run_rows, .context = &call, .num_tasks = spans * row_blocks, .has_shares = 1});
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
