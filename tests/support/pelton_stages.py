"""Compile kernels as far as some of Triton's own passes go: the others, LLVM and ptxas take most of the time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

NO_CODE = b"no code"
SIZES = ("shared", "tmem_size", "global_scratch_size", "profile_scratch_size")


def digest_of_stages() -> str:
    """Names what Triton's cache cannot tell apart: this file and the front end without what it repeats."""
    names = ("pelton_stages.py", "pelton_quick_compiler.py")
    return hashlib.sha256(b"".join(Path(__file__).with_name(name).read_bytes() for name in names)).hexdigest()[:16]


def stages_of(kept: Collection[str]) -> Callable[..., None]:
    """For `knobs.runtime.add_stages_inspection_hook`. kept: of the stages "ttir" and "ttgir" those whose passes run. What is
    compiled so is found by no other hook only where Triton's cache is of one's own."""

    def leave_out(backend: Any, stages: dict[str, Any], *rest: Any) -> None:
        as_it_is = lambda module, metadata: module  # noqa: E731
        known = dict(stages)
        stages.clear()
        # Gluon's kernels begin with the second stage.
        stages |= {name: known.get(name, as_it_is) if name in kept else as_it_is for name in ("ttir", "ttgir")}
        stages["cubin"] = _finish

    return leave_out


def _finish(module: Any, metadata: dict[str, Any]) -> bytes:
    metadata |= dict.fromkeys(SIZES, 0) | {"name": "kernel", "global_scratch_align": 1, "profile_scratch_align": 1}
    metadata.setdefault("tensordesc_meta", [])
    return NO_CODE
