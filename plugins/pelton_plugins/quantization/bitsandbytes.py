"""bitsandbytes' checkpoints: int8 with a scale for each row, kept as they are, and 4 bits (nf4, fp4), kept packed on GPUs, elsewhere
decoded while they load.

A number of 4 bits is one of 16 (`quant_map`) times the largest of its block of 64 numbers, rows one behind the other; these are in
float32, or in 8 bits of their own (double quantization), which become float32. Inputs are never rounded: bitsandbytes rounds those of
int8 but for outliers.
Sources: arXiv:2208.07339 (int8), arXiv:2305.14314 (nf4).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pelton.errors import ConfigError
from pelton.ops.interface import LinearSpec, LinearWeights
from pelton.quantization.plain import PlainWeights, make_bias
from pelton_plugins.quantization.grouped import WHOLE, Collector, GroupedWeights, GroupForm, Numbers
from pelton_plugins.quantization.module_names import is_part_of
from pelton_plugins.weight_forms.blocks import is_for_cpu
from pelton_plugins.weight_forms.dummy import DummyTensor
from pelton_plugins.weight_forms.expert_codes import put_codes
from pelton_plugins.weight_forms.tables import BLOCK, TABLES

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.config import EngineConfig
    from pelton.model.build import BuildConfig
    from pelton.model.resolved import ResolvedModel
    from pelton.quantization.interface import LinearShard, QuantizationMethod

NAME = "bitsandbytes"
INT8_MOST = 127.0
DUMMY_LARGEST = (0.03, 0.05)
"""Of a row or a block of dummy weights, the largest number."""
NESTED_BLOCK = 256
"""Blocks of dummy weights with one scale in double quantization, as bitsandbytes has them."""


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

    def dummy(self, shard: LinearShard, form: GroupForm) -> Mapping[str, DummyTensor | Tensor]:
        return {
            "weight": DummyTensor((shard.num_rows, shard.num_cols), torch.int8),
            "SCB": DummyTensor((shard.num_rows,), torch.float32, DUMMY_LARGEST),
        }

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
    """Packed or plain weights from `weight` [out in / 2, 1] uint8 and what bitsandbytes has beside it. Matrices with blocks that a row or a
    rank's columns cut are decoded."""

    name = NAME

    def __init__(self, kind: str, is_nested: bool, kept: Sequence[str]) -> None:
        self.kind = kind
        self._state = f"weight.quant_state.bitsandbytes__{kind}"
        names = ["weight", "weight.absmax", "weight.quant_map", self._state]
        self._names = [*names, "weight.nested_absmax", "weight.nested_quant_map"] if is_nested else names
        self._kept = kept

    def create(
        self, config: BuildConfig, shards: Sequence[LinearShard], *, bias: bool, is_vocabulary: bool = False
    ) -> LinearWeights:
        is_embedding = is_vocabulary and not shards[0].name.endswith("lm_head")
        if is_embedding:
            return PlainWeights().create(config, shards, bias=bias, is_vocabulary=is_vocabulary)
        if is_for_cpu(config) or is_vocabulary or not all(self.is_packed(shard) for shard in shards):
            return super().create(config, shards, bias=bias, is_vocabulary=is_vocabulary)
        num_cols = shards[0].cols[1] - shards[0].cols[0]
        counts = [shard.rows[1] - shard.rows[0] + shard.padding for shard in shards]
        codes = torch.zeros(sum(counts), num_cols // 2, dtype=torch.uint8, device=config.device)
        scales = torch.zeros(sum(counts), num_cols // BLOCK, device=config.device)
        first = 0
        for shard, count in zip(shards, counts, strict=True):
            last = first + shard.rows[1] - shard.rows[0]
            self.expect_packed(config, shard, codes[first:last], scales[first:last])
            first += count
        vector = make_bias(config, shards) if bias else None
        spec = LinearSpec(
            in_features=num_cols, out_features=sum(counts), weight_format=self.kind, has_bias=vector is not None
        )
        return LinearWeights(spec, {"codes": codes, "scales": scales}, vector)

    @property
    def experts(self) -> TableExperts:
        return TableExperts(self)

    def is_packed(self, shard: LinearShard) -> bool:
        """Return whether the matrix can stay as it is."""
        return not is_part_of(shard.name, self._kept) and not any(
            edge % BLOCK for edge in (*shard.cols, shard.num_cols)
        )

    def expect_packed(self, config: BuildConfig, shard: LinearShard, codes: Tensor, scales: Tensor) -> None:
        """Tell `config.weights` what fills this rank's part of the matrix."""
        done = partial(self._keep, shard, codes, scales)
        Collector(config, shard.name, dict.fromkeys(self._names), done, partial(self._dummy, shard))

    def expect(self, config: BuildConfig, shard: LinearShard, target: Tensor) -> None:
        if is_part_of(shard.name, self._kept):
            super().expect(config, shard, target)
            return
        done = partial(self._decode, shard, target)
        Collector(config, shard.name, dict.fromkeys(self._names), done, partial(self._dummy, shard))

    def _dummy(self, shard: LinearShard) -> Mapping[str, DummyTensor | Tensor]:
        count = shard.num_rows * shard.num_cols
        num_blocks = -(-count // BLOCK)
        low, high = DUMMY_LARGEST
        state: dict[str, Any] = {"blocksize": BLOCK, "shape": [shard.num_rows, shard.num_cols]}
        found: dict[str, DummyTensor | Tensor] = {
            "weight": DummyTensor((count // 2, 1), torch.uint8),
            "weight.absmax": DummyTensor((num_blocks,), torch.float32, DUMMY_LARGEST),
            "weight.quant_map": torch.tensor(TABLES[self.kind]),
        }
        if "weight.nested_absmax" in self._names:
            state |= {"nested_blocksize": NESTED_BLOCK, "nested_offset": (low + high) / 2}
            found["weight.absmax"] = DummyTensor((num_blocks,), torch.uint8)
            found["weight.nested_absmax"] = torch.full((-(-num_blocks // NESTED_BLOCK),), (high - low) / 2)
            found["weight.nested_quant_map"] = torch.linspace(-1, 1, 256)
        return found | {self._state: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}

    def _keep(self, shard: LinearShard, codes: Tensor, scales: Tensor, found: Mapping[str, Tensor]) -> None:
        numbers, largest, block = self._read(shard, found)
        table = found["weight.quant_map"].float().flatten()
        if table.shape != (16,) or not torch.equal(table, torch.tensor(TABLES[self.kind], device=table.device)):
            raise ConfigError(
                f"{shard.name}.weight.quant_map is not the table of {self.kind}. Take a checkpoint that bitsandbytes wrote."
            )
        if block % BLOCK:
            raise ConfigError(
                f"{shard.name}.weight.quant_state has blocksize {block}; served are multiples of {BLOCK}. Quantize it again so."
            )
        rows, (left, right) = slice(*shard.rows), shard.cols
        put_codes(numbers.view(shard.num_rows, shard.num_cols)[rows, left:right], codes)
        spread = largest.repeat_interleave(block // BLOCK)[: numbers.numel() // BLOCK].view(shard.num_rows, -1)
        scales.copy_(spread[rows, left // BLOCK : right // BLOCK])

    def _decode(self, shard: LinearShard, target: Tensor, found: Mapping[str, Tensor]) -> None:
        codes, largest, block = self._read(shard, found)
        numbers = found["weight.quant_map"].float()[codes.int()]
        numbers *= largest.repeat_interleave(block)[: numbers.numel()]
        whole = numbers.view(shard.num_rows, shard.num_cols)
        target.copy_(whole[slice(*shard.rows), slice(*shard.cols)])

    def _read(self, shard: LinearShard, found: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, int]:
        """All codes, one behind the other, the largest number of each block (float32), and numbers of a block."""
        state = _read_state(shard, found[self._state])
        packed = found["weight"].flatten()
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
        return codes, largest.float(), int(state["blocksize"])


class TableExperts:
    """Matrices of experts as they are (`PackedExperts` of `pelton_plugins.models.experts`); those with a block that is cut are decoded."""

    def __init__(self, method: FourBitWeights) -> None:
        self._method = method

    def form(self, shard: LinearShard) -> tuple[str, int | None] | None:
        return (self._method.kind, BLOCK) if self._method.is_packed(shard) else None

    def expect(self, config: BuildConfig, shard: LinearShard, weight: Tensor, scale: Tensor) -> None:
        if self.form(shard) is None:
            raise ConfigError(
                f"quantization is {NAME!r}, and {shard.name} is not quantized, though other experts of its layer are. "
                "Take a checkpoint that treats them alike."
            )
        self._method.expect_packed(config, shard, weight, scale)


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
