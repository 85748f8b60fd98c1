"""Rows as sums of two numbers in e4m3, and rounded to it."""

from __future__ import annotations

import pytest
import torch

from pelton_backends.triton.ops.moe.split import SplitRows, split


def joined(found: SplitRows) -> torch.Tensor:
    parts = found.rows.to(torch.float64).chunk(1 if found.is_rounded else 2, dim=1)
    return sum(parts, torch.zeros_like(parts[0])) * found.inverse[:, None].double()


def make_rows(size: int, device: torch.device) -> torch.Tensor:
    """Of very different sizes, each with numbers that are."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(9, size, generator=generator) * torch.logspace(-4, 0, size)
    x *= torch.tensor([1.0, 1e-4, 1e4, 2.0**-100, 2.0**120, 0.0, 1.0, 3.0, 0.5])[:, None]
    return x.to(device, torch.bfloat16)


@pytest.mark.parametrize("size", [96, 128])
def test_nothing_is_lost_but_what_is_small_beside_the_rest_of_its_row(size: int, device: torch.device) -> None:
    x = make_rows(size, device)
    strided = torch.cat([x, x], dim=1)[:, :size]
    found = split(strided)
    assert found.rows.shape == (9, 2 * size) and found.dtype == x.dtype
    most = x.double().abs().amax(1, keepdim=True)
    off = (joined(found) - x.double()).abs()
    assert (off <= most * 2.0**-16).all()
    assert not off[x.double().abs() >= most * 2.0**-8].any()


@pytest.mark.parametrize("size", [96, 128])
def test_rounded_rows_are_the_first_numbers(size: int, device: torch.device) -> None:
    """Off by half of the distance of two numbers with three bits behind the first one; below 2^-6 that is 2^-10, and rows reach 128."""
    x = make_rows(size, device)
    found, both = split(torch.cat([x, x], dim=1)[:, :size], is_rounded=True), split(x)
    assert found.rows.shape == (9, size) and found.dtype == x.dtype
    assert torch.equal(found.rows.view(torch.uint8), both.rows[:, :size].view(torch.uint8))
    assert torch.equal(found.inverse, both.inverse)
    most, off = x.double().abs().amax(1, keepdim=True), (joined(found) - x.double()).abs()
    assert (off <= torch.maximum(x.double().abs() / 16, most * 2.0**-17)).all()


@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_a_row_with_a_number_that_is_not_finite_becomes_nan_there(
    number: float, is_rounded: bool, device: torch.device
) -> None:
    x = torch.ones(3, 64, dtype=torch.bfloat16, device=device)
    x[1, 5] = number
    found = joined(split(x, is_rounded=is_rounded))
    assert found[1, 5].isnan() and torch.equal(found[::2], x[::2].double())


@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("num_tiles", [0, 1, 2])
def test_rows_behind_the_last_tile_are_left_out(
    num_tiles: int, is_rounded: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "empty", torch.zeros)
    x = torch.ones(13, 32, dtype=torch.bfloat16, device=device)
    found = split(x, torch.tensor([num_tiles], dtype=torch.int32, device=device), 6, is_rounded=is_rounded)
    assert joined(found)[: 6 * num_tiles].eq(1).all() and not joined(found)[6 * num_tiles :].any()
