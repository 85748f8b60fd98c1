"""A layer of Mamba-2: what it has of a request is a state of fixed size, and the last inputs of a short convolution."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from pelton.attention.cache_layer import register
from pelton.attention.interface import AttentionBackend, AttentionNeeds, BoundAttention
from pelton.errors import ConfigError
from pelton.kv_cache.spec import DTYPE_BYTES, KVCacheSpec, MambaSpec
from pelton.layers.linear import ShardLinear
from pelton.layers.norm import RMSNorm
from pelton_plugins.models.normed import NormedLinear, whole_shard

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import ForwardBatch
    from pelton.model.build import BuildConfig


class Mamba2Mixer(nn.Module):
    """A `CacheLayer` with states. Product, convolution, states, gated norm, product: T tokens, E = num_heads * head_dim.

    Its backend's call takes the product's rows [T, ...] and fills [T, E]; it heeds which rows begin (`StateParams` in
    `pelton_backends.sdpa.state_space` is all that it reads here).
    """

    conv_states: Tensor
    states: Tensor
    backend: AttentionBackend
    attend: BoundAttention

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        state_size: int,
        num_groups: int,
        conv_kernel: int,
        norm: RMSNorm,
        has_conv_bias: bool,
        has_bias: bool,
        dt_limit: tuple[float, float],
        config: BuildConfig,
        prefix: str,
        eps: float | None = None,
    ) -> None:
        """norm: of the sub-layer's input, which the first product reads. eps: of the gated norm; config.json's `rms_norm_eps` when None."""
        super().__init__()
        _check(config, num_heads, num_groups)
        self.layer_name = prefix
        self.shares: str | None = None
        self.num_heads, self.head_dim, self.state_size, self.num_groups = num_heads, head_dim, state_size, num_groups
        self.dt_limit = dt_limit
        self.inner = num_heads * head_dim
        width, hidden_size = self.inner + 2 * num_groups * state_size, config.hf.hidden_size
        self.in_proj = NormedLinear(
            [whole_shard(f"{prefix}.in_proj", self.inner + width + num_heads, hidden_size)], norm=norm, bias=has_bias,
            config=config,
        )  # fmt: skip

        def parameter(name: str, *shape: int, kept: tuple[int, ...], dtype: torch.dtype | None = None) -> nn.Parameter:
            made = nn.Parameter(config.empty(*shape, dtype=dtype), requires_grad=False)
            config.weights.expect(f"{prefix}.{name}", kept, made.view(kept))
            return made

        self.conv_weight = parameter("conv1d.weight", width, conv_kernel, kept=(width, 1, conv_kernel))
        self.conv_bias = parameter("conv1d.bias", width, kept=(width,)) if has_conv_bias else None
        own, numbers = (num_heads,), torch.float32
        self.dt_bias = parameter("dt_bias", *own, kept=own, dtype=numbers)
        self.a_log = parameter("A_log", *own, kept=own, dtype=numbers)
        self.d = parameter("D", *own, kept=own, dtype=numbers)
        self.norm = RMSNorm(self.inner, eps=eps, config=config, prefix=f"{prefix}.norm")
        self.out_proj = ShardLinear(
            whole_shard(f"{prefix}.out_proj", hidden_size, self.inner), bias=has_bias, config=config
        )
        self._states = (
            ((width, conv_kernel - 1), config.dtype_name), ((num_heads, head_dim, state_size), "float32"),
        )  # fmt: skip
        self._block_size = config.max_model_len
        self.needs = AttentionNeeds(
            head_dim=head_dim, num_heads=num_heads, num_kv_heads=num_groups, block_size=config.block_size,
            dtype=config.dtype_name, attention_type="state",
        )  # fmt: skip
        self.selection = config.attention.select(self.needs)
        register(self, config)

    def cache_spec(self) -> KVCacheSpec:
        """One page for a request, however long it is."""
        size = sum(math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in self._states)
        return MambaSpec(block_size=self._block_size, state_bytes=size, states=self._states)

    def bind_cache(self, views: tuple[Tensor, ...], metadata_index: int, backend: AttentionBackend) -> None:
        self.conv_states, self.states = views
        self.metadata_index, self.backend = metadata_index, backend
        self.attend = backend.bind(self)

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """(bare output, residual), each [T, H]"""
        product, residual = self.in_proj(hidden, residual)
        mixed = product.new_zeros(len(product), self.inner)
        if batch.cut is not None:
            batch.cut(self, product, mixed)
        elif batch.attention:  # without: the pass that measures memory, before there are states
            self.attend(product, batch.attention[self.metadata_index], mixed)
        return self.out_proj(self._gated_norm(mixed, product[:, : self.inner])), residual

    def _gated_norm(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Norm of mixed * silu(gate), for each group of heads by itself."""
        gated = (mixed.float() * F.silu(gate.float())).view(len(mixed), self.num_groups, -1)
        scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.norm.spec.eps)
        return self.norm.weight * (gated * scale).view(len(mixed), -1).to(mixed.dtype)


def _check(config: BuildConfig, num_heads: int, num_groups: int) -> None:
    """Refuse what states do not go with."""
    if num_heads % num_groups:
        raise ConfigError(
            f"config.json has {num_heads} heads in {num_groups} groups, which do not divide them. Fix it."
        )
    if config.parallel.size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {config.parallel.size}, and layers with states run on one rank. Set it to 1."
        )
    settings = config.engine_config
    if settings is not None and settings.speculative.method is not None:
        raise ConfigError(
            "speculative_config is set, and a state cannot leave a rejected draft out again. Leave it out for this model."
        )


def dt_limit(config: BuildConfig) -> tuple[float, float]:
    """Bounds of a token's step, of config.json's `time_step_limit`."""
    low, high = (_number(bound) for bound in config.hf.get("time_step_limit", (0.0, float("inf"))))
    return low, high


def _number(value: Any) -> float:
    """JSON has no infinity: transformers writes {"__float__": "Infinity"}."""
    return float(value["__float__"] if isinstance(value, dict) else value)
