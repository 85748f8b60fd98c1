"""Fused ops (`pelton.ops.interface`), one kernel family a file; families of several files have a folder."""
