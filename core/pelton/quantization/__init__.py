"""Quantization methods: their interface, plain weights, and the common part of those with packed blocks."""
