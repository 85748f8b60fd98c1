"""Compile kernels as far as Triton's own passes go: LLVM and ptxas take four fifths of the time and change no kernel's name.

Python imports it in every process whose path holds this folder (`pelton_rehearsed.py`, and the compilers that it starts).
"""

from __future__ import annotations

from typing import Any

from triton import knobs

SIZES = ("shared", "tmem_size", "global_scratch_size", "profile_scratch_size")


def leave_out_the_assembler(backend: Any, stages: dict[str, Any], *rest: Any) -> None:
    def finish(module: Any, metadata: dict[str, Any]) -> bytes:
        metadata |= dict.fromkeys(SIZES, 0) | {"name": "kernel", "global_scratch_align": 1, "profile_scratch_align": 1}
        return b"no code"

    del stages["llir"], stages["ptx"]
    stages["cubin"] = finish


knobs.runtime.add_stages_inspection_hook = leave_out_the_assembler
