"""Kernels on the CUDA device where there is one, else in Triton's interpreter on CPU tensors."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is declared: before any of them is imported


def _let_scalars_bound_loops() -> None:
    """The interpreter (triton 3.6) makes a loop's bound with `int` of a one-element array, which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


if not HAS_CUDA:
    _let_scalars_bound_loops()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", 0) if HAS_CUDA else torch.device("cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` need the device: shapes that the interpreter would take minutes for."""
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_CUDA:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
