"""Common parts of the platforms of GPUs."""
