"""OLMo 2: each sub-layer's output is normed, its input is not; queries and keys are normed over all heads together.

A layer returns the sum of all sub-layers so far, and no residual beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.layers.attention import AttentionLayer
from pelton.layers.linear import MergedGateUp, QKVLinear, RowParallelLinear, split_heads
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import Rope, get_rope
from pelton.model.build import BuildConfig
from pelton_plugins.models.stages import StagedDecoder


class QKNorm(nn.Module):
    """RMS norms of queries and of keys, each over all heads of all ranks: ranks add up their squares, four bytes of each for a token."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        parallel = config.parallel
        self.eps = config.hf.get("rms_norm_eps", 1e-6)
        self.sizes, self.parts, self.weights = [], [], nn.ParameterList()
        for name, total, key in (
            ("q_norm", num_heads, "num_attention_heads"), ("k_norm", num_kv_heads, "num_key_value_heads"),
        ):  # fmt: skip
            start, stop = (head * head_dim for head in split_heads(total, parallel.rank, parallel.size, key))
            weight = nn.Parameter(config.empty(stop - start), requires_grad=False)
            config.weights.expect(f"{prefix}.{name}.weight", (total * head_dim,), weight, dim=0, start=start, stop=stop)
            self.weights.append(weight)
            self.parts.append(stop - start)
            self.sizes.append(
                total * head_dim * max(1, parallel.size // total)
            )  # with the copies that ranks have of a head
        self.all_reduce = config.all_reduce(2, "float32")

    def forward(self, qkv: Tensor) -> None:
        """qkv [T, (num_heads + 2 num_kv_heads) head_dim], normed in place"""
        parts = qkv[:, : sum(self.parts)].split(self.parts, dim=1)
        sums = [part.float().square().sum(1) / size for part, size in zip(parts, self.sizes, strict=True)]
        means = torch.stack(sums, dim=1)
        if self.all_reduce is not None:
            means = self.all_reduce(means)
        factors = torch.rsqrt(means + self.eps).split(1, dim=1)
        for part, factor, weight in zip(parts, factors, self.weights, strict=True):
            part.copy_((part.float() * factor).to(qkv.dtype) * weight)


class Olmo2DecoderLayer(nn.Module):
    """Between layers every rank has the whole sum; the embedding gives parts of it, and the head adds parts up: the first rank's."""

    def __init__(self, index: int, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        hf = config.hf
        hidden_size, num_heads = hf.hidden_size, hf.num_attention_heads
        num_kv_heads, head_dim = hf.get("num_key_value_heads", num_heads), hf.get("head_dim", hidden_size // num_heads)
        attention, mlp, bias = f"{prefix}.self_attn", f"{prefix}.mlp", bool(hf.get("attention_bias"))

        def norm(name: str, size: int = hidden_size) -> RMSNorm:
            return RMSNorm(size, config=config, prefix=f"{prefix}.{name}")

        self.qkv_proj = QKVLinear(
            hidden_size, num_heads, num_kv_heads, head_dim, norm=None, bias=bias, config=config, prefix=attention
        )
        self.qk_norm = QKNorm(num_heads, num_kv_heads, head_dim, config=config, prefix=attention)
        self.attn = AttentionLayer(
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            head_dim,
            rope=self.rope(head_dim, config),
            config=config,
            prefix=f"{attention}.attn",
        )
        self.o_proj = RowParallelLinear(
            num_heads * head_dim, hidden_size, bias=bias, config=config, prefix=f"{attention}.o_proj"
        )
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.gate_up_proj = MergedGateUp(
            hidden_size,
            hf.intermediate_size,
            activation=hf.get("hidden_act", "silu"),
            norm=None,
            config=config,
            prefix=mlp,
        )
        self.down_proj = RowParallelLinear(hf.intermediate_size, hidden_size, config=config, prefix=f"{mlp}.down_proj")
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")
        self.all_reduce = config.all_reduce(hidden_size)
        self.takes_parts = index == 0
        self.gives_nothing = index == hf.num_hidden_layers - 1 and config.parallel.rank > 0

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, None]:
        if self.takes_parts:
            hidden = self._sum(hidden)
        qkv, _ = self.qkv_proj(hidden, None)
        self.qk_norm(qkv)
        hidden = hidden + self.post_attention_layernorm(self._sum(self.o_proj(self.attn(qkv, batch))))
        activated, _ = self.gate_up_proj(hidden, None)
        hidden = hidden + self.post_feedforward_layernorm(self._sum(self.down_proj(activated)))
        return hidden.zero_() if self.gives_nothing else hidden, None

    def rope(self, head_dim: int, config: BuildConfig) -> Rope | None:
        return get_rope(config, head_dim)

    def _sum(self, partial: Tensor) -> Tensor:
        return partial if self.all_reduce is None else self.all_reduce(partial)


class Olmo2ForCausalLM(StagedDecoder):
    carries_residual = False

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config)
        hf, model = config.hf, f"{prefix}model"
        is_tied = bool(hf.get("tie_word_embeddings"))
        self.embed_tokens = self.make_embedding(config, f"{model}.embed_tokens", is_tied=is_tied)
        self.layers = nn.ModuleList(
            Olmo2DecoderLayer(index, config=config, prefix=f"{model}.layers.{index}")
            for index in self.own_layers(config, f"{model}.layers")
        )
        self.norm = RMSNorm(hf.hidden_size, config=config, prefix=f"{model}.norm")
        self.lm_head = self.make_head(config, f"{prefix}lm_head", norm=self.norm, is_tied=is_tied)
