"""StarCoder2: layer norms, biases everywhere, and an MLP without a gate."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.errors import ConfigError
from pelton.layers.attention import AttentionLayer
from pelton.layers.linear import ACTIVATION_NAMES, QKVLinear, RowParallelLinear
from pelton.layers.rope import get_rope
from pelton.model.build import BuildConfig
from pelton.ops.reference import ACTIVATIONS
from pelton.quantization.interface import LinearShard
from pelton_plugins.models.layer_norm import LayerNorm
from pelton_plugins.models.normed import NormedLinear
from pelton_plugins.models.stages import StagedDecoder


def norm_of(config: BuildConfig, prefix: str) -> LayerNorm:
    hf = config.hf
    return LayerNorm(hf.hidden_size, eps=hf.get("norm_epsilon", 1e-5), bias=True, config=config, prefix=prefix)


class Starcoder2DecoderLayer(nn.Module):
    def __init__(self, index: int, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        hf, parallel = config.hf, config.parallel
        hidden_size, num_heads, bias = hf.hidden_size, hf.num_attention_heads, bool(hf.get("use_bias", True))
        head_dim = hf.get("head_dim", hidden_size // num_heads)
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        fields: dict[str, Any] = {"bias": bias, "config": config}
        self.input_layernorm = norm_of(config, f"{prefix}.input_layernorm")
        self.qkv_proj = QKVLinear(
            hidden_size, num_heads, hf.get("num_key_value_heads", num_heads), head_dim, norm=self.input_layernorm,
            prefix=attention, **fields,
        )  # fmt: skip
        self.attn = AttentionLayer(
            self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, head_dim, rope=get_rope(config, head_dim),
            sliding_window=hf.get("sliding_window"), config=config, prefix=f"{attention}.attn",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(num_heads * head_dim, hidden_size, prefix=f"{attention}.o_proj", **fields)
        self.post_attention_layernorm = norm_of(config, f"{prefix}.post_attention_layernorm")
        activation = hf.get("hidden_act", "gelu_pytorch_tanh")
        if activation not in ACTIVATION_NAMES:
            raise ConfigError(f"hidden_act is {activation!r}; there is {', '.join(ACTIVATION_NAMES)}.")
        self.activation = ACTIVATIONS[ACTIVATION_NAMES[activation]]
        inner = hf.intermediate_size
        width = parallel.share(inner, "intermediate_size")
        rows = (parallel.rank * width, (parallel.rank + 1) * width)
        shard = LinearShard(f"{mlp}.c_fc", inner, hidden_size, rows, (0, hidden_size))
        self.c_fc = NormedLinear([shard], norm=self.post_attention_layernorm, **fields)
        self.c_proj = RowParallelLinear(inner, hidden_size, prefix=f"{mlp}.c_proj", **fields)

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        qkv, residual = self.qkv_proj(hidden, residual)
        inner, residual = self.c_fc(self.o_proj(self.attn(qkv, batch)), residual)
        return self.c_proj(self.activation(inner)), residual


class Starcoder2ForCausalLM(StagedDecoder):
    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config)
        hf, model = config.hf, f"{prefix}model"
        is_tied = hf.get("tie_word_embeddings", True)
        self.embed_tokens = self.make_embedding(config, f"{model}.embed_tokens", is_tied=is_tied)
        self.layers = nn.ModuleList(
            Starcoder2DecoderLayer(index, config=config, prefix=f"{model}.layers.{index}")
            for index in self.own_layers(config, f"{model}.layers")
        )
        self.norm = norm_of(config, f"{model}.norm")
        self.lm_head = self.make_head(config, f"{prefix}lm_head", norm=self.norm, is_tied=is_tied)
