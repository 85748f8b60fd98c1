"""bitsandbytes' checkpoints: int8 with a scale for each row, kept as they are, and 4 bits (nf4, fp4), decoded while they load.

A number of 4 bits is one of 16 (`quant_map`) times the largest of its block of 64 numbers, rows one behind the other; these are in
float32, or in 8 bits of their own (double quantization). Inputs are never rounded: bitsandbytes rounds those of int8 but for outliers.
Sources: arXiv:2208.07339 (int8), arXiv:2305.14314 (nf4).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pelton.errors import ConfigError
from pelton.ops.interface import LinearWeights
from pelton.quantization.plain import PlainWeights
from pelton_plugins.quantization.fp8 import is_part_of
from pelton_plugins.quantization.grouped import WHOLE, Collector, GroupedWeights, GroupForm, Numbers

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.config import EngineConfig
    from pelton.model.build import BuildConfig
    from pelton.model.resolved import ResolvedModel
    from pelton.quantization.interface import LinearShard, QuantizationMethod

NAME = "bitsandbytes"
INT8_MOST = 127.0


def make_bitsandbytes(config: EngineConfig, model: ResolvedModel) -> QuantizationMethod:
    """Make the method of this checkpoint: int8 or 4 bits."""
    settings = model.hf_config.get("quantization_config") or {}
    if settings.get("quant_method") != NAME:
        raise ConfigError(
            f"quantization is {NAME!r}, and config.json has no quantization_config of it: weights are not quantized by bitsandbytes "
            "while they load. Leave quantization unset, or use q8_0 or q4_1."
        )
    # transformers leaves out the head where the checkpoint names nothing.
    kept = tuple(settings.get("llm_int8_skip_modules") or ("lm_head",))
    if settings.get("load_in_8bit"):
        return Int8Weights(kept)
    if not settings.get("load_in_4bit"):
        raise ConfigError(
            f"config.json's quantization_config ({NAME}) has neither load_in_8bit nor load_in_4bit. Take a checkpoint that has one."
        )
    storage = settings.get("bnb_4bit_quant_storage", "uint8")
    if storage != "uint8":
        raise ConfigError(
            f"config.json's quantization_config has bnb_4bit_quant_storage {storage!r}; served is 'uint8'. Take a checkpoint of that kind."
        )
    kind = settings.get("bnb_4bit_quant_type", "fp4")
    if kind not in ("nf4", "fp4"):
        raise ConfigError(
            f"config.json's quantization_config has bnb_4bit_quant_type {kind!r}; served are nf4 and fp4."
        )
    return FourBitWeights(kind, bool(settings.get("bnb_4bit_use_double_quant")), kept)


class Int8Weights(GroupedWeights):
    """`weight` [out, in] int8, `SCB` [out] float32: the largest number of each row."""

    name: ClassVar[str] = NAME

    def __init__(self, kept: Sequence[str]) -> None:
        self._kept = kept

    def is_quantized_head(self, shard: LinearShard) -> bool:
        return shard.name.endswith("lm_head") and not is_part_of(shard.name, self._kept)

    def form(self, shard: LinearShard) -> GroupForm | None:
        return None if is_part_of(shard.name, self._kept) else GroupForm(8, WHOLE, is_symmetric=True)

    def create(
        self, config: BuildConfig, shards: Sequence[LinearShard], *, bias: bool, is_vocabulary: bool = False
    ) -> LinearWeights:
        config.weights.ignore(r".*\.weight_format")  # of the instruction that bitsandbytes takes
        return super().create(config, shards, bias=bias, is_vocabulary=is_vocabulary)

    def tensors(self, shard: LinearShard, form: GroupForm) -> Mapping[str, tuple[int, ...] | None]:
        return {"weight": (shard.num_rows, shard.num_cols), "SCB": (shard.num_rows,)}

    def numbers(self, shard: LinearShard, form: GroupForm, found: Mapping[str, Tensor]) -> Numbers:
        weight = found["weight"]
        if weight.dtype != torch.int8:
            raise ConfigError(
                f"{shard.name}.weight is {str(weight.dtype).removeprefix('torch.')}, and config.json's quantization_config says it is "
                "int8. Check that config.json belongs to these weights."
            )
        scales = found["SCB"].float().unsqueeze(1) / INT8_MOST

        def codes(rows: slice) -> Tensor:
            return weight[rows].to(torch.int16) + 128

        return Numbers(codes, scales, torch.full_like(scales, 128, dtype=torch.int32))


class FourBitWeights(PlainWeights):
    """Plain weights from `weight` [out in / 2, 1] uint8 and what bitsandbytes has beside it."""

    name = NAME

    def __init__(self, kind: str, is_nested: bool, kept: Sequence[str]) -> None:
        self._state = f"weight.quant_state.bitsandbytes__{kind}"
        names = ["weight", "weight.absmax", "weight.quant_map", self._state]
        self._names = [*names, "weight.nested_absmax", "weight.nested_quant_map"] if is_nested else names
        self._kept = kept

    def create(
        self, config: BuildConfig, shards: Sequence[LinearShard], *, bias: bool, is_vocabulary: bool = False
    ) -> LinearWeights:
        is_embedding = is_vocabulary and not shards[0].name.endswith("lm_head")
        method = PlainWeights() if is_embedding else super()
        return method.create(config, shards, bias=bias, is_vocabulary=is_vocabulary)

    def expect(self, config: BuildConfig, shard: LinearShard, target: Tensor) -> None:
        if is_part_of(shard.name, self._kept):
            super().expect(config, shard, target)
            return
        Collector(config, shard.name, dict.fromkeys(self._names), partial(self._decode, shard, target))

    def _decode(self, shard: LinearShard, target: Tensor, found: Mapping[str, Tensor]) -> None:
        state = _read_state(shard, found[self._state])
        packed, block = found["weight"].flatten(), state["blocksize"]
        count = shard.num_rows * shard.num_cols
        if (
            packed.dtype != torch.uint8
            or packed.numel() * 2 != count
            or tuple(state["shape"]) != (shard.num_rows, shard.num_cols)
        ):
            raise ConfigError(
                f"{shard.name}.weight is {list(found['weight'].shape)} {str(packed.dtype).removeprefix('torch.')} for a matrix of "
                f"{list(state['shape'])}; config.json makes it {[shard.num_rows, shard.num_cols]}. Check that config.json belongs to "
                "these weights."
            )
        largest = found["weight.absmax"]
        if "weight.nested_absmax" in found:
            nested = (
                found["weight.nested_absmax"].float().repeat_interleave(state["nested_blocksize"])[: largest.numel()]
            )
            largest = found["weight.nested_quant_map"].float()[largest.int()] * nested + state["nested_offset"]
        codes = torch.stack([packed >> 4, packed & 15], 1).flatten()  # the first number in the upper half
        numbers = found["weight.quant_map"].float()[codes.int()]
        numbers *= largest.float().repeat_interleave(block)[:count]
        whole = numbers.view(shard.num_rows, shard.num_cols)
        target.copy_(whole[slice(*shard.rows), slice(*shard.cols)])


def _read_state(shard: LinearShard, state: Tensor) -> dict[str, Any]:
    """The JSON that lies in the checkpoint as bytes."""
    try:
        found = json.loads(bytes(state.cpu().to(torch.uint8).tolist()))
        assert {"blocksize", "shape"} <= found.keys()
    except (ValueError, AssertionError, AttributeError) as error:
        raise ConfigError(
            f"{shard.name}.weight.quant_state is not what bitsandbytes writes. Download it again."
        ) from error
    return dict(found)
