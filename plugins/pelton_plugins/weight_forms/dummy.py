"""Tensors of a quantized matrix that no checkpoint has (`--load-format dummy`): the method says what they are, the loader draws them.

Numbers are such that weights are about as large as those of other models (0.02).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pelton.model.loading import LazyWeight

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DummyTensor:
    """Random numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bounds: tuple[float, float] | None = None  # evenly from the first up to the second; None: any bytes, of codes

    def draw(self, generator: torch.Generator) -> Tensor:
        if self.bounds is None:
            *outer, last = self.shape
            size = (*outer, last * self.dtype.itemsize)
            codes = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8, device=generator.device)
            return codes.view(self.dtype)
        low, high = self.bounds
        numbers = torch.rand(self.shape, generator=generator, device=generator.device) * (high - low) + low
        return numbers.to(self.dtype)


class DummyWeight(LazyWeight):
    """A tensor that is made up."""

    @abstractmethod
    def draw(self, what: DummyTensor, device: torch.device) -> Tensor:
        """Return the same numbers on every rank."""


def group_scales(shape: tuple[int, ...], bits: int, dtype: torch.dtype) -> DummyTensor:
    """Return scales of integers: times one code minus another they are weights."""
    return DummyTensor(shape, dtype, (0.002 * 2.0 ** (4 - bits), 0.004 * 2.0 ** (4 - bits)))
