"""Rounding to float8_e4m3fn: 4 bits of exponent, 3 of mantissa, up to 448, no infinity."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST = 1e-30
"""What zeros are divided by, times `LARGEST`."""


def row_scales(rows: Tensor, bound: float | None = None) -> Tensor:
    """Return what makes each row's largest number, or `bound` where that is less, 448 when divided by it: [T] float32."""
    largest = rows.abs().amax(-1).float()
    largest = (largest if bound is None else largest.clamp(max=bound)).clamp(min=LEAST)
    return largest / torch.full_like(largest, LARGEST)  # by a number, torch on CUDA multiplies with its reciprocal


def round_rows(rows: Tensor, scales: Tensor) -> Tensor:
    """Each row divided by its scale and rounded to nearest; what is beyond 448 becomes that, NaN stays NaN."""
    return (rows.float() * (1.0 / scales)[:, None]).clamp(-LARGEST, LARGEST).to(E4M3)
