"""The fused ops in plain torch: what serves where no kernel fits, and what kernels are tested against."""
