"""Weights in e4m3 with a scale for each row of a matrix: the allocation that all methods share, and the method `fp8`.

A scale for a whole matrix is kept as one for each of its rows, so that the parts of a merged matrix (q, k and v) may have
scales of their own, and one op reads all.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pelton.errors import ConfigError
from pelton.ops.interface import InputRounding, LinearSpec, LinearWeights
from pelton.quantization.plain import PlainWeights, make_bias
from pelton_plugins.quantization.cache_scales import take_cache_scales
from pelton_plugins.quantization.fp8_decoded import BlockExperts, DecodedFp8, take_numbers
from pelton_plugins.quantization.merged import create_mixed
from pelton_plugins.quantization.module_names import is_part_of
from pelton_plugins.quantization.numbers import E4M3, round_rows, row_scales
from pelton_plugins.quantization.reference import BLOCKS_FORMAT, FORMAT

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.config import EngineConfig
    from pelton.model.build import BuildConfig
    from pelton.model.loading import LazyWeight
    from pelton.model.resolved import ResolvedModel
    from pelton.quantization.interface import LinearShard, QuantizationMethod

NUMBERS_AT_ONCE = 2**22
"""While weights are rounded: little is held beside the result."""
DYNAMIC = InputRounding(dtype="float8_e4m3fn")
STATIC = InputRounding(dtype="float8_e4m3fn", is_dynamic=False)


class Fp8Weights(ABC):
    """A `QuantizationMethod` whose weights are e4m3."""

    name: ClassVar[str]
    scale_name = "weight_scale"
    """Of the checkpoint's tensors, behind the name of a matrix."""
    input_scale_name = "input_scale"

    @property
    def experts(self) -> RowExperts:
        return RowExperts(self)

    @abstractmethod
    def inputs_of(self, shard: LinearShard) -> tuple[bool, InputRounding | None]:
        """Return whether the matrix is kept in e4m3, and how its inputs are rounded."""

    @abstractmethod
    def expect(self, config: BuildConfig, shard: LinearShard, weight: Tensor, scale: Tensor) -> None:
        """Tell `config.weights` what fills this rank's rows of the matrix and their scales."""

    def create(
        self, config: BuildConfig, shards: Sequence[LinearShard], *, bias: bool, is_vocabulary: bool = False
    ) -> LinearWeights:
        take_cache_scales(config)
        found = [self.inputs_of(shard) for shard in shards]
        if is_vocabulary or not any(is_kept for is_kept, _ in found):
            return PlainWeights().create(config, shards, bias=bias, is_vocabulary=is_vocabulary)
        if found.count(found[0]) < len(found):
            return create_mixed(config, shards, bias=bias)
        inputs = found[0][1]
        counts = [shard.rows[1] - shard.rows[0] for shard in shards]
        num_cols = shards[0].cols[1] - shards[0].cols[0]
        weight = config.empty(sum(counts), num_cols, dtype=E4M3)
        tensors = {"weight": weight, "weight_scale": config.empty(sum(counts), dtype=torch.float32)}
        finish = None
        if inputs is not None and not inputs.is_dynamic:
            tensors["input_scale"] = torch.zeros((), dtype=torch.float32, device=config.device)
            finish = partial(self._expect_input_scales(config, shards), tensors["input_scale"])
        first = 0
        for shard, count in zip(shards, counts, strict=True):
            rows = slice(first, first + count)
            self.expect(config, shard, weight[rows], tensors["weight_scale"][rows])
            first += count
        vector = make_bias(config, shards) if bias else None
        spec = LinearSpec(
            in_features=num_cols,
            out_features=sum(counts),
            weight_format=FORMAT,
            has_bias=vector is not None,
            inputs=inputs,
        )
        return LinearWeights(spec, tensors, vector, finish)

    def _expect_input_scales(self, config: BuildConfig, shards: Sequence[LinearShard]) -> Any:
        """Merged parts have one input: the largest of their scales serves all."""
        scales = torch.zeros(len(shards))

        def fill(weight: LazyWeight, place: Tensor) -> None:
            place.copy_(weight.read().float().amax())

        for index, shard in enumerate(shards):
            config.weights.expect(f"{shard.name}.{self.input_scale_name}", None, scales[index], fill=fill)

        def finish(place: Tensor) -> None:
            place.copy_(scales.amax())

        return finish


class RowExperts:
    """Matrices of experts in e4m3 with a scale for each row (`pelton_plugins.models.experts.PackedExperts`)."""

    def __init__(self, method: Fp8Weights) -> None:
        self._method = method

    def form(self, shard: LinearShard) -> tuple[str, int | None] | None:
        return ("e4m3", None) if self._method.inputs_of(shard)[0] else None

    def inputs(self, shard: LinearShard) -> InputRounding | None:
        """Return how inputs may be rounded: by a scale for each token, which loses no more than one of the checkpoint does."""
        return None if self._method.inputs_of(shard)[1] is None else DYNAMIC

    def expect(self, config: BuildConfig, shard: LinearShard, weight: Tensor, scale: Tensor) -> None:
        self._method.expect(config, shard, weight, scale.squeeze(-1))
        config.weights.ignore(re.escape(f"{shard.name}.{self._method.input_scale_name}"))


class StoredFp8(Fp8Weights):
    """A checkpoint that has e4m3 weights, each with one scale or one for each of its rows (`weight_scale`)."""

    @property
    def decoded(self) -> PlainWeights:
        return _DecodedRows(self)

    def expect(self, config: BuildConfig, shard: LinearShard, weight: Tensor, scale: Tensor) -> None:
        shape = (shard.num_rows, shard.num_cols)
        config.weights.expect(f"{shard.name}.weight", shape, weight, fill=partial(take_numbers, shard))
        config.weights.expect(f"{shard.name}.{self.scale_name}", None, scale, fill=partial(self._take_scale, shard))

    def _take_scale(self, shard: LinearShard, weight: LazyWeight, place: Tensor) -> None:
        scales = weight.read().float().flatten()
        if len(scales) not in (1, shard.num_rows):
            raise ConfigError(
                f"{shard.name}.{self.scale_name} is {list(weight.shape)}; expected one number, or {shard.num_rows}, one for each "
                "row of the weight. Check that config.json belongs to these weights."
            )
        place.copy_(scales[slice(*shard.rows)] if len(scales) > 1 else scales.expand(len(place)))


class _DecodedRows(DecodedFp8):
    """Plain weights from what a `StoredFp8` keeps."""

    def __init__(self, method: StoredFp8) -> None:
        super().__init__({}, ())
        self.name, self._method, self._scale = method.name, method, method.scale_name

    def is_kept(self, shard: LinearShard) -> bool:
        return self._method.inputs_of(shard)[0]

    def expect(self, config: BuildConfig, shard: LinearShard, target: Tensor) -> None:
        super().expect(config, shard, target)
        inputs = self._method.inputs_of(shard)[1]
        if inputs is not None and not inputs.is_dynamic:  # inputs are not rounded here
            config.weights.ignore(re.escape(f"{shard.name}.{self._method.input_scale_name}"))


class Fp8AtLoad(Fp8Weights):
    """Any checkpoint: a scale for each row, from its largest number; inputs with a scale for each token."""

    name: ClassVar[str] = "fp8"

    def inputs_of(self, shard: LinearShard) -> tuple[bool, InputRounding | None]:
        return True, DYNAMIC

    def expect(self, config: BuildConfig, shard: LinearShard, weight: Tensor, scale: Tensor) -> None:
        shape = (shard.num_rows, shard.num_cols)
        fill = partial(self._round, shard, config.dtype, scale)
        config.weights.expect(f"{shard.name}.weight", shape, weight, fill=fill)

    @staticmethod
    def _round(shard: LinearShard, dtype: torch.dtype, scale: Tensor, weight: LazyWeight, place: Tensor) -> None:
        (first, last), columns = shard.rows, slice(*shard.cols)
        whole = torch.empty(weight.shape, dtype=dtype, device=place.device) if place.is_cuda else None
        if whole is not None and not weight.fill(whole):
            whole = None
        step = max(NUMBERS_AT_ONCE // shard.num_cols, 1)
        for start in range(first, last, step):
            stop = min(start + step, last)
            part = weight.read(0, start, stop) if whole is None else whole[start:stop]
            numbers = part[:, columns].to(place.device).to(dtype)
            rows = slice(start - first, stop - first)
            scale[rows] = row_scales(numbers)
            place[rows] = round_rows(numbers, scale[rows])


class SerializedFp8(StoredFp8):
    """A checkpoint whose quant_method is 'fp8': a scale for each matrix, inputs with a scale for each token or a fixed one."""

    name: ClassVar[str] = "fp8"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        scheme = settings.get("activation_scheme", "dynamic")
        if scheme not in ("dynamic", "static"):
            raise ConfigError(f"quantization_config.activation_scheme is {scheme!r}; use dynamic or static.")
        self._inputs = DYNAMIC if scheme == "dynamic" else STATIC
        self._left_out = left_out(settings)
        if "weight_block_size" in settings:  # transformers wrote it, which calls a scale alike whatever it is of
            self.scale_name, self.input_scale_name = "weight_scale_inv", "activation_scale"

    def inputs_of(self, shard: LinearShard) -> tuple[bool, InputRounding | None]:
        return not is_part_of(shard.name, self._left_out), self._inputs


class _DecodedBlocks(DecodedFp8):
    """Plain weights from numbers and a scale for each block."""

    def is_kept(self, shard: LinearShard) -> bool:
        return not is_part_of(shard.name, self._left_out)


class BlockFp8:
    """A checkpoint with a scale for each block of a matrix, kept for each row of a block; inputs may be rounded where it says so. On a CPU,
    and where blocks do not divide a rank's columns, matrices are decoded while they load, and inputs are not rounded."""

    name = "fp8"
    inputs: InputRounding | None = DYNAMIC
    """Where a checkpoint has a scale for a token and a block's columns, a scale for the token serves: e4m3 has exponents, so that
    numbers below 2^-15 of a row's largest alone lose by it."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        if (settings.get("activation_scheme") or "dynamic") != "dynamic":
            self.inputs = None
        self.decoded: DecodedFp8 = _DecodedBlocks(settings, left_out(settings), self.inputs)

    @property
    def experts(self) -> BlockExperts | None:
        return self.decoded.experts

    def create(
        self, config: BuildConfig, shards: Sequence[LinearShard], *, bias: bool, is_vocabulary: bool = False
    ) -> LinearWeights:
        size = self._group_size(shards)
        if (config.device_type or config.device.type) == "cpu" or is_vocabulary or size is None:
            return self.decoded.create(config, shards, bias=bias, is_vocabulary=is_vocabulary)
        return self.create_packed(config, shards, size, bias=bias)

    def create_packed(
        self, config: BuildConfig, shards: Sequence[LinearShard], size: int, *, bias: bool
    ) -> LinearWeights:
        """size: columns of a block."""
        take_cache_scales(config)
        blocks = self.decoded.experts
        assert blocks is not None, "see `_group_size`"
        counts = [shard.rows[1] - shard.rows[0] + shard.padding for shard in shards]
        num_rows, num_cols = sum(counts), shards[0].cols[1] - shards[0].cols[0]
        weight = config.empty(num_rows, num_cols, dtype=E4M3)
        scale = config.empty(num_rows, num_cols // size, dtype=torch.float32)
        first, group_rows = 0, 0
        for shard, count in zip(shards, counts, strict=True):
            rows = slice(first, first + count - shard.padding)
            group_rows = math.gcd(group_rows, blocks.group_rows(shard), first)
            blocks.expect(config, shard, weight[rows], scale[rows])
            scale[rows.stop : first + count] = 0
            weight[rows.stop : first + count] = 0
            first += count
        vector = make_bias(config, shards) if bias else None
        spec = LinearSpec(
            in_features=num_cols, out_features=num_rows, weight_format=BLOCKS_FORMAT, has_bias=vector is not None,
            inputs=self.inputs, group_rows=group_rows,
        )  # fmt: skip
        return LinearWeights(spec, {"weight": weight, "weight_scale": scale}, vector)

    def _group_size(self, shards: Sequence[LinearShard]) -> int | None:
        blocks = self.decoded.experts
        forms = {None if blocks is None else blocks.form(shard) for shard in shards}
        form = forms.pop() if len(forms) == 1 else None
        size = None if form is None else form[1]
        return size if size is not None and (shards[0].cols[1] - shards[0].cols[0]) % size == 0 else None


def left_out(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the modules that config.json's quantization_config leaves in the checkpoint's dtype."""
    return (*(settings.get("ignored_layers") or ()), *(settings.get("modules_to_not_convert") or ()))


def make_fp8(config: EngineConfig, model: ResolvedModel) -> QuantizationMethod:
    """Make the method that `quantization: fp8` means for this checkpoint."""
    settings = model.hf_config.get("quantization_config") or {}
    if settings.get("quant_method") != "fp8":
        return Fp8AtLoad()
    if settings.get("weight_block_size"):
        return BlockFp8(settings)
    return SerializedFp8(settings)
