"""Fused seams (`pelton.ops.interface`), one kernel family a file."""
