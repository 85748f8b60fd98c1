"""Compile kernels to Triton's first representation alone: no pass behind it changes which kernels there are.

Python imports it in every process whose path holds this folder (`pelton_rehearsed.py`, and the compilers that it starts).
"""

from __future__ import annotations

from pelton_stages import stages_of
from triton import knobs

knobs.runtime.add_stages_inspection_hook = stages_of(())
