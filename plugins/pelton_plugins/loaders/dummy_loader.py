"""Random small weights without a checkpoint, for `--load-format dummy`: benchmarks and tests of shapes.

A loader hands out what a checkpoint holds; this one has none, so the worker tells it which tensors the model
expects. Each is drawn on its own from its name: the same in every run, on every rank, for one type of device. On a GPU the
device draws, in the model's dtype, in place; its numbers are others than the CPU's. Of a quantized checkpoint (config.json's
quantization_config) codes are random, and scales such that weights are as large as those of other models: those in e4m3 and of
experts in mxfp4 are made here, by their names, others as their method says (`pelton_plugins.weight_forms.dummy`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from pelton.config import EngineConfig
from pelton.model.loading import LazyWeight, WeightLoader
from pelton.model.resolved import ResolvedModel
from pelton_plugins.weight_forms.dummy import DummyTensor, DummyWeight

_SCALE = 0.02  # of matrices, as most models are initialised
_CODES, _EXPONENTS = "_proj_blocks", "_proj_scales"  # of experts in mxfp4, in uint8
_EXPONENT = 118  # of 2^-9
_E4M3_SIZE, _E4M3_SCALES = 100.0, (0.0001, 0.0003)  # of numbers; of what they are multiplied by: 0.02
_E4M3_MOST = 448.0
_E4M3_SUFFIXES = (".weight_scale_inv", ".weight_scale")


class RandomWeight(DummyWeight):
    """Made when it is read first."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
        self.name = name
        self.shape = shape
        self._dtype = dtype
        self._seed = seed
        self._drawn: Tensor | None = None  # its rows may be asked for a part at a time

    def read(self, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        if self._drawn is None:
            self._drawn = self._draw(torch.Generator().manual_seed(self._number()))
        part = _part(self._drawn, dim, start, stop)
        return part if part.dtype == torch.uint8 else part.to(self._dtype)

    def _draw(self, generator: torch.Generator) -> Tensor:
        if self.name.endswith(_CODES):
            return torch.randint(0, 256, self.shape, generator=generator, dtype=torch.uint8)
        if self.name.endswith(_EXPONENTS):
            return torch.full(self.shape, _EXPONENT, dtype=torch.uint8)
        if self.name.endswith(_E4M3_SUFFIXES):
            least, most = _E4M3_SCALES
            return torch.rand(self.shape, generator=generator) * (most - least) + least
        return torch.randn(self.shape, generator=generator) * _SCALE + self._mean()

    def fill(self, target: Tensor, dim: int | None = None, start: int = 0, stop: int | None = None) -> bool:
        is_packed = target.dtype == torch.uint8 and target.shape == self.shape
        if target.device.type == "cpu" or not (is_packed or target.dtype == self._dtype):
            return False
        generator = torch.Generator(target.device).manual_seed(self._number())
        if is_packed:  # codes, or exponents
            target.fill_(_EXPONENT) if self.name.endswith(_EXPONENTS) else target.random_(0, 256, generator=generator)
            return True
        if target.shape == self.shape:
            target.normal_(self._mean(), _SCALE, generator=generator)
        else:  # a rank's part of what all ranks draw alike
            whole = torch.empty(self.shape, dtype=self._dtype, device=target.device)
            whole.normal_(self._mean(), _SCALE, generator=generator)
            target.copy_(_part(whole, dim, start, stop))
        return True

    def draw(self, what: DummyTensor, device: torch.device) -> Tensor:
        return what.draw(torch.Generator(device).manual_seed(self._number()))

    def _mean(self) -> float:
        return 1.0 if len(self.shape) == 1 and self.name.endswith("norm.weight") else 0.0

    def _number(self) -> int:
        return int.from_bytes(hashlib.sha256(f"{self._seed} {self.name}".encode()).digest()[:6], "little")


def _part(whole: Tensor, dim: int | None, start: int, stop: int | None) -> Tensor:
    return whole if dim is None else whole.narrow(dim, start, (whole.shape[dim] if stop is None else stop) - start)


class RandomE4m3(RandomWeight):
    """A matrix in e4m3 of a checkpoint that has scales for it."""

    dtype = torch.float8_e4m3fn

    def read(self, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        return _part(self._numbers(torch.device("cpu")), dim, start, stop)

    def fill(self, target: Tensor, dim: int | None = None, start: int = 0, stop: int | None = None) -> bool:
        if target.device.type == "cpu" or target.dtype != self.dtype:
            return False
        target.copy_(_part(self._numbers(target.device), dim, start, stop))
        return True

    def _numbers(self, device: torch.device) -> Tensor:
        generator = torch.Generator(device).manual_seed(self._number())
        numbers = torch.randn(self.shape, generator=generator, device=device) * _E4M3_SIZE
        return numbers.clamp_(-_E4M3_MOST, _E4M3_MOST).to(self.dtype)


class DummyLoader(WeightLoader):
    """`expect` comes before `weights`: there is no file that says which tensors there are."""

    def __init__(self, config: EngineConfig, model: ResolvedModel) -> None:
        self._seed = config.model.seed
        self._dtype: torch.dtype = getattr(torch, model.dtype)
        self._expected: Mapping[str, tuple[int, ...]] = {}

    def expect(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        self._expected = expected

    def weights(self) -> Iterator[tuple[str, LazyWeight]]:
        for name, shape in self._expected.items():
            stem = name.removesuffix(".weight")
            is_e4m3 = stem != name and any(stem + suffix in self._expected for suffix in _E4M3_SUFFIXES)
            yield name, (RandomE4m3 if is_e4m3 else RandomWeight)(name, shape, self._dtype, self._seed)

    @property
    def total_bytes(self) -> int:
        return sum(math.prod(shape) for shape in self._expected.values()) * self._dtype.itemsize
