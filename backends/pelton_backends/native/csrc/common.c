/* Which instruction set runs, and scratch memory. */
#include "common.h"

static int forced_isa = -1;

static int best_isa(void) {
#if PELTON_X86
    __builtin_cpu_init();
    int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                     __builtin_cpu_supports("avx512bf16");
    return has_avx2 && has_avx512 ? ISA_AVX512 : has_avx2 ? ISA_AVX2 : ISA_PLAIN;
#else
    return ISA_PLAIN;
#endif
}

EXPORT int pelton_isa(void) {
    static int best = -1;
    if (forced_isa >= 0)
        return forced_isa;
    if (best < 0)
        best = best_isa();
    return best;
}

/* For tests: run this set from now on, or -1 for the best. Returns the one in use; a set that the CPU lacks is refused. */
EXPORT int pelton_force_isa(int isa) {
    forced_isa = isa > best_isa() ? -1 : isa;
    return pelton_isa();
}

void *pelton_scratch(size_t bytes) {
    static __thread void *memory;
    static __thread size_t size;
    if (bytes > size) {
        free(memory);
        size = (bytes + 4095) / 4096 * 4096;
        memory = aligned_alloc(64, size);
        if (memory == NULL)
            size = 0;
    }
    return memory;
}
