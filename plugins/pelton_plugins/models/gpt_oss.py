"""gpt-oss: attention with sinks, windows on every other layer, and experts with biases, in four bits in the released checkpoints.

Experts of a checkpoint in mxfp4 (OCP Microscaling Formats 1.0, section 5.2) stay packed; on a CPU they are decoded into the model's
dtype while they load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pelton.errors import ConfigError
from pelton.layers.linear import split_heads
from pelton.model.build import BuildConfig, HFConfig
from pelton.ops.moe import ExpertsSpec, RoutingSpec
from pelton_plugins.models.experts import ExpertNames, SparseMoe, experts_here, keeps_packed
from pelton_plugins.models.moe import MoeDecoderLayer, MoeForCausalLM, num_experts
from pelton_plugins.models.qwen2 import window_of_layer

if TYPE_CHECKING:
    from pelton.model.loading import LazyWeight

_NAMES = ExpertNames(router="router")
_ALPHA = 1.702
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK = 32  # numbers with one scale
_PART = 64
"""A rank's part of an expert in four bits is a multiple of so many numbers, as fast kernels want it (`hopper_mxfp4.can_multiply`): of 2,880
two ranks have 1,472 and 1,408, and 64 of zeros."""
_MOST_EXPONENT = 127 + 64  # kernels decode to a float of eight bits' exponent, with room for sums
_BIAS = 127  # of a scale's exponent


class GptOssDecoderLayer(MoeDecoderLayer):
    def sliding_window(self, index: int, config: BuildConfig) -> int | None:
        return window_of_layer(index, config)

    def sinks(self, config: BuildConfig, prefix: str) -> Tensor:
        total = config.hf.num_attention_heads
        first, last = split_heads(total, config.parallel.rank, config.parallel.size, "num_attention_heads")
        self.attention_sinks = nn.Parameter(config.empty(last - first), requires_grad=False)
        config.weights.expect(f"{prefix}.sinks", (total,), self.attention_sinks, dim=0, start=first, stop=last)
        return self.attention_sinks

    def make_experts(self, config: BuildConfig, prefix: str) -> SparseMoe:
        hf = config.hf
        if hf.get("swiglu_alpha", _ALPHA) != _ALPHA:
            raise ConfigError(f"swiglu_alpha is {hf.swiglu_alpha}; this model has {_ALPHA}. Use another checkpoint.")
        count, weight_format = num_experts(hf), _weight_format(config)
        return SparseMoe(
            hf.hidden_size, hf.intermediate_size, activation="swiglu_oai", limit=hf.get("swiglu_limit", 7.0), has_bias=True,
            routing=RoutingSpec(num_experts=count, top_k=hf.num_experts_per_tok), norm=self.post_attention_layernorm,
            config=config, prefix=prefix, names=_NAMES, make_experts=_experts, weight_format=weight_format,
            multiple=_PART if weight_format == "mxfp4" else 1,
        )  # fmt: skip


class GptOssForCausalLM(MoeForCausalLM):
    layer_class = GptOssDecoderLayer


def _weight_format(config: BuildConfig) -> str:
    hf = config.hf
    if not (_is_mxfp4(hf) and keeps_packed(config)):
        return "plain"
    return "mxfp4" if hf.hidden_size % _BLOCK == hf.intermediate_size % _BLOCK == 0 else "plain"


def _experts(config: BuildConfig, prefix: str, spec: ExpertsSpec) -> dict[str, nn.Parameter]:
    """Tensors of all experts together, gate and up in turns."""
    hf, parallel = config.hf, config.parallel
    count, hidden, whole, width = num_experts(hf), spec.hidden_size, hf.intermediate_size, spec.intermediate_size
    held = experts_here(spec, count)
    first = 0 if config.has_whole_experts else parallel.rank * width
    matrices = {"gate_up": (len(held), 2 * width, hidden), "down": (len(held), hidden, width)}
    shapes: dict[str, tuple[int, ...]] = {"gate_up_bias": (len(held), 2 * width), "down_bias": (len(held), hidden)}
    if spec.weight_format == "plain":
        shapes |= matrices
    tensors = {name: _parameter(config.empty(*shape)) for name, shape in shapes.items()}
    expect = config.weights.expect
    pieces: dict[str, Any] = {"first": first, "width": width, "held": held}
    if spec.weight_format == "mxfp4":
        for name, (_, rows, columns) in matrices.items():
            for half, size in ((name, columns // 2), (f"{name}_scale", columns // _BLOCK)):
                tensors[half] = _parameter(config.empty(len(held), rows, size, dtype=torch.uint8))
        for name, rows, columns, put in (
            ("gate_up", 2 * whole, hidden, partial(_put_gate_up, first=first, width=width)),
            ("down", hidden, whole, partial(_put_blocks, first=first // _BLOCK, count=width // _BLOCK)),
        ):
            blocks = columns // _BLOCK
            expect(
                f"{prefix}.{name}_proj_blocks", (count, rows, blocks, _BLOCK // 2), tensors[name].data,
                fill=partial(_fill_packed, put=put, held=held, repack=repacked_mxfp4),
            )  # fmt: skip
            expect(
                f"{prefix}.{name}_proj_scales", (count, rows, blocks), tensors[f"{name}_scale"].data,
                fill=partial(_fill_scales, name=f"{prefix}.{name}_proj_scales", put=put, held=held),
            )  # fmt: skip
    elif _is_mxfp4(hf):
        gate_up, down = tensors["gate_up"].data, tensors["down"].data
        for name, rows, columns, target, put_rows in (
            ("gate_up_proj", 2 * whole, hidden, gate_up, _put_gate_up), ("down_proj", hidden, whole, down, _put_down),
        ):  # fmt: skip
            halves = _Mxfp4Halves(partial(put_rows, first=first, width=width), held)
            blocks = columns // _BLOCK
            expect(f"{prefix}.{name}_blocks", (count, rows, blocks, _BLOCK // 2), target, fill=halves.take_blocks)
            expect(f"{prefix}.{name}_scales", (count, rows, blocks), target, fill=halves.take_scales)
    else:
        gate_up, down = tensors["gate_up"].data, tensors["down"].data
        expect(f"{prefix}.gate_up_proj", (count, hidden, 2 * whole), gate_up, fill=partial(_fill_gate_up, **pieces))
        expect(f"{prefix}.down_proj", (count, whole, hidden), down, fill=partial(_fill_down, **pieces))
    bias = tensors["gate_up_bias"].data
    expect(f"{prefix}.gate_up_proj_bias", (count, 2 * whole), bias, fill=partial(_fill_gate_up_bias, **pieces))
    holds_bias = spec.num_held is not None or parallel.rank == 0  # sums over ranks have it once
    tensors["down_bias"].data.zero_()
    down_bias = tensors["down_bias"].data if holds_bias else None
    fill = None if down_bias is None else partial(_fill_rows, held=held)
    expect(f"{prefix}.down_proj_bias", (count, hidden), down_bias, fill=fill)
    return tensors


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _fill_packed(
    weight: LazyWeight,
    target: Tensor,
    *,
    put: partial[None],
    held: Sequence[int],
    repack: Callable[[Tensor], Tensor] | None,
) -> None:
    """Each expert's blocks [rows, blocks, 16] in the op's order, or scales [rows, blocks], into [rows, columns] of the target."""
    whole = torch.empty(weight.shape, dtype=torch.uint8, device=target.device)
    is_there = weight.fill(whole)
    for index, one in zip(held, target, strict=True):
        part = whole[index] if is_there else weight.read(0, index, index + 1)[0].to(target.device, torch.uint8)
        put(part if repack is None else repack(part), one.view(len(one), -1, _BLOCK // 2) if repack else one)


def _fill_scales(weight: LazyWeight, target: Tensor, *, name: str, put: partial[None], held: Sequence[int]) -> None:
    _fill_packed(weight, target, put=put, held=held, repack=None)
    if target.numel() and target.max() > _MOST_EXPONENT:
        raise ConfigError(
            f"{name} has a scale of 2^{int(target.max()) - 127}; served are scales of up to 2^64. Use another checkpoint."
        )


def repacked_mxfp4(blocks: Tensor) -> Tensor:
    """Blocks [..., 16] uint8 of a checkpoint, numbers 2b and 2b + 1 in byte b -> numbers b and 16 + b (`ExpertsSpec.weight_format`)."""
    numbers = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    half = numbers.shape[-1] // 2
    return numbers[..., :half] | numbers[..., half:] << 4


def _put_blocks(rows: Tensor, target: Tensor, *, first: int, count: int) -> None:
    part = rows[:, first : first + count]
    target[:, : part.shape[1]] = part
    target[:, part.shape[1] :] = 0


def _is_mxfp4(hf: HFConfig) -> bool:
    return (hf.get("quantization_config") or {}).get("quant_method") == "mxfp4"


def _put_gate_up(rows: Tensor, target: Tensor, *, first: int, width: int) -> None:
    """rows [2 I of all ranks, ...], gate and up in turns -> target [2 width, ...], gate first, each filled up with zeros."""
    for half, turn in enumerate((rows[0::2], rows[1::2])):
        part, place = turn[first : first + width], target[half * width : (half + 1) * width]
        place[: len(part)] = part
        place[len(part) :] = 0


def _put_down(rows: Tensor, target: Tensor, *, first: int, width: int) -> None:
    target.copy_(rows[:, first : first + width])


def _fill_gate_up(weight: LazyWeight, target: Tensor, *, first: int, width: int, held: Sequence[int]) -> None:
    for index, one in zip(held, target, strict=True):
        _put_gate_up(weight.read(0, index, index + 1)[0].t(), one, first=first, width=width)


def _fill_down(weight: LazyWeight, target: Tensor, *, first: int, width: int, held: Sequence[int]) -> None:
    for index, one in zip(held, target, strict=True):
        _put_down(weight.read(0, index, index + 1)[0].t(), one, first=first, width=width)


def _fill_gate_up_bias(weight: LazyWeight, target: Tensor, *, first: int, width: int, held: Sequence[int]) -> None:
    for one, row in zip(target, _read(weight, held), strict=True):
        _put_gate_up(row, one, first=first, width=width)


def _fill_rows(weight: LazyWeight, target: Tensor, *, held: Sequence[int]) -> None:
    target.copy_(_read(weight, held))


def _read(weight: LazyWeight, held: Sequence[int]) -> Tensor:
    """Return these experts' parts of a tensor [E, ...]."""
    first, last = held[0], held[-1] + 1
    if last - first == len(held):
        return weight.read(0, first, last)
    return torch.cat([weight.read(0, index, index + 1) for index in held])


class _Mxfp4Halves:
    """A matrix of each expert that is here; all come as two tensors in any order: blocks [E, rows, blocks, 16] uint8, of which each byte
    holds two numbers, the lower four bits first, and scales [E, rows, blocks] uint8, exponents of two."""

    def __init__(self, put: partial[None], held: Sequence[int]) -> None:
        self._put, self._held = put, held
        self._blocks: Tensor | None = None
        self._scales: Tensor | None = None

    def take_blocks(self, weight: LazyWeight, target: Tensor) -> None:
        self._blocks = _read(weight, self._held).to(torch.uint8)
        self._decode(target)

    def take_scales(self, weight: LazyWeight, target: Tensor) -> None:
        self._scales = _read(weight, self._held).to(torch.uint8)
        self._decode(target)

    def _decode(self, target: Tensor) -> None:
        if self._blocks is None or self._scales is None:
            return
        for blocks, scales, one in zip(self._blocks, self._scales, target, strict=True):
            self._put(decode_mxfp4(blocks, scales, target.dtype).to(target.device), one)
        self._blocks = self._scales = None


def decode_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks [rows, n, 16] uint8, scales [rows, n] uint8 -> [rows, 32 n]"""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=dtype)
    numbers = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], dim=-1).flatten(-2)
    return torch.ldexp(numbers, (scales.to(torch.int32) - _BIAS).unsqueeze(-1)).flatten(-2).to(dtype)
