"""OLMo 2: each sub-layer's output is normed, its input is not; queries and keys are normed over all heads together.

A layer returns the sum of all sub-layers so far, and no residual beside it.
"""

from __future__ import annotations

from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.errors import ConfigError
from pelton.layers.attention import AttentionLayer
from pelton.layers.linear import MergedGateUp, QKVLinear, RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import get_rope
from pelton.model.build import BuildConfig
from pelton_plugins.models.stages import StagedDecoder


class Olmo2DecoderLayer(nn.Module):
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
        self.q_norm = norm("self_attn.q_norm", num_heads * head_dim)
        self.k_norm = norm("self_attn.k_norm", num_kv_heads * head_dim)
        self.attn = AttentionLayer(
            num_heads,
            num_kv_heads,
            head_dim,
            rope=get_rope(config, head_dim),
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

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, None]:
        qkv, _ = self.qkv_proj(hidden, None)
        start = 0
        for one in (self.q_norm, self.k_norm):
            part = qkv[:, start : start + one.spec.size]
            part.copy_(one(part))
            start += one.spec.size
        hidden = hidden + self.post_attention_layernorm(self.o_proj(self.attn(qkv, batch)))
        activated, _ = self.gate_up_proj(hidden, None)
        return hidden + self.post_feedforward_layernorm(self.down_proj(activated)), None


class Olmo2ForCausalLM(StagedDecoder):
    carries_residual = False

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config)
        if config.parallel.size > 1:
            raise ConfigError(
                "OLMo 2 norms queries and keys over all heads, which one rank has here: set tensor_parallel_size to 1."
            )
        hf, model = config.hf, f"{prefix}model"
        is_tied = bool(hf.get("tie_word_embeddings"))
        self.embed_tokens = self.make_embedding(config, f"{model}.embed_tokens", is_tied=is_tied)
        self.layers = nn.ModuleList(
            Olmo2DecoderLayer(index, config=config, prefix=f"{model}.layers.{index}")
            for index in self.own_layers(config, f"{model}.layers")
        )
        self.norm = RMSNorm(hf.hidden_size, config=config, prefix=f"{model}.norm")
        self.lm_head = self.make_head(config, f"{prefix}lm_head", norm=self.norm, is_tied=is_tied)
