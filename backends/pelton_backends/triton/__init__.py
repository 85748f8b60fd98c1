"""Attention and fused seams in Triton."""
