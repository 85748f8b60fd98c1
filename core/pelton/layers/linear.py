"""Matrices of a decoder layer, merged and sharded when they are made.

Each keeps one rank's rows or columns. The call is one fused op: the norm before it, and the residual of the
sub-layer before that, belong to the layer that reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from pelton import moved
from pelton.errors import ConfigError
from pelton.layers.norm import RMSNorm
from pelton.lora.layers import BaseProduct
from pelton.ops.interface import (
    AddNormGatedLinear,
    AddNormGatedLinearNeeds,
    AddNormGatedLinearTensors,
    AddNormLinear,
    AddNormLinearNeeds,
    AddNormLinearTensors,
    AllReduce,
    Gated,
    GatedNeeds,
    GatedTensors,
    Linear,
    LinearNeeds,
    LinearTensors,
    LinearWeights,
)
from pelton.ops.selector import BySize
from pelton.quantization.interface import LinearShard

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.model.build import BuildConfig
else:
    __getattr__ = moved.names_of(__name__)

Product = TypeVar("Product", bound=Callable[..., Any])
# config.json's names of activations.
ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


class LinearModule(nn.Module):
    """Registers a method's tensors under their names, so that they count as the module's."""

    def __init__(self, weights: LinearWeights) -> None:
        super().__init__()
        self.spec = weights.spec
        for name, tensor in weights.tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.bias = weights.bias if weights.bias is None else nn.Parameter(weights.bias, requires_grad=False)
        self.bare: Linear | None = None
        """The product of a layer without a norm before it."""

    def _bind_bare(
        self,
        config: BuildConfig,
        shards: Sequence[LinearShard],
        weights: LinearWeights,
        reduce: AllReduce | None = None,
    ) -> None:
        needs, tensors = LinearNeeds(dtype=config.dtype_name, linear=weights.spec), LinearTensors(weights, reduce)
        self.bare = config.ops.bind("linear", needs, tensors)
        self.adapter = config.adapter_layer(shards, base=BaseProduct("linear", needs, tensors))

    def _bare_product(self, x: Tensor) -> Tensor:
        assert self.bare is not None, "it has no norm"
        return self._with_adapters(self.bare)(x)

    def _with_adapters(self, product: Product) -> Product:
        """Return the op that this step calls: the one with adapters in it where some row has one."""
        is_adapted = self.adapter is not None and self.adapter.is_used
        return self.adapter.product if is_adapted else product  # type: ignore[return-value,union-attr]


def split_heads(total: int, rank: int, size: int, what: str) -> tuple[int, int]:
    """This rank's heads [start, stop). With more ranks than heads, size / total ranks hold a copy of each."""
    if total % size == 0:
        return rank * (total // size), (rank + 1) * (total // size)
    if size % total == 0:
        head = rank // (size // total)
        return head, head + 1
    raise ConfigError(f"{what} is {total}, which tensor_parallel_size {size} neither divides nor is a multiple of.")


def merged_shards(
    prefix: str, merged: str | None, parts: Sequence[tuple[str, int, tuple[int, int]]], num_cols: int
) -> list[LinearShard]:
    """parts: (name, rows, rows of this rank) of matrices with whole columns; merged: the one tensor of the checkpoint that has all of
    them, below each other."""
    if merged is None:
        return [LinearShard(f"{prefix}.{name}", count, num_cols, rows, (0, num_cols)) for name, count, rows in parts]
    total, start, shards = sum(count for _, count, _ in parts), 0, []
    for _, count, (first, last) in parts:
        shards.append(LinearShard(f"{prefix}.{merged}", total, num_cols, (start + first, start + last), (0, num_cols)))
        start += count
    return shards


class QKVLinear(LinearModule):
    """q, k and v of one attention layer, below each other; reads the norm before it (`add_norm_linear`). Without one it is the bare
    product, and the residual is the model's own affair."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        norm: RMSNorm | None,
        config: BuildConfig,
        prefix: str,
        post_norm: RMSNorm | None = None,
        bias: bool = False,
        merged: str | None = None,
    ) -> None:
        """prefix: of the attention module in the checkpoint. post_norm: of the sub-layer before, where it has one. merged: name of the
        tensor where the checkpoint has all three in one."""
        parallel = config.parallel
        parallel.share(num_heads, "num_attention_heads")
        heads = split_heads(num_heads, parallel.rank, parallel.size, "num_attention_heads")
        parallel.check_copies(num_kv_heads)
        kv_heads = split_heads(num_kv_heads, parallel.rank, parallel.size, "num_key_value_heads")
        parts = [
            (name, total * head_dim, (first * head_dim, last * head_dim))
            for name, total, (first, last) in (
                ("q_proj", num_heads, heads),
                ("k_proj", num_kv_heads, kv_heads),
                ("v_proj", num_kv_heads, kv_heads),
            )
        ]
        shards = merged_shards(prefix, merged, parts, hidden_size)
        weights = config.create_weights(shards, bias=bias)
        super().__init__(weights)
        self.num_heads = heads[1] - heads[0]  # of this rank
        self.num_kv_heads = kv_heads[1] - kv_heads[0]
        if norm is None:
            self._bind_bare(config, shards, weights)
            return
        needs = AddNormLinearNeeds(
            dtype=config.dtype_name, norm=norm.spec, linear=weights.spec, tp_size=parallel.size,
            post_norm=post_norm.spec if post_norm else None,
        )  # fmt: skip
        tensors = AddNormLinearTensors(
            norm.weight, weights, post_norm.weight if post_norm else None, config.all_reduce(hidden_size)
        )
        self.add_norm_linear: AddNormLinear = config.ops.bind("add_norm_linear", needs, tensors)
        self.adapter = config.adapter_layer(shards, norm=norm, base=BaseProduct("add_norm_linear", needs, tensors))

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """-> (qkv [T, (num_heads + 2 num_kv_heads) head_dim], residual [T, H])"""
        if self.bare is not None:
            return self._bare_product(hidden), residual  # type: ignore[return-value]
        return self._with_adapters(self.add_norm_linear)(hidden, residual)

    def reader(self, num_tokens: int) -> Callable[..., Any]:
        """Return the op that so many rows of this step go to."""
        op: Callable[..., Any] = self._with_adapters(self.add_norm_linear)
        return op.part(num_tokens) if isinstance(op, BySize) else op


class MergedGateUp(LinearModule):
    """gate and up of a gated MLP with its activation; reads the norm before it (`add_norm_gated_linear`)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        norm: RMSNorm | None,
        config: BuildConfig,
        prefix: str,
        post_norm: RMSNorm | None = None,
        bias: bool = False,
        merged: str | None = None,
        names: tuple[str, str] = ("gate_proj", "up_proj"),
    ) -> None:
        """prefix: of the MLP in the checkpoint. post_norm: of the attention sub-layer, where it has one. merged: name of the tensor
        where the checkpoint has both in one; names: of the tensors where they are two."""
        parallel = config.parallel
        if activation not in ACTIVATION_NAMES:
            raise ConfigError(f"hidden_act is {activation!r}; gated layers have {', '.join(ACTIVATION_NAMES)}.")
        width = parallel.share(intermediate_size, "intermediate_size")
        rows = (parallel.rank * width, (parallel.rank + 1) * width)
        parts = [(name, intermediate_size, rows) for name in names]
        shards = merged_shards(prefix, merged, parts, hidden_size)
        weights = config.create_weights(shards, bias=bias)
        super().__init__(weights)
        if norm is None:
            self._gated: Gated = config.ops.bind(
                "gated",
                GatedNeeds(dtype=config.dtype_name, size=width, activation=ACTIVATION_NAMES[activation]),
                GatedTensors(config.device),
            )
            self._bind_bare(config, shards, weights)
            return
        needs = AddNormGatedLinearNeeds(
            dtype=config.dtype_name, norm=norm.spec, linear=weights.spec, activation=ACTIVATION_NAMES[activation],
            post_norm=post_norm.spec if post_norm else None, tp_size=parallel.size,
        )  # fmt: skip
        tensors = AddNormGatedLinearTensors(
            norm.weight, weights, post_norm.weight if post_norm else None, config.all_reduce(hidden_size)
        )
        self.add_norm_gated_linear: AddNormGatedLinear = config.ops.bind("add_norm_gated_linear", needs, tensors)
        self.adapter = config.adapter_layer(
            shards, norm=norm, activation=needs.activation, base=BaseProduct("add_norm_gated_linear", needs, tensors)
        )

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """-> (activation(gate) * up [T, I of this rank], residual [T, H])"""
        if self.bare is not None:
            return self._gated(self._bare_product(hidden)), residual  # type: ignore[return-value]
        return self._with_adapters(self.add_norm_gated_linear)(hidden, residual)


class ShardLinear(LinearModule):
    """One matrix of which this rank has a part (`linear`)."""

    def __init__(
        self, shard: LinearShard, *, config: BuildConfig, bias: bool = False, reduce: AllReduce | None = None
    ) -> None:
        weights = config.create_weights([shard], bias=bias)
        super().__init__(weights)
        self._bind_bare(config, [shard], weights, reduce)
        assert self.bare is not None
        self.linear: Linear = self.bare

    def forward(self, x: Tensor) -> Tensor:
        return self._with_adapters(self.linear)(x)


class RowParallelLinear(ShardLinear):
    """A sub-layer's last matrix (O, down): each rank has its input columns, the bare output is partial (`linear`)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        config: BuildConfig,
        prefix: str,
        bias: bool = False,
        ends_sub_layer: bool = False,
    ) -> None:
        """ends_sub_layer: the output goes as it is to the layer that reads the next norm."""
        is_sent = ends_sub_layer and config.adapters is None
        width = config.parallel.share(in_features, f"input of {prefix}")
        cols = (config.parallel.rank * width, (config.parallel.rank + 1) * width)
        super().__init__(
            LinearShard(prefix, out_features, in_features, (0, out_features), cols), config=config, bias=bias,
            reduce=config.all_reduce(out_features) if is_sent else None,
        )  # fmt: skip
