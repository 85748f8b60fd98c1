"""Layers with states: what each kind computes for a row of one token and for rows of more, one family of kernels a file."""
