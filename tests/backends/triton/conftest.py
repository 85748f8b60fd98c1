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


def _round_to_e4m3() -> None:
    """As the device does: the interpreter (triton 3.6) cuts off, and reads its NaN as 480."""
    import numpy as np
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def mended(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source.is_fp32(), target.is_fp8e4nv()) == (True, True):
            wide = torch.from_numpy(np.ascontiguousarray(numbers).view(np.float32))
            return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(numbers.shape)
        result = convert(numbers, source, target, rounding)
        if source.is_fp8e4nv() and target.is_fp32():
            result = result.view(np.float32)
            result[(numbers & 0x7F) == 0x7F] = np.nan
            result = result.view(np.uint32)
        return result

    interpreter._convert_float = mended


if not HAS_CUDA:
    _let_scalars_bound_loops()
    _round_to_e4m3()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", 0) if HAS_CUDA else torch.device("cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` need the device: shapes that the interpreter would take minutes for."""
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_CUDA:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
