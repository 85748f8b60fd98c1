"""Sampling in plain torch: for steps whose rows ask for more than a kernel serves, and what kernels are tested against."""
