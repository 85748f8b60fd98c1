/* Small matrix products over packed panels, one engine per instruction set.

   An engine turns PANEL rows of a matrix into a panel, and adds A [m, k] times a panel to C [m, PANEL] float32:
   - `floats_*`, here: operands float32, panel [k][PANEL]. Vectors of eight by the compiler's extension: AVX2 where the caller
     has that target, pairs of four elsewhere.
   - `avx512_*`, in tile_avx512.h: operands bfloat16, panel [k / 2][PANEL][2], two products an instruction (vdpbf16ps). Sums are
     float32.
   `rows` of a panel become its columns (weights, keys); `cols` of it keep their place (values). */
#ifndef PELTON_TILE_H
#define PELTON_TILE_H

#include "common.h"

typedef float vec8 __attribute__((vector_size(32)));

/* ---- float32 ---- */

INLINE void floats_pack_rows(const void *const *rows, int64_t k, float *panel, int dtype) {
    for (int64_t column = 0; column < PANEL; column++)
        for (int64_t i = 0; i < k; i++)
            panel[i * PANEL + column] = load(rows[column], i, dtype);
}

/* Numbers [first, first + count) of `k` rows. */
INLINE void floats_pack_cols(const void *const *rows, int64_t k, int64_t first, int64_t count, float *panel, int dtype) {
    for (int64_t i = 0; i < k; i++) {
        for (int64_t column = 0; column < count; column++)
            panel[i * PANEL + column] = load(rows[i], first + column, dtype);
        for (int64_t column = count; column < PANEL; column++)
            panel[i * PANEL + column] = 0.0f;
    }
}

/* M rows of A by 16 columns: with M = 6, 12 vectors of sums, 2 of the panel and one of A fill AVX2's 16 registers. */
INLINE void floats_block(const float *a, int64_t lda, const float *panel, float *c, int64_t ldc, int64_t k, int M) {
    vec8 sums[6][2];
    for (int row = 0; row < M; row++) {
        memcpy(&sums[row][0], c + row * ldc, sizeof(vec8));
        memcpy(&sums[row][1], c + row * ldc + 8, sizeof(vec8));
    }
    for (int64_t i = 0; i < k; i++) {
        vec8 low, high;
        memcpy(&low, panel + i * PANEL, sizeof low);
        memcpy(&high, panel + i * PANEL + 8, sizeof high);
#pragma GCC unroll 6
        for (int row = 0; row < M; row++) {
            float factor = a[row * lda + i];
            sums[row][0] += low * factor;
            sums[row][1] += high * factor;
        }
    }
    for (int row = 0; row < M; row++) {
        memcpy(c + row * ldc, &sums[row][0], sizeof(vec8));
        memcpy(c + row * ldc + 8, &sums[row][1], sizeof(vec8));
    }
}

INLINE void floats_multiply(const float *a, int64_t lda, const float *panel, float *c, int64_t ldc, int64_t m, int64_t k) {
    for (int64_t half = 0; half < PANEL; half += 16) {
        int64_t row = 0;
        for (; row + 6 <= m; row += 6)
            floats_block(a + row * lda, lda, panel + half, c + row * ldc + half, ldc, k, 6);
        for (; row + 3 <= m; row += 3)
            floats_block(a + row * lda, lda, panel + half, c + row * ldc + half, ldc, k, 3);
        for (; row < m; row++)
            floats_block(a + row * lda, lda, panel + half, c + row * ldc + half, ldc, k, 1);
    }
}

#endif
