"""Tests marked `gpu` are skipped, with the reason, where there is no CUDA device."""

from __future__ import annotations

import pytest

from pelton_platforms.cuda.driver import torch_cuda_version, why_not_here


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_not_here() or (None if torch_cuda_version() else "torch was built without CUDA")
    if marked and reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
