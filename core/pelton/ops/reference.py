"""Plain torch implementations of the fused ops: the reference that kernels are tested against.

Composed of small pure functions. Rounding follows transformers' modules: norms are computed in float32 and
rounded to the model's dtype, residuals are added in the model's dtype, rotation and logits in float32.
"""

from __future__ import annotations

import functools
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
    LinearWeights,
    NormSpec,
    QkNormRopeWriteKv,
    QkNormRopeWriteKvNeeds,
    QkNormRopeWriteKvTensors,
)
from pelton.ops.packed_blocks import KINDS, PANEL_ROWS, dense, dequantize, kinds_of

if TYPE_CHECKING:
    from torch import Tensor

Bind = Callable[[str, Any, Any], Callable[..., Any]]
"""`OpSelector.bind`."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


# Pure functions.


def rms_norm(x: Tensor, weight: Tensor, spec: NormSpec) -> Tensor:
    """Over the last axis, in float32; the result has x's dtype."""
    if spec.unit_offset:
        return F.rms_norm(x.float(), (spec.size,), 1.0 + weight.float(), spec.eps).to(x.dtype)
    return F.rms_norm(x.float(), (spec.size,), None, spec.eps).to(x.dtype) * weight


def linear(x: Tensor, weights: LinearWeights) -> Tensor:
    """With blocks: dequantized for each call, into the input's dtype."""
    is_plain = weights.spec.weight_format == "plain"
    weight = weights.tensors["weight"] if is_plain else dense(weights).to(x.dtype)
    if x.device.type == "cpu" and x.dtype in _ONEDNN and x.shape[0] > 1 and not _has_fast_products(x.dtype):
        return _linear_by_float32(x, weight, weights.bias)
    return F.linear(x, weight, weights.bias)


SLICE_NUMBERS = 1 << 20
"""Of a weight, widened at once: they stay in the last cache."""

_ONEDNN = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


@functools.cache
def _has_fast_products(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies it on this CPU. Otherwise torch does, unblocked: 4 to 7 GFLOP/s where float32 has 60."""
    try:
        return bool(getattr(torch.ops.mkldnn, _ONEDNN[dtype])())
    except (AttributeError, RuntimeError):  # a torch without oneDNN
        return False


def _linear_by_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide, result = x.float(), x.new_empty(x.shape[0], weight.shape[0])
    step = max(SLICE_NUMBERS // weight.shape[1], 1)
    for first in range(0, weight.shape[0], step):
        rows = slice(first, first + step)
        part_of_bias = None if bias is None else bias[rows].float()
        result[:, rows] = F.linear(wide, weight[rows].float(), part_of_bias)
    return result


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


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 F of each head's D numbers, pairs (i, i + F); x [T, heads, D], cos and sin [T, 1, F] float32."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    parts = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return torch.cat(parts, dim=-1)


def write_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """k_cache[slot // S, slot % S] = key[t], same for value; a slot of -1 leaves the cache as it is.

    key, value [T, N, D]; k_cache, v_cache [P, S, N, D] views; slot_mapping [T] int64. No host synchronisation: a row
    to skip writes back what the null block's first slot holds.
    """
    write_rows(key, k_cache, slot_mapping)
    write_rows(value, v_cache, slot_mapping)


def write_rows(rows: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """cache[slot // S, slot % S] = rows[t], as `write_kv`; rows [T, ...], cache [P, S, ...]."""
    block_size = cache.shape[1]
    is_kept = (slot_mapping >= 0).view(-1, *[1] * (rows.dim() - 1))
    slots = slot_mapping.clamp(min=0)
    blocks, offsets = slots // block_size, slots % block_size
    cache[blocks, offsets] = torch.where(is_kept, rows.to(cache.dtype), cache[blocks, offsets])


# Implementations, one an op: `unsupported` and `bind`, as the interface says.


def _unknown_format(weight_format: str) -> list[str]:
    if weight_format == "plain" or kinds_of(weight_format):
        return []
    return [f"weight format {weight_format!r}, only 'plain' and {', '.join(KINDS)}"]


class ReferenceEmbed:
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


class ReferenceAddNorm:
    handles = frozenset(["post_norm", "tp_size", "unit_offset"])

    @staticmethod
    def unsupported(needs: AddNormNeeds) -> list[str]:
        return []

    @staticmethod
    def bind(needs: AddNormNeeds, tensors: AddNormTensors) -> AddNorm:
        def add_norm(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            residual = add_residual(hidden, residual, tensors.post_norm, needs.post_norm, tensors.reduce)
            return rms_norm(residual, tensors.norm, needs.norm), residual

        return add_norm


class ReferenceGated:
    @staticmethod
    def unsupported(needs: GatedNeeds) -> list[str]:
        return [] if needs.activation in ACTIVATIONS else [f"activation {needs.activation!r}"]

    @staticmethod
    def bind(needs: GatedNeeds, tensors: GatedTensors) -> Gated:
        def call(gate_up: Tensor) -> Tensor:
            return gated(gate_up, needs.activation)

        return call


class ReferenceQkNormRopeWriteKv:
    handles = frozenset(["q_norm", "k_norm", "writes_kv", "unit_offset"])

    @staticmethod
    def unsupported(needs: QkNormRopeWriteKvNeeds) -> list[str]:
        return [f"kv dtype {needs.kv_dtype}"] if needs.kv_dtype.startswith("fp8") else []

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
                write_kv(turned(key, tensors.k_norm, needs.k_norm, positions), value, k_cache, v_cache, slot_mapping)
            query = qkv[:, :q_size].reshape(-1, heads, head_dim)
            return turned(query, tensors.q_norm, needs.q_norm, positions)

        return qk_norm_rope_write_kv


class ReferenceLinear:
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

    handles = frozenset(["post_norm", "tp_size", "soft_cap"])

    @staticmethod
    def unsupported(needs: Any) -> list[str]:
        return []  # the parts say

    @classmethod
    def bind(cls, needs: Any, tensors: Any) -> Callable[..., Any]:
        compose: Callable[..., Callable[..., Any]] = cls.compose  # type: ignore[attr-defined]
        return compose(needs, tensors, _bind_reference)


def _bind_reference(op: str, needs: Any, tensors: Any) -> Callable[..., Any]:
    parts: dict[str, Any] = {"add_norm": ReferenceAddNorm, "linear": ReferenceLinear, "gated": ReferenceGated}
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
    @staticmethod
    def unsupported(needs: AllReduceNeeds) -> list[str]:
        return []

    @staticmethod
    def bind(needs: AllReduceNeeds, tensors: AllReduceTensors) -> AllReduce:
        all_reduce: Any = tensors.parallel.all_reduce
        return all_reduce  # type: ignore[no-any-return]
