"""Attention and products for CPUs in a few C files, compiled when they are first used."""
