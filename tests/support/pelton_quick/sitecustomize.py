"""Compile kernels to nothing: which kernels there are is known before a line of one is read.

Python imports it in every process whose path holds this folder (`pelton_rehearsed.py`, and the compilers that it starts). Of kernels
that differ in numbers alone one is read by Triton's compiler all the same, whichever process meets it first, and has its first
representation: what Triton's interpreter takes for the other tests is not always what the compiler takes.
"""

from __future__ import annotations

import hashlib
import os
import traceback
from pathlib import Path
from typing import Any

from pelton_quick_compiler import quicken
from pelton_stages import stages_of
from triton import knobs
from triton.compiler.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import cache

READ = "PELTON_TEST_READ_KERNELS"
"""Names the folder that has a file for each kernel that was read, which is kept from run to run."""
REFUSED = "PELTON_TEST_REFUSED_KERNELS"
"""Names the folder that has a file for each that was refused: a start that compiles ahead leaves these to the first launch, of which
there is none here."""


def _path_of(source: Any) -> Path:
    """Numbers are left out, which are sizes and strides; flags, words, what is None, types of arguments and the code, that of all
    functions that it calls too, are not."""
    constants = [
        (place, None if type(value) in (int, float) else str(value)) for place, value in source.constants.items()
    ]
    of = source.fn.fn.__module__, source.name, source.fn.cache_key, sorted(constants), [*source.signature.items()]
    return Path(os.environ[READ], hashlib.sha256(repr(of).encode()).hexdigest())


def _read_once(kind: Any) -> None:
    make_ir = kind.make_ir

    def read(source: Any, *rest: Any) -> str:
        path = _path_of(source)
        if not path.exists():
            try:
                make_ir(source, *rest)
            except Exception:
                Path(os.environ[REFUSED], path.name).write_text(f"{source.name}: {traceback.format_exc()}")
                raise
            path.touch()
        return ""

    kind.make_ir = read


quicken()
for _kind in (GluonASTSource, ASTSource):
    _read_once(_kind)
knobs.runtime.add_stages_inspection_hook = stages_of(())
cache.triton_key = lambda: "this one"  # else a look at all of Triton in each process
