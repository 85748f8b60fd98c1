"""Torch references of the fused ops of dense layers: `unsupported` and `bind`, as the interface says.

They serve all needs on every device, and kernels are tested against them. The arithmetic and its roundings are
`pelton.ops.reference`'s functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pelton.ops.interface import (
    AddNorm,
    AddNormGatedLinear,
    AddNormGatedLinearNeeds,
    AddNormGatedLinearTensors,
    AddNormLinear,
    AddNormLinearNeeds,
    AddNormLinearTensors,
    AddNormLogits,
    AddNormLogitsNeeds,
    AddNormLogitsTensors,
    AddNormNeeds,
    AddNormTensors,
    AllReduce,
    AllReduceNeeds,
    AllReduceTensors,
    Embed,
    EmbedNeeds,
    EmbedTensors,
    Gated,
    GatedNeeds,
    GatedTensors,
    Linear,
    LinearNeeds,
    LinearTensors,
    NormSpec,
    QkNormRopeWriteKv,
    QkNormRopeWriteKvNeeds,
    QkNormRopeWriteKvTensors,
)
from pelton.ops.packed_blocks import KINDS, PANEL_ROWS, dequantize, kinds_of
from pelton.ops.reference import ACTIVATIONS, rms_norm, rotate, write_kv
from pelton_backends.reference.linear import linear
from pelton_backends.reference.moe import ReferenceMoe

if TYPE_CHECKING:
    from torch import Tensor

Bind = Callable[[str, Any, Any], Callable[..., Any]]
"""`OpSelector.bind`."""


def _unknown_format(weight_format: str) -> list[str]:
    if weight_format == "plain" or kinds_of(weight_format):
        return []
    return [f"weight format {weight_format!r}, only 'plain' and {', '.join(KINDS)}"]


class ReferenceEmbed:
    is_recordable = True
    handles = frozenset(["scale", "tp_size", "weight_format"])

    @staticmethod
    def unsupported(needs: EmbedNeeds) -> list[str]:
        return _unknown_format(needs.weight_format)

    @staticmethod
    def bind(needs: EmbedNeeds, tensors: EmbedTensors) -> Embed:
        weight, first_row, num_rows = tensors.weight, tensors.first_row, needs.num_rows
        kinds, dtype = kinds_of(needs.weight_format), getattr(torch, needs.dtype)
        # As the model's dtype holds it: transformers multiplies by a rounded scale.
        scale = None if needs.scale is None else torch.tensor(needs.scale).to(dtype).item()

        def embed(input_ids: Tensor) -> Tensor:
            if kinds:
                panels = dequantize(weight[input_ids // PANEL_ROWS], kinds[0], input_ids.shape[0] * PANEL_ROWS)
                rows = torch.arange(input_ids.shape[0], device=weight.device) * PANEL_ROWS + input_ids % PANEL_ROWS
                hidden = panels[rows].to(dtype)
            else:
                hidden = F.embedding(input_ids, weight)
            return hidden if scale is None else hidden * scale

        def embed_shard(input_ids: Tensor) -> Tensor:
            local = input_ids - first_row
            is_local = (local >= 0) & (local < num_rows)
            return embed(local.clamp(0, num_rows - 1)) * is_local[:, None]

        return embed if needs.tp_size == 1 else embed_shard


def layer_norm(x: Tensor, weight: Tensor, spec: NormSpec) -> Tensor:
    """Over the last axis, in float32; the result has x's dtype. weight [size], or [2, size] with a bias."""
    factor, bias = (weight, None) if weight.dim() == 1 else weight.float().unbind()
    return F.layer_norm(x.float(), (spec.size,), factor.float(), bias, spec.eps).to(x.dtype)


def gated(x: Tensor, activation: str) -> Tensor:
    """[T, 2 I], gate and up -> activation(gate) * up [T, I]."""
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def add_residual(
    hidden: Tensor,
    residual: Tensor | None,
    post_norm: Tensor | None,
    post_spec: NormSpec | None,
    reduce: AllReduce | None,
) -> Tensor:
    """The new residual: post_norm(reduce(hidden)) + residual."""
    if reduce is not None:
        hidden = reduce(hidden)
    if post_norm is not None and post_spec is not None:
        hidden = rms_norm(hidden, post_norm, post_spec)
    return hidden if residual is None else hidden + residual


class ReferenceAddNorm:
    is_recordable = True
    handles = frozenset(["post_norm", "tp_size", "unit_offset", "is_centered"])

    @staticmethod
    def unsupported(needs: AddNormNeeds) -> list[str]:
        is_centered = needs.post_norm is not None and needs.post_norm.is_centered
        return ["a layer norm of a sub-layer's output"] if is_centered else []

    @staticmethod
    def bind(needs: AddNormNeeds, tensors: AddNormTensors) -> AddNorm:
        normed = layer_norm if needs.norm.is_centered else rms_norm

        def add_norm(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            residual = add_residual(hidden, residual, tensors.post_norm, needs.post_norm, tensors.reduce)
            return normed(residual, tensors.norm, needs.norm), residual

        return add_norm


class ReferenceGated:
    is_recordable = True

    @staticmethod
    def unsupported(needs: GatedNeeds) -> list[str]:
        return [] if needs.activation in ACTIVATIONS else [f"activation {needs.activation!r}"]

    @staticmethod
    def bind(needs: GatedNeeds, tensors: GatedTensors) -> Gated:
        def call(gate_up: Tensor) -> Tensor:
            return gated(gate_up, needs.activation)

        return call


def as_bytes(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to an 8-bit float, whose largest number stands for larger ones, and return its bytes."""
    bound = torch.finfo(dtype).max
    return rows.float().clamp(-bound, bound).to(dtype).view(torch.uint8)


class ReferenceQkNormRopeWriteKv:
    is_recordable = True
    handles = frozenset(["q_norm", "k_norm", "writes_kv", "unit_offset"])

    @staticmethod
    def unsupported(needs: QkNormRopeWriteKvNeeds) -> list[str]:
        return []

    @staticmethod
    def bind(needs: QkNormRopeWriteKvNeeds, tensors: QkNormRopeWriteKvTensors) -> QkNormRopeWriteKv:
        heads, kv_heads, head_dim = needs.num_heads, needs.num_kv_heads, needs.head_dim
        q_size, kv_size = heads * head_dim, kv_heads * head_dim

        def turned(x: Tensor, norm: Tensor | None, spec: NormSpec | None, positions: Tensor) -> Tensor:
            if norm is not None and spec is not None:
                x = rms_norm(x, norm, spec)
            if tensors.cos_sin is None:
                return x
            cos, sin = tensors.cos_sin[positions][:, None, :].chunk(2, dim=-1)
            return rotate(x, cos, sin)

        def qk_norm_rope_write_kv(
            qkv: Tensor, positions: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor
        ) -> Tensor:
            if needs.writes_kv:
                key = qkv[:, q_size : q_size + kv_size].reshape(-1, kv_heads, head_dim)
                value = qkv[:, q_size + kv_size :].reshape(-1, kv_heads, head_dim)
                key = turned(key, tensors.k_norm, needs.k_norm, positions)
                if k_cache.element_size() == 1:
                    key, value = (as_bytes(rows, k_cache.dtype) for rows in (key, value))
                    k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
                write_kv(key, value, k_cache, v_cache, slot_mapping)
            query = qkv[:, :q_size].reshape(-1, heads, head_dim)
            return turned(query, tensors.q_norm, needs.q_norm, positions)

        return qk_norm_rope_write_kv


class ReferenceLinear:
    is_recordable = True
    handles = frozenset(["weight_format", "has_bias"])

    @staticmethod
    def unsupported(needs: LinearNeeds) -> list[str]:
        return _unknown_format(needs.linear.weight_format)

    @staticmethod
    def bind(needs: LinearNeeds, tensors: LinearTensors) -> Linear:
        weights = tensors.linear

        def call(x: Tensor) -> Tensor:
            return linear(x, weights)

        return call


class Composed:
    """An op made of others: those that the selector chooses, or with `bind` the references."""

    is_recordable = True
    handles = frozenset(["post_norm", "tp_size", "soft_cap"])

    @staticmethod
    def unsupported(needs: Any) -> list[str]:
        return []  # the parts say

    @classmethod
    def bind(cls, needs: Any, tensors: Any) -> Callable[..., Any]:
        compose: Callable[..., Callable[..., Any]] = cls.compose  # type: ignore[attr-defined]
        return compose(needs, tensors, _bind_reference)


def _bind_reference(op: str, needs: Any, tensors: Any) -> Callable[..., Any]:
    parts: dict[str, Any] = {
        "add_norm": ReferenceAddNorm, "linear": ReferenceLinear, "gated": ReferenceGated, "moe": ReferenceMoe,
    }  # fmt: skip
    bound: Callable[..., Any] = parts[op].bind(needs, tensors)
    return bound


def _parts(needs: Any, tensors: Any, bind: Bind) -> tuple[AddNorm, Linear]:
    norm = AddNormNeeds(dtype=needs.dtype, norm=needs.norm, post_norm=needs.post_norm, tp_size=needs.tp_size)
    add_norm = bind("add_norm", norm, AddNormTensors(tensors.norm, tensors.post_norm, tensors.reduce))
    return add_norm, bind("linear", LinearNeeds(dtype=needs.dtype, linear=needs.linear), LinearTensors(tensors.linear))


class ReferenceAddNormLinear(Composed):
    @staticmethod
    def compose(needs: AddNormLinearNeeds, tensors: AddNormLinearTensors, bind: Bind) -> AddNormLinear:
        add_norm, product = _parts(needs, tensors, bind)

        def add_norm_linear(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            rows, residual = add_norm(hidden, residual)
            return product(rows), residual

        return add_norm_linear


class ReferenceAddNormGatedLinear(Composed):
    @staticmethod
    def compose(needs: AddNormGatedLinearNeeds, tensors: AddNormGatedLinearTensors, bind: Bind) -> AddNormGatedLinear:
        add_norm, product = _parts(needs, tensors, bind)
        gate = GatedNeeds(dtype=needs.dtype, size=needs.linear.out_features // 2, activation=needs.activation)
        activate: Gated = bind("gated", gate, GatedTensors(tensors.norm.device))

        def add_norm_gated_linear(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            rows, residual = add_norm(hidden, residual)
            return activate(product(rows)), residual

        return add_norm_gated_linear


class ReferenceAddNormLogits(Composed):
    @staticmethod
    def compose(needs: AddNormLogitsNeeds, tensors: AddNormLogitsTensors, bind: Bind) -> AddNormLogits:
        add_norm, product = _parts(needs, tensors, bind)

        def add_norm_logits(hidden: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
            # Copies, which `add_norm` may overwrite.
            final, _ = add_norm(hidden[rows], None if residual is None else residual[rows])
            logits = product(final)
            if tensors.gather is not None:
                logits = tensors.gather(logits)
            logits = logits[:, : needs.vocab_size].float()
            return logits if needs.soft_cap is None else needs.soft_cap * torch.tanh(logits / needs.soft_cap)

        return add_norm_logits


class ReferenceAllReduce:
    is_recordable = True

    @staticmethod
    def unsupported(needs: AllReduceNeeds) -> list[str]:
        return []

    @staticmethod
    def bind(needs: AllReduceNeeds, tensors: AllReduceTensors) -> AllReduce:
        return tensors.parallel.all_reduce
