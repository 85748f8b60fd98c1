/* AVX-512 in plain C, for CPUs with AVX2: as many of its intrinsics as the kernels use, so that their code for wider vectors runs in
   tests where no such CPU is. Slow, and exact to Intel's description but for two things: vdpbf16ps keeps numbers below the normal
   ones, and scalef takes whole powers.

   Included before everything else (-include). The compiler's own names are there first, for AVX2 alone; then these take their place,
   and the sets are declared as if the compiler had been told of them. */
#include <immintrin.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EMULATED static inline __attribute__((always_inline, unused))

typedef union {
    float f[16];
    double d[8];
    int32_t i[16];
    uint32_t u[16];
    int64_t q[8];
    int16_t words[32];
    uint16_t w[32];
    int8_t b[64];
    uint8_t c[64];
    __m512 ps;
    __m512i si;
    __m512d pd;
    __m512bh bh;
    __m128 of_four[4];
    __m128i quarter[4];
} emulated;

#define OF_PS(x) ((emulated){.ps = (x)})
#define OF_SI(x) ((emulated){.si = (x)})

/* ---- memory ---- */

EMULATED __m512 emu_loadu_ps(const void *from) {
    emulated r;
    memcpy(&r, from, 64);
    return r.ps;
}
EMULATED __m512i emu_loadu_si512(const void *from) {
    emulated r;
    memcpy(&r, from, 64);
    return r.si;
}
EMULATED void emu_storeu_ps(void *to, __m512 x) { memcpy(to, &x, 64); }
EMULATED void emu_storeu_si512(void *to, __m512i x) { memcpy(to, &x, 64); }
EMULATED __m512i emu_load_si512(const void *from) { return *(const __m512i *)from; } /* a fault where it is not aligned, too */
EMULATED void emu_store_si512(void *to, __m512i x) { *(__m512i *)to = x; }

#define EMULATED_MASKED(name, lanes, number)                                                                                   \
    EMULATED void emu_mask_storeu_##name(void *to, uint32_t mask, emulated x) {                                                \
        for (int lane = 0; lane < (lanes); lane++)                                                                             \
            if (mask >> lane & 1)                                                                                              \
                memcpy((char *)to + lane * (int)sizeof(number), (const char *)&x + lane * sizeof(number), sizeof(number));     \
    }                                                                                                                          \
    EMULATED emulated emu_maskz_loadu_##name(uint32_t mask, const void *from) {                                                \
        emulated r = {.si = {0}};                                                                                              \
        for (int lane = 0; lane < (lanes); lane++)                                                                             \
            if (mask >> lane & 1)                                                                                              \
                memcpy((char *)&r + lane * sizeof(number), (const char *)from + lane * (int)sizeof(number), sizeof(number));   \
        return r;                                                                                                              \
    }
EMULATED_MASKED(32, 16, uint32_t)
EMULATED_MASKED(16, 32, uint16_t)
EMULATED emulated emu_widened(__m256i x) {
    emulated r = {.si = {0}};
    memcpy(&r, &x, 32);
    return r;
}
EMULATED __m256i emu_low(emulated x) {
    __m256i r;
    memcpy(&r, &x, 32);
    return r;
}

/* ---- numbers, one by one ---- */

#define EACH(count) for (int lane = 0; lane < (count); lane++)

EMULATED __m512 emu_fmadd(__m512 a, __m512 b, __m512 c) {
    emulated x = OF_PS(a), y = OF_PS(b), z = OF_PS(c);
    EACH(16) z.f[lane] = __builtin_fmaf(x.f[lane], y.f[lane], z.f[lane]);
    return z.ps;
}
EMULATED __m512 emu_max(__m512 a, __m512 b) { /* the second where one is no number */
    emulated x = OF_PS(a), y = OF_PS(b);
    EACH(16) y.f[lane] = x.f[lane] > y.f[lane] ? x.f[lane] : y.f[lane];
    return y.ps;
}
EMULATED float emu_rounded(float x, int how) { return (how & 3) == 1 ? floorf(x) : rintf(x); }
EMULATED __m512 emu_roundscale(__m512 a, int how) {
    emulated x = OF_PS(a);
    EACH(16) x.f[lane] = emu_rounded(x.f[lane], how);
    return x.ps;
}
EMULATED __m512 emu_reduce(__m512 a, int how) {
    emulated x = OF_PS(a);
    EACH(16) x.f[lane] = isinf(x.f[lane]) ? 0.0f : x.f[lane] - emu_rounded(x.f[lane], how);
    return x.ps;
}
EMULATED __m512 emu_scalef(__m512 a, __m512 b) {
    emulated x = OF_PS(a), y = OF_PS(b);
    EACH(16) {
        float power = floorf(y.f[lane]);
        x.f[lane] = power != power ? power : x.f[lane] * (float)exp2((double)(power < -400.0f ? -400.0f : power > 400.0f ? 400.0f : power));
    }
    return x.ps;
}
EMULATED uint16_t emu_compared(__m512 a, __m512 b, int how) {
    emulated x = OF_PS(a), y = OF_PS(b);
    unsigned mask = 0;
    EACH(16) mask |= (unsigned)(how == _CMP_GT_OQ ? x.f[lane] > y.f[lane] : x.f[lane] < y.f[lane]) << lane;
    return (uint16_t)mask;
}
EMULATED float emu_reduce_add(__m512 a) { /* halves onto each other, as the compiler's */
    emulated x = OF_PS(a);
    for (int half = 8; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++)
            x.f[lane] += x.f[lane + half];
    return x.f[0];
}
EMULATED float emu_reduce_max(__m512 a) {
    emulated x = OF_PS(a);
    for (int half = 8; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++)
            x.f[lane] = x.f[lane] > x.f[lane + half] ? x.f[lane] : x.f[lane + half];
    return x.f[0];
}
EMULATED __m512 emu_masked_ps(__m512 otherwise, uint32_t mask, __m512 a) {
    emulated x = OF_PS(a), r = OF_PS(otherwise);
    EACH(16) if (mask >> lane & 1) r.f[lane] = x.f[lane];
    return r.ps;
}
EMULATED emulated emu_compress(uint32_t mask, emulated x) {
    emulated r = {.si = {0}};
    int count = 0;
    EACH(16) if (mask >> lane & 1) r.u[count++] = x.u[lane];
    return r;
}
EMULATED uint16_t emu_signs(__m512i a) {
    emulated x = OF_SI(a);
    unsigned mask = 0;
    EACH(16) mask |= (x.u[lane] >> 31) << lane;
    return (uint16_t)mask;
}

/* ---- integers ---- */

EMULATED __m512i emu_slli_epi32(__m512i a, unsigned count) {
    emulated x = OF_SI(a);
    EACH(16) x.u[lane] <<= count;
    return x.si;
}
EMULATED __m512i emu_add_epi16(__m512i a, __m512i b) {
    emulated x = OF_SI(a), y = OF_SI(b);
    EACH(32) x.w[lane] = (uint16_t)(x.w[lane] + y.w[lane]);
    return x.si;
}
EMULATED __m512i emu_add_epi32(__m512i a, __m512i b) {
    emulated x = OF_SI(a), y = OF_SI(b);
    EACH(16) x.u[lane] += y.u[lane];
    return x.si;
}
EMULATED __m512 emu_cvtepi32_ps(__m512i a) {
    emulated x = OF_SI(a), r;
    EACH(16) r.f[lane] = (float)x.i[lane];
    return r.ps;
}
EMULATED __m512i emu_cvtepu16_epi32(__m256i a) {
    emulated x = emu_widened(a), r;
    EACH(16) r.u[lane] = x.w[lane];
    return r.si;
}
EMULATED int emu_saturated(int x) { return x > 32767 ? 32767 : x < -32768 ? -32768 : x; }
EMULATED __m512i emu_maddubs(__m512i a, __m512i b) {
    emulated x = OF_SI(a), y = OF_SI(b), r;
    EACH(32)
    r.words[lane] = (int16_t)emu_saturated(x.c[2 * lane] * y.b[2 * lane] + x.c[2 * lane + 1] * y.b[2 * lane + 1]);
    return r.si;
}
EMULATED __m512i emu_madd(__m512i a, __m512i b) {
    emulated x = OF_SI(a), y = OF_SI(b), r;
    EACH(16)
    r.u[lane] = (uint32_t)(x.words[2 * lane] * y.words[2 * lane]) + (uint32_t)(x.words[2 * lane + 1] * y.words[2 * lane + 1]);
    return r.si;
}
EMULATED emulated emu_dpbusd(emulated sums, emulated a, emulated b, int lanes) {
    EACH(lanes) for (int i = 0; i < 4; i++) sums.i[lane] += a.c[4 * lane + i] * b.b[4 * lane + i];
    return sums;
}

/* ---- order ---- */

EMULATED __m512i emu_permutexvar_epi16(__m512i order, __m512i a) {
    emulated x = OF_SI(a), o = OF_SI(order), r;
    EACH(32) r.w[lane] = x.w[o.w[lane] & 31];
    return r.si;
}
EMULATED __m512i emu_permutex2var_epi16(__m512i a, __m512i order, __m512i b) {
    emulated x = OF_SI(a), y = OF_SI(b), o = OF_SI(order), r;
    EACH(32) r.w[lane] = (o.w[lane] & 32 ? y : x).w[o.w[lane] & 31];
    return r.si;
}
EMULATED __m512 emu_permutex2var_ps(__m512 a, __m512i order, __m512 b) {
    emulated x = OF_PS(a), y = OF_PS(b), o = OF_SI(order), r;
    EACH(16) r.f[lane] = (o.u[lane] & 16 ? y : x).f[o.u[lane] & 15];
    return r.ps;
}
EMULATED __m512i emu_shuffle_epi8(__m512i a, __m512i order) {
    emulated x = OF_SI(a), o = OF_SI(order), r;
    EACH(64) r.c[lane] = o.c[lane] & 128 ? 0 : x.c[(lane & 48) + (o.c[lane] & 15)];
    return r.si;
}
EMULATED __m512i emu_shuffle_quarters(__m512i a, __m512i b, int how) {
    emulated x = OF_SI(a), y = OF_SI(b), r;
    r.quarter[0] = x.quarter[how & 3];
    r.quarter[1] = x.quarter[how >> 2 & 3];
    r.quarter[2] = y.quarter[how >> 4 & 3];
    r.quarter[3] = y.quarter[how >> 6 & 3];
    return r.si;
}
/* Of each quarter the lower or the upper half, one number of a and one of b in turn. */
#define EMULATED_UNPACK(name, field, each)                                                                                     \
    EMULATED __m512i emu_unpack_##name(__m512i a, __m512i b, int is_high) {                                                    \
        emulated x = OF_SI(a), y = OF_SI(b), r;                                                                                \
        for (int quarter = 0; quarter < 4; quarter++)                                                                          \
            for (int i = 0; i < (each) / 2; i++) {                                                                             \
                int from = quarter * (each) + i + is_high * ((each) / 2), to = quarter * (each) + 2 * i;                       \
                r.field[to] = x.field[from];                                                                                   \
                r.field[to + 1] = y.field[from];                                                                               \
            }                                                                                                                  \
        return r.si;                                                                                                           \
    }
EMULATED_UNPACK(16, w, 8)
EMULATED_UNPACK(32, u, 4)
EMULATED_UNPACK(64, q, 2)

/* ---- halves and bfloat16 ---- */

EMULATED __m512 emu_cvtph_ps(__m256i a) {
    __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(a)), high = _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1));
    emulated r;
    memcpy(r.f, &low, 32);
    memcpy(r.f + 8, &high, 32);
    return r.ps;
}
EMULATED uint16_t emu_bf16(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
EMULATED __m256i emu_cvtneps_pbh(__m512 a) {
    emulated x = OF_PS(a), r = {.si = {0}};
    EACH(16) r.w[lane] = emu_bf16(x.f[lane]);
    return emu_low(r);
}
EMULATED __m512bh emu_cvtne2ps_pbh(__m512 high, __m512 low) {
    emulated x = OF_PS(low), y = OF_PS(high), r;
    EACH(16) {
        r.w[lane] = emu_bf16(x.f[lane]);
        r.w[lane + 16] = emu_bf16(y.f[lane]);
    }
    return r.bh;
}
EMULATED __m512 emu_dpbf16(__m512 sums, __m512bh a, __m512bh b) {
    emulated s = OF_PS(sums), x = {.bh = a}, y = {.bh = b};
    EACH(16) for (int i = 1; i >= 0; i--) { /* the second of a pair first */
        emulated p, q;
        p.u[0] = (uint32_t)x.w[2 * lane + i] << 16;
        q.u[0] = (uint32_t)y.w[2 * lane + i] << 16;
        s.f[lane] += p.f[0] * q.f[0];
    }
    return s.ps;
}

/* ---- the names ---- */

EMULATED __m512 emu_set1_ps(float x) {
    emulated r;
    EACH(16) r.f[lane] = x;
    return r.ps;
}
EMULATED __m512i emu_set1_epi32(int x) {
    emulated r;
    EACH(16) r.i[lane] = x;
    return r.si;
}
EMULATED __m512i emu_set1_epi16(int x) {
    emulated r;
    EACH(32) r.words[lane] = (int16_t)x;
    return r.si;
}
EMULATED __m512i emu_broadcast_i32x4(__m128i x) { return (emulated){.quarter = {x, x, x, x}}.si; }
#define EMU_ALIKE(a, b, c, d, e, f, g, h) h, g, f, e, d, c, b, a

#undef _mm512_setr_epi32
#undef _mm512_roundscale_ps
#undef _mm512_reduce_ps
#undef _mm512_cmp_ps_mask
#undef _mm512_shuffle_i32x4
#undef _mm512_shuffle_f32x4
#undef _mm512_slli_epi32
#undef _mm256_dpbusd_avx_epi32
#define _mm512_loadu_ps(from) emu_loadu_ps(from)
#define _mm512_storeu_ps(to, x) emu_storeu_ps(to, x)
#define _mm512_loadu_si512(from) emu_loadu_si512(from)
#define _mm512_load_si512(from) emu_load_si512(from)
#define _mm512_storeu_si512(to, x) emu_storeu_si512(to, x)
#define _mm512_store_si512(to, x) emu_store_si512(to, x)
#define _mm512_maskz_loadu_epi16(mask, from) (emu_maskz_loadu_16(mask, from).si)
#define _mm512_mask_storeu_epi16(to, mask, x) emu_mask_storeu_16(to, mask, OF_SI(x))
#define _mm512_mask_storeu_epi32(to, mask, x) emu_mask_storeu_32(to, mask, OF_SI(x))
#define _mm512_mask_storeu_ps(to, mask, x) emu_mask_storeu_32(to, mask, OF_PS(x))
#define _mm256_maskz_loadu_epi16(mask, from) emu_low(emu_maskz_loadu_16((uint16_t)(mask), from))
#define _mm256_mask_storeu_epi16(to, mask, x) emu_mask_storeu_16(to, (uint16_t)(mask), emu_widened(x))
#define _mm512_set1_ps(x) emu_set1_ps(x)
#define _mm512_setzero_ps() emu_set1_ps(0.0f)
#define _mm512_setzero_si512() emu_set1_epi32(0)
#define _mm512_set1_epi32(x) emu_set1_epi32(x)
#define _mm512_set1_epi16(x) emu_set1_epi16(x)
#define _mm512_setr_epi32(...) ((emulated){.i = {__VA_ARGS__}}.si)
#define _mm512_set_epi32(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)                                                       \
    _mm512_setr_epi32(EMU_ALIKE(i, j, k, l, m, n, o, p), EMU_ALIKE(a, b, c, d, e, f, g, h))
#define _mm512_set_epi16(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x, y, z, A, B, C, D, E, F)       \
    ((emulated){.words = {EMU_ALIKE(y, z, A, B, C, D, E, F), EMU_ALIKE(q, r, s, t, u, v, w, x), EMU_ALIKE(i, j, k, l, m, n, o, p), \
                      EMU_ALIKE(a, b, c, d, e, f, g, h)}}                                                                      \
         .si)
#define _mm512_add_ps(a, b) ((__m512)((__m512)(a) + (__m512)(b)))
#define _mm512_sub_ps(a, b) ((__m512)((__m512)(a) - (__m512)(b)))
#define _mm512_mul_ps(a, b) ((__m512)((__m512)(a) * (__m512)(b)))
#define _mm512_div_ps(a, b) ((__m512)((__m512)(a) / (__m512)(b)))
#define _mm512_fmadd_ps(a, b, c) emu_fmadd(a, b, c)
#define _mm512_fnmadd_ps(a, b, c) emu_fmadd(-(__m512)(a), b, c)
#define _mm512_max_ps(a, b) emu_max(a, b)
#define __builtin_ia32_maxps512_mask(a, b, otherwise, mask, rounding) ((__typeof__(a))emu_max((__m512)(a), (__m512)(b)))
#define _mm512_mask_add_ps(old, mask, a, b) emu_masked_ps(old, mask, _mm512_add_ps(a, b))
#define _mm512_mask_mul_ps(old, mask, a, b) emu_masked_ps(old, mask, _mm512_mul_ps(a, b))
#define _mm512_mask_mov_ps(old, mask, a) emu_masked_ps(old, mask, a)
#define _mm512_roundscale_ps(a, how) emu_roundscale(a, how)
#define _mm512_reduce_ps(a, how) emu_reduce(a, how)
#define _mm512_scalef_ps(a, b) emu_scalef(a, b)
#define _mm512_cmp_ps_mask(a, b, how) emu_compared(a, b, how)
#define _mm512_reduce_add_ps(a) emu_reduce_add(a)
#define _mm512_reduce_max_ps(a) emu_reduce_max(a)
#define _mm512_maskz_compress_ps(mask, a) (emu_compress(mask, OF_PS(a)).ps)
#define _mm512_maskz_compress_epi32(mask, a) (emu_compress(mask, OF_SI(a)).si)
#define _mm512_movepi32_mask(a) emu_signs(a)
#define _mm512_castsi512_ps(a) ((__m512)(a))
#define _mm512_and_si512(a, b) ((__m512i)((__m512i)(a) & (__m512i)(b)))
#define _mm512_or_si512(a, b) ((__m512i)((__m512i)(a) | (__m512i)(b)))
#define _mm512_slli_epi32(a, count) emu_slli_epi32(a, count)
#define _mm512_add_epi16(a, b) emu_add_epi16(a, b)
#define _mm512_add_epi32(a, b) emu_add_epi32(a, b)
#define _mm512_cvtepi32_ps(a) emu_cvtepi32_ps(a)
#define _mm512_cvtepu16_epi32(a) emu_cvtepu16_epi32(a)
#define _mm512_maddubs_epi16(a, b) emu_maddubs(a, b)
#define _mm512_madd_epi16(a, b) emu_madd(a, b)
#define _mm512_dpbusd_epi32(sums, a, b) (emu_dpbusd(OF_SI(sums), OF_SI(a), OF_SI(b), 16).si)
#define _mm256_dpbusd_avx_epi32(sums, a, b) emu_low(emu_dpbusd(emu_widened(sums), emu_widened(a), emu_widened(b), 8))
#define _mm512_permutexvar_epi16(order, a) emu_permutexvar_epi16(order, a)
#define _mm512_permutex2var_epi16(a, order, b) emu_permutex2var_epi16(a, order, b)
#define _mm512_permutex2var_ps(a, order, b) emu_permutex2var_ps(a, order, b)
#define _mm512_shuffle_epi8(a, order) emu_shuffle_epi8(a, order)
#define _mm512_shuffle_i32x4(a, b, how) emu_shuffle_quarters(a, b, how)
#define _mm512_shuffle_f32x4(a, b, how) ((__m512)emu_shuffle_quarters((__m512i)(a), (__m512i)(b), how))
#define _mm512_broadcast_i32x4(a) emu_broadcast_i32x4(a)
#define _mm512_unpacklo_epi16(a, b) emu_unpack_16(a, b, 0)
#define _mm512_unpackhi_epi16(a, b) emu_unpack_16(a, b, 1)
#define _mm512_unpacklo_epi32(a, b) emu_unpack_32(a, b, 0)
#define _mm512_unpackhi_epi32(a, b) emu_unpack_32(a, b, 1)
#define _mm512_unpacklo_epi64(a, b) emu_unpack_64(a, b, 0)
#define _mm512_unpackhi_epi64(a, b) emu_unpack_64(a, b, 1)
#define _mm512_unpacklo_ps(a, b) ((__m512)emu_unpack_32((__m512i)(a), (__m512i)(b), 0))
#define _mm512_unpackhi_ps(a, b) ((__m512)emu_unpack_32((__m512i)(a), (__m512i)(b), 1))
#define _mm512_unpacklo_pd(a, b) ((__m512d)emu_unpack_64((__m512i)(a), (__m512i)(b), 0))
#define _mm512_unpackhi_pd(a, b) ((__m512d)emu_unpack_64((__m512i)(a), (__m512i)(b), 1))
#define _mm512_cvtph_ps(a) emu_cvtph_ps(a)
#define _mm512_cvtneps_pbh(a) ((__m256bh)emu_cvtneps_pbh(a))
#define _mm512_cvtne2ps_pbh(a, b) emu_cvtne2ps_pbh(a, b)
#define _mm512_dpbf16_ps(sums, a, b) emu_dpbf16(sums, a, b)

/* The kernels' own are hints which registers hold what. */
#define __asm__(...)

#if PELTON_ISA >= 3
#define __AVX512F__ 1
#define __AVX512DQ__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#endif
