"""Kernels on the CUDA device where there is one, else in Triton's interpreter on CPU tensors (see tests/conftest.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pelton_interpreter
import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    pelton_interpreter.mend()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", 0) if HAS_CUDA else torch.device("cpu")


@pytest.fixture
def large_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a program of two rows as for one of sixteen. The last one has rows beyond the end."""
    if HAS_CUDA:
        return
    from pelton_backends.triton.ops.linear import gemv
    from pelton_backends.triton.ops.moe import experts

    moe = experts.BoundMoe
    few, tile, packed_tile, choose_tile = moe._few_tiles, moe._tile, moe._packed_tile, gemv.choose_tile

    def wider(tile: Any) -> Any:
        return replace(tile, gate_columns=2 * tile.gate_columns, down_columns=2 * tile.down_columns)

    monkeypatch.setattr(moe, "_few_tiles", lambda self: tuple(replace(one, rows=8 * one.rows) for one in few(self)))
    monkeypatch.setattr(moe, "_tile", staticmethod(lambda *arguments: wider(tile(*arguments))))
    monkeypatch.setattr(moe, "_packed_tile", lambda *arguments: wider(packed_tile(*arguments)))
    monkeypatch.setattr(experts, "_DECODED_ROWS", 16)

    def four_times(*arguments: Any) -> gemv.Tile:
        tile = choose_tile(*arguments)
        return replace(tile, R=4 * tile.R)

    monkeypatch.setattr(gemv, "choose_tile", four_times)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` need the device: shapes that the interpreter would take minutes for."""
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_CUDA:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
