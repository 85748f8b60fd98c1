"""Attention and fused ops in Triton."""
