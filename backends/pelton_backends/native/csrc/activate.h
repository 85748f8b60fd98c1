/* What stands between the matrices of an MLP. */
#ifndef PELTON_ACTIVATE_H
#define PELTON_ACTIVATE_H

#include "linear.h"
#include "lines.h"

INLINE vec silu(vec x) { return x / (1.0f + vec_exp(-x)); }

INLINE vec gelu(vec x) { return 0.5f * x * (1.0f + vec_erf(x * 0.70710678f)); }

INLINE vec gelu_tanh(vec x) { return 0.5f * x * (1.0f + vec_tanh(0.79788456f * (x + 0.044715f * x * x * x))); }

INLINE vec activate(vec x, int activation) {
    return activation == ACTIVATION_SILU ? silu(x) : activation == ACTIVATION_GELU ? gelu(x) : gelu_tanh(x);
}

#endif
