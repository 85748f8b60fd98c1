/* Kernels in float32 arithmetic. Where bfloat16 has its own, most models do without these: they are a library beside the base then
   (build.py), loaded for ops that ask for it. */
#ifndef PELTON_FLOAT_KERNELS_H
#define PELTON_FLOAT_KERNELS_H

#include "attention.h"
#include "linear.h"

#if PELTON_ISA >= ISA_AVX512_BF16
struct float_kernels {
    const struct engine *f32, *bf16;
    attend_fn decode, prefill;
};

/* All NULL before the library is loaded. */
extern struct float_kernels pelton_float;

void pelton_take_float(const struct float_kernels *kernels);
#else
static const struct {
    const struct engine *f32, *bf16;
    attend_fn decode, prefill;
} pelton_float = {&pelton_vec_f32, &pelton_vec_bf16, pelton_decode, pelton_prefill};
#endif

#endif
