"""Paged attention kernels, one family a file."""
