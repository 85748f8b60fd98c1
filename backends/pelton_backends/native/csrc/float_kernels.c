/* Gives the base the kernels in float32 arithmetic, when their library is loaded. */
#include "float_kernels.h"

#if PELTON_ISA >= ISA_AVX512_BF16
static __attribute__((constructor)) void give(void) {
    pelton_take_float(&(struct float_kernels){&pelton_vec_f32, &pelton_vec_bf16, pelton_decode, pelton_prefill});
}
#endif
