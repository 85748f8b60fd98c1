"""Compile kernels to nothing: which kernels there are is known before a line of one is read.

Python imports it in every process whose path holds this folder (`pelton_rehearsed.py`, and the compilers that it starts). That
kernels compile is for test_machine_code.py to say, and that Triton's interpreter runs them for the other tests.
"""

from __future__ import annotations

from typing import Any

from pelton_stages import stages_of
from triton import knobs
from triton.compiler.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import cache


def _no_ir(*source: Any) -> str:
    return ""


for _kind in (ASTSource, GluonASTSource):
    _kind.make_ir = _no_ir
knobs.runtime.add_stages_inspection_hook = stages_of(())
cache.triton_key = lambda: "this one"  # else a look at all of Triton in each process
