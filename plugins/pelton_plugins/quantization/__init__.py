"""Quantization methods for GPUs: weights in 8-bit floating point, from three forms of checkpoints or rounded as they load."""
