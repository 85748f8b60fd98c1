"""Kernels on the CUDA device where there is one, else in Triton's interpreter on CPU tensors (see tests/conftest.py)."""

from __future__ import annotations

import pelton_interpreter
import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    pelton_interpreter.mend()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", 0) if HAS_CUDA else torch.device("cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` need the device: shapes that the interpreter would take minutes for."""
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_CUDA:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
