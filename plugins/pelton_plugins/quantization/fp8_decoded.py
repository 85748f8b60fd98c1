"""Matrices that a checkpoint has in e4m3, decoded into the model's dtype while they load.

All of a checkpoint whose scales are for blocks (DeepSeek-V3, section 3.3 of arXiv:2412.19437; Qwen3's FP8 releases) but for the experts
where they stay packed, and on a CPU the experts of any. Numbers times their scale are float32, rounded once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pelton.errors import ConfigError
from pelton.quantization.plain import PlainWeights
from pelton_plugins.quantization.cache_scales import take_cache_scales
from pelton_plugins.quantization.numbers import E4M3

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.model.build import BuildConfig
    from pelton.model.loading import LazyWeight
    from pelton.ops.interface import InputRounding
    from pelton.quantization.interface import LinearShard


class DecodedFp8(PlainWeights):
    """Plain weights from e4m3 and a scale for each block, row, or matrix."""

    name = "fp8"

    def __init__(
        self, settings: Mapping[str, Any], left_out: Sequence[str], inputs: InputRounding | None = None
    ) -> None:
        """settings: config.json's quantization_config; left_out: modules that are not in e4m3; inputs: see `BlockExperts`."""
        block, self._left_out, self._inputs = settings.get("weight_block_size"), left_out, inputs
        if block is not None and not (len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)):
            raise ConfigError(
                f"quantization_config.weight_block_size is {block!r}; expected two sizes, such as [128, 128]."
            )
        self._block = block
        self._scale = "weight_scale_inv" if block else "weight_scale"

    @property
    def experts(self) -> BlockExperts | None:
        return BlockExperts(self, self._block, self._scale, self._inputs) if self._block else None

    def is_kept(self, shard: LinearShard) -> bool:
        """Return whether the checkpoint has the matrix in e4m3."""
        return not any(f".{module}." in f".{shard.name}." for module in self._left_out)

    def create(
        self, config: BuildConfig, shards: Sequence[LinearShard], *, bias: bool, is_vocabulary: bool = False
    ) -> Any:
        take_cache_scales(config)
        method = PlainWeights() if is_vocabulary else super()
        return method.create(config, shards, bias=bias, is_vocabulary=is_vocabulary)

    def expect(self, config: BuildConfig, shard: LinearShard, target: Tensor) -> None:
        if not self.is_kept(shard):
            super().expect(config, shard, target)
            return
        halves = _Halves(shard, self._block, self._scale)
        shape = (shard.num_rows, shard.num_cols)
        config.weights.expect(f"{shard.name}.weight", shape, target, fill=halves.take_weight)
        blocks = num_blocks(shard, self._block) if self._block else None
        config.weights.expect(f"{shard.name}.{self._scale}", blocks, target, fill=halves.take_scale)


class BlockExperts:
    """Matrices of experts with a scale for each block, kept for each row of a block (`pelton_plugins.models.experts.PackedExperts`)."""

    def __init__(self, method: DecodedFp8, block: Sequence[int], scale: str, inputs: InputRounding | None) -> None:
        """scale: what the checkpoint calls them, behind the name of a matrix; inputs: how they may be rounded, None: not at all.

        A checkpoint may have a scale for each group of a token's numbers in mind. One for the token rounds alike what is 2^-13 of its
        largest number or more: e4m3 is floating point."""
        self._method, self._block, self._scale, self._inputs = method, block, scale, inputs

    def form(self, shard: LinearShard) -> tuple[str, int | None] | None:
        size = self._block[1]
        is_whole = size >= 16 and size & (size - 1) == 0 and shard.cols[0] % size == 0
        return ("e4m3", size) if is_whole and self._method.is_kept(shard) else None

    def group_rows(self, shard: LinearShard) -> int:
        """Return how many rows have the same scales, from this rank's first one on."""
        return math.gcd(self._block[0], shard.rows[0])

    def inputs(self, shard: LinearShard) -> InputRounding | None:
        return self._inputs

    def expect(self, config: BuildConfig, shard: LinearShard, weight: Tensor, scale: Tensor) -> None:
        shape = (shard.num_rows, shard.num_cols)
        config.weights.expect(f"{shard.name}.weight", shape, weight, fill=partial(take_numbers, shard))
        blocks = num_blocks(shard, self._block)
        config.weights.expect(f"{shard.name}.{self._scale}", blocks, scale, fill=partial(self._take_scales, shard))
        config.weights.ignore(re.escape(f"{shard.name}.input_scale"))

    def _take_scales(self, shard: LinearShard, weight: LazyWeight, target: Tensor) -> None:
        scales = _read_scales(shard, self._block, self._scale, weight)
        first = shard.cols[0] // self._block[1]
        rows = torch.arange(*shard.rows) // self._block[0]
        target.copy_(scales[rows, first : first + target.shape[1]])


def num_blocks(shard: LinearShard, block: Sequence[int]) -> tuple[int, int]:
    return math.ceil(shard.num_rows / block[0]), math.ceil(shard.num_cols / block[1])


def take_numbers(shard: LinearShard, weight: LazyWeight, target: Tensor) -> None:
    """Put a rank's part of a matrix into place, as its loader does it fastest."""
    part = (1, *shard.cols) if shard.cols[1] - shard.cols[0] < shard.num_cols else (0, *shard.rows)
    if weight.dtype is not None:
        _check_dtype(shard, weight.dtype)
        if weight.fill_later(target, *part):
            return
    numbers = weight.read(*part)
    _check_dtype(shard, numbers.dtype)
    target.copy_(numbers)


def _read_numbers(shard: LinearShard, weight: LazyWeight) -> Tensor:
    numbers = weight.read()
    _check_dtype(shard, numbers.dtype)
    return numbers


def _check_dtype(shard: LinearShard, dtype: torch.dtype) -> None:
    if dtype != E4M3:
        raise ConfigError(
            f"{shard.name}.weight is {str(dtype).removeprefix('torch.')}, and config.json's quantization_config says it is "
            "float8_e4m3fn. Check that config.json belongs to these weights."
        )


def _read_scales(shard: LinearShard, block: Sequence[int] | None, name: str, weight: LazyWeight) -> Tensor:
    scales = weight.read().float()
    if block:
        wanted = num_blocks(shard, block)
        is_right = tuple(scales.shape) == wanted
    else:
        wanted, is_right = (shard.num_rows, 1), scales.numel() in (1, shard.num_rows)
    if not is_right:
        raise ConfigError(
            f"{shard.name}.{name} is {list(scales.shape)}; expected {list(wanted)} for a weight of "
            f"{[shard.num_rows, shard.num_cols]}. Check that config.json belongs to these weights."
        )
    return scales


class _Halves:
    """A matrix and its scales, which come in any order."""

    def __init__(self, shard: LinearShard, block: Sequence[int] | None, scale: str) -> None:
        self._shard, self._block, self._name = shard, block, scale
        self._numbers: Tensor | None = None
        self._scales: Tensor | None = None

    def take_weight(self, weight: LazyWeight, target: Tensor) -> None:
        self._numbers = _read_numbers(self._shard, weight)
        self._decode(target)

    def take_scale(self, weight: LazyWeight, target: Tensor) -> None:
        self._scales = _read_scales(self._shard, self._block, self._name, weight)
        self._decode(target)

    def _decode(self, target: Tensor) -> None:
        if self._numbers is None or self._scales is None:
            return
        rows, columns = torch.arange(*self._shard.rows), torch.arange(*self._shard.cols)
        numbers = self._numbers[slice(*self._shard.rows), slice(*self._shard.cols)].to(target.device).float()
        if self._block:
            scales = self._scales[rows // self._block[0]][:, columns // self._block[1]]
        else:
            scales = self._scales.flatten()
            scales = scales.unsqueeze(-1) if len(scales) == 1 else scales[rows].unsqueeze(-1)
        target.copy_(numbers * scales.to(target.device))
        self._numbers = self._scales = None
