"""Instruction sets that C kernels are tested with here."""

from __future__ import annotations

from collections.abc import Iterator

from pelton_backends.native import library
from pelton_backends.native.build import CannotBuildError, available_sets


def _available() -> list[str]:
    try:
        return [one.name for one in available_sets()]
    except CannotBuildError:
        return ["plain"]


AVAILABLE = _available()
"""All that this CPU and this compiler have: those of quant.c differ from each other."""

DIFFERENT = [name for name in AVAILABLE if not name.endswith("_vnni")]
"""Without the sets that add products of bytes alone: but for quant.c they compile to the same as the ones before them."""

WIDTHS = [name for name in DIFFERENT if "_" not in name]
"""One for each width of a vector."""

TORCH = "torch"
FLOAT32_PATHS = (*WIDTHS, TORCH)
"""Ways in which a CPU computes float32: other sets, the best too, do as one of these does."""


def in_use(name: str) -> Iterator[str]:
    """For a fixture."""
    library.use_isa(name)
    yield name
    library.use_isa(None)
