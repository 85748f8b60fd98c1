"""MLPs and experts without a gate: down(relu(up(x))^2)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from pelton.errors import ConfigError
from pelton.layers.linear import RowParallelLinear, ShardLinear
from pelton.quantization.interface import LinearShard
from pelton.quantization.plain import decoded_weights
from pelton_plugins.models.normed import BareLinear, NormedLinear, whole_shard
from pelton_plugins.models.parallel import AddedNorm
from pelton_plugins.models.shares import Share, row_shard

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import ForwardBatch
    from pelton.layers.norm import RMSNorm
    from pelton.model.build import BuildConfig
    from pelton.ops.moe import RoutingSpec


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


class UngatedMLP(nn.Module):
    def __init__(self, norm: RMSNorm, width: int, *, bias: bool, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        size, self.input_norm = config.hf.hidden_size, norm
        up = row_shard(f"{prefix}.up_proj", Share.split(width, "intermediate_size", config), size)
        self.up_proj = NormedLinear([up], norm=norm, bias=bias, config=config)
        self.down_proj = RowParallelLinear(width, size, bias=bias, config=config, prefix=f"{prefix}.down_proj")

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        inner, residual = self.up_proj(hidden, residual)
        return self.down_proj(relu2(inner)), residual


class UngatedMoe(nn.Module):
    """The norm, a router with sigmoid scores and a correction, its experts, and one MLP that every token takes.

    Ranks have a part of each expert's intermediate numbers, or with expert parallelism some of the experts. T tokens, H hidden size,
    E experts of this rank, k of a token, I intermediate size of this rank, L numbers that experts read and give.
    """

    def __init__(
        self,
        norm: RMSNorm,
        routing: RoutingSpec,
        *,
        width: int,
        shared_width: int,
        latent_size: int | None,
        bias: bool,
        config: BuildConfig,
        prefix: str,
    ) -> None:
        """width: I of all ranks; shared_width: of the MLP that every token takes. latent_size: L, where it is not H. bias: of all
        products but the experts' own."""
        super().__init__()
        method = decoded_weights(config)
        if method is None:
            raise ConfigError(
                f"quantization is {config.quantization.name!r}, and {prefix} has experts without a gate, which this version keeps in the "
                "model's dtype alone. Use q8_0 or q4_1, which round the other matrices, or leave quantization unset."
            )
        if config.adapters is not None:
            config.adapters.refuse(prefix, "it belongs to a layer of experts")
        size, self.input_norm, self.routing = config.hf.hidden_size, norm, routing
        self.add_norm = AddedNorm(norm, config=config)
        self.into_latent, self.from_latent = None, None
        if latent_size is not None:
            into, back = f"{prefix}.fc1_latent_proj", f"{prefix}.fc2_latent_proj"
            self.into_latent = ShardLinear(whole_shard(into, latent_size, size), bias=bias, config=config)
            # It reads a part of the sum, and of the ranks one adds the bias.
            has_bias = bias and config.parallel.rank == 0
            self.from_latent = ShardLinear(whole_shard(back, size, latent_size), bias=has_bias, config=config)
            if bias and not has_bias:
                config.weights.ignore(rf"{re.escape(back)}\.bias")
        count, inner = routing.num_experts, latent_size or size
        self.router = _parameter(config, f"{prefix}.gate.weight", count, size, dtype=torch.float32)
        self.correction = _parameter(config, f"{prefix}.gate.e_score_correction_bias", count, dtype=torch.float32)
        experts, own = Share.whole(count), Share.whole(width)
        if config.parallel.size > 1 and config.has_whole_experts:
            experts = Share.uneven(count, config)
            others = "|".join(str(index) for index in range(count) if not experts.start <= index < experts.stop)
            config.weights.ignore(rf"{re.escape(prefix)}\.experts\.({others})\..*")
        else:
            own = Share.split(width, f"intermediate size of {prefix}'s experts", config)
        self.first_expert = experts.start
        self.up, self.down = (
            nn.Parameter(config.empty(experts.count, *shape), requires_grad=False)
            for shape in ((own.count, inner), (inner, own.count))
        )
        for place in range(experts.count):
            expert = f"{prefix}.experts.{experts.start + place}"
            method.expect(config, row_shard(f"{expert}.up_proj", own, inner), self.up[place])
            down = LinearShard(f"{expert}.down_proj", inner, width, (0, inner), (own.start, own.stop))
            method.expect(config, down, self.down[place])
        shared = f"{prefix}.shared_experts"
        up = row_shard(f"{shared}.up_proj", Share.split(shared_width, f"width of {shared}", config), size)
        self.shared_up = BareLinear([up], bias=bias, config=config)
        self.shared_down = RowParallelLinear(shared_width, size, bias=bias, config=config, prefix=f"{shared}.down_proj")

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        x, residual = self.add_norm(hidden, residual)
        experts, shares = route(F.linear(x.float(), self.router), self.correction, self.routing)
        latent = x if self.into_latent is None else self.into_latent(x)
        sum_of = sum_of_chosen if x.device.type == "cpu" else sum_of_all
        result = sum_of(latent, experts - self.first_expert, shares, self.up, self.down)
        if self.from_latent is not None:
            result = self.from_latent(result)
        return result + self.shared_down(relu2(self.shared_up(x))), residual


def sum_of_chosen(x: Tensor, experts: Tensor, shares: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The weighted sum of each token's experts: x [T, L], experts and shares [T, k], up [E, I, L], down [E, L, I] -> [T, L]. Those
    that are none of the E are left out."""
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for index in experts[(experts >= 0) & (experts < len(up))].unique().tolist():
        tokens, place = torch.where(experts == index)
        out = F.linear(relu2(F.linear(x[tokens], up[index])), down[index])
        result.index_add_(0, tokens, out.float() * shares[tokens, place, None])
    return result.to(x.dtype)


def sum_of_all(x: Tensor, experts: Tensor, shares: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The same without a question to the device: every expert computes every token. Right, and slow."""
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for index in range(len(up)):
        share = torch.where(experts == index, shares, 0.0).sum(dim=-1, keepdim=True)
        result += F.linear(relu2(F.linear(x, up[index])), down[index]).float() * share
    return result.to(x.dtype)


def route(logits: Tensor, correction: Tensor, spec: RoutingSpec) -> tuple[Tensor, Tensor]:
    """logits [T, E] float32 -> experts [T, k] int64, their weights [T, k] float32; as `RoutingSpec` says of sigmoid scores."""
    scores = logits.sigmoid()
    groups = (scores + correction).unflatten(-1, (spec.num_groups, -1))
    best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(spec.top_groups, dim=-1).indices
    is_chosen = torch.zeros(groups.shape[:2], dtype=torch.bool, device=logits.device).scatter(1, best, value=True)
    experts = groups.masked_fill(~is_chosen[..., None], -torch.inf).flatten(1).topk(spec.top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if spec.is_renormalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return experts, weights * spec.scale


def _parameter(config: BuildConfig, name: str, *shape: int, dtype: torch.dtype) -> nn.Parameter:
    made = nn.Parameter(config.empty(*shape, dtype=dtype), requires_grad=False)
    config.weights.expect(name, shape, made)
    return made
