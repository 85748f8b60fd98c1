"""A layer of Mamba-2: what it has of a request is a state of fixed size, and the last inputs of a short convolution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F

from pelton.layers.linear import RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton_plugins.models.normed import BareLinear, NormedLinear
from pelton_plugins.models.shares import Share, shards_of
from pelton_plugins.models.state_layer import GroupRMS, StateLayer, check_groups

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import ForwardBatch
    from pelton.model.build import BuildConfig


class Mamba2Mixer(StateLayer):
    """Product, convolution, states, gated norm, product: T tokens, E = num_heads * head_dim, of this rank.

    `StateParams` in `pelton_backends.sdpa.state_space` is all that a backend reads here.
    """

    attention_type: ClassVar[str] = "state"

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        state_size: int,
        num_groups: int,
        conv_kernel: int,
        norm: RMSNorm | None,
        has_conv_bias: bool,
        has_bias: bool,
        dt_limit: tuple[float, float],
        config: BuildConfig,
        prefix: str,
        eps: float | None = None,
        has_gated_norm: bool = True,
        has_output_bias: bool | None = None,
        fields: tuple[str, str] = ("mamba_n_heads", "mamba_n_groups"),
    ) -> None:
        """norm: of the sub-layer's input, which the first product reads; None where it is normed already (`mixed`). eps: of the gated
        norm; config.json's `rms_norm_eps` when None. has_bias: of both products, where `has_output_bias` does not say it of the last.
        fields: config.json's names of num_heads and num_groups. Ranks share out heads, and groups with them."""
        super().__init__(config=config, prefix=prefix)
        check_groups(num_heads, num_groups)
        self.input_norm = norm
        heads, groups = Share.split(num_heads, fields[0], config), Share.copied(num_groups, fields[1], config)
        inner, shared = heads.times(head_dim), groups.times(state_size)
        self.num_heads, self.num_groups = heads.count, groups.count
        self.head_dim, self.state_size, self.dt_limit = head_dim, state_size, dt_limit
        self.inner, self.shared = inner.count, shared.count
        size = config.hf.hidden_size
        shards = shards_of(f"{prefix}.in_proj", [inner, inner, shared, shared, heads], size)
        if norm is None:
            self.in_proj: Any = BareLinear(shards, bias=has_bias, config=config)
        else:
            self.in_proj = NormedLinear(shards, norm=norm, bias=has_bias, config=config)
        self.make_convolution({"conv1d": [inner, shared, shared]}, conv_kernel, has_bias=has_conv_bias)
        self.dt_bias = self.parameter("dt_bias", heads, dtype=torch.float32)
        self.a_log = self.parameter("A_log", heads, dtype=torch.float32)
        self.d = self.parameter("D", heads, dtype=torch.float32)
        self.norm_weight = self.parameter("norm.weight", inner) if has_gated_norm else None
        eps = config.hf.get("rms_norm_eps", 1e-6) if eps is None else eps
        self.group_norm = GroupRMS(groups, inner.total // num_groups, eps, config)
        self.out_proj = RowParallelLinear(
            inner.total, size, bias=has_bias if has_output_bias is None else has_output_bias, config=config,
            prefix=f"{prefix}.out_proj",
        )  # fmt: skip
        self.keep(
            self.conv_state(), ((self.num_heads, head_dim, state_size), "float32"), num_heads=self.num_heads,
            num_groups=self.num_groups, head_dim=head_dim,
        )  # fmt: skip

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """(bare output, residual), each [T, H]"""
        product, residual = self.in_proj(hidden, residual)
        return self.mixed(product, batch), residual

    def mixed(self, product: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, rows of `in_proj`] -> [T, H]"""
        mixed = self.mix(product, self.inner, batch)
        return self.out_proj(self.gated(mixed, product[:, : self.inner]))

    def gated(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Norm of mixed * silu(gate), for each group of heads by itself."""
        gated = mixed.float() * F.silu(gate.float())
        if self.norm_weight is None:
            return gated.to(mixed.dtype)
        return self.norm_weight * self.group_norm(gated).to(mixed.dtype)


def dt_limit(config: BuildConfig) -> tuple[float, float]:
    """Bounds of a token's step, of config.json's `time_step_limit`."""
    low, high = (_number(bound) for bound in config.hf.get("time_step_limit", (0.0, float("inf"))))
    return low, high


def _number(value: Any) -> float:
    """JSON has no infinity: transformers writes {"__float__": "Infinity"}."""
    return float(value["__float__"] if isinstance(value, dict) else value)
