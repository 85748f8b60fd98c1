/* What stands between the matrices of an MLP. */
#ifndef PELTON_ACTIVATE_H
#define PELTON_ACTIVATE_H

#include "linear.h"
#include "lines.h"

INLINE vec silu(vec x) { return x / (1.0f + vec_exp(-x)); }

static __attribute__((noinline, unused)) vec gelu(vec x, int activation) {
    if (activation == ACTIVATION_GELU_TANH)
        return 0.5f * x * (1.0f + vec_tanh(0.79788456f * (x + 0.044715f * x * x * x)));
    for (int i = 0; i < LANES; i++)
        x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
    return x;
}

INLINE vec activate(vec x, int activation) { return activation == ACTIVATION_SILU ? silu(x) : gelu(x, activation); }

#endif
