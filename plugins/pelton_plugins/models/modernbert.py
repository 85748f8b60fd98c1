"""ModernBERT: norms before each sub-layer, rotary positions, gated MLPs; most layers see a window only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.layers.embedding import VocabEmbedding
from pelton.layers.encoder import WholeLinear
from pelton.layers.pooler import Pooler
from pelton.layers.rope import Rope, get_rope
from pelton.model.build import BuildConfig, HFConfig
from pelton_plugins.models.encoder_attention import EncoderAttention
from pelton_plugins.models.encoder_layers import EncoderModel, LayerNorm, activation

LOCAL = "sliding_attention"
_THETAS = {LOCAL: ("local_rope_theta", 10_000.0), "full_attention": ("global_rope_theta", 160_000.0)}


def layer_type(hf: HFConfig, index: int) -> str:
    named = hf.get("layer_types")
    if named:
        return str(named[index])
    return LOCAL if index % hf.get("global_attn_every_n_layers", 3) else "full_attention"


def window(hf: HFConfig) -> int:
    """Places that a token of a local layer sees on either side."""
    return int(hf.get("local_attention", 128)) // 2


def _norm(config: BuildConfig, prefix: str) -> LayerNorm:
    hf = config.hf
    return LayerNorm(
        hf.hidden_size,
        config=config,
        prefix=prefix,
        eps=hf.get("norm_eps", 1e-5),
        bias=bool(hf.get("norm_bias", False)),
    )


def _rope(config: BuildConfig, kind: str, head_dim: int) -> Rope:
    """Both forms of config.json: a set for each kind of layer, or a theta for each."""
    name, default = _THETAS[kind]
    sets = config.hf.get("rope_parameters")
    own = sets.get(kind) if isinstance(sets, Mapping) else None
    theta = own.get("rope_theta") if isinstance(own, Mapping) else None
    return get_rope(config, head_dim, layer_type=kind, theta=theta or config.hf.get(name, default))


class ModernBertLayer(nn.Module):
    def __init__(self, index: int, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        hf = config.hf
        hidden_size, num_heads = hf.hidden_size, hf.num_attention_heads
        head_dim, kind = hidden_size // num_heads, layer_type(hf, index)
        attention_bias, mlp_bias = bool(hf.get("attention_bias", False)), bool(hf.get("mlp_bias", False))
        # The embeddings have been normed already.
        self.attn_norm = _norm(config, f"{prefix}.attn_norm") if index else nn.Identity()
        self.qkv = WholeLinear(
            hidden_size, {f"{prefix}.attn.Wqkv": 3 * hidden_size}, config=config, bias=attention_bias
        )
        self.attn = EncoderAttention(
            num_heads, head_dim, rope=_rope(config, kind, head_dim),
            sliding_window=window(hf) if kind == LOCAL else None, config=config, prefix=f"{prefix}.attn",
        )  # fmt: skip
        self.attn_out = WholeLinear(hidden_size, {f"{prefix}.attn.Wo": hidden_size}, config=config, bias=attention_bias)
        self.mlp_norm = _norm(config, f"{prefix}.mlp_norm")
        self.up_gate = WholeLinear(
            hidden_size, {f"{prefix}.mlp.Wi": 2 * hf.intermediate_size}, config=config, bias=mlp_bias
        )
        self.activation = activation(hf.get("hidden_activation", "gelu"))
        self.down = WholeLinear(hf.intermediate_size, {f"{prefix}.mlp.Wo": hidden_size}, config=config, bias=mlp_bias)

    def forward(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        hidden = hidden + self.attn_out(self.attn(self.qkv(self.attn_norm(hidden)), batch))
        up, gate = self.up_gate(self.mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(self.activation(up) * gate)


class ModernBertModel(EncoderModel):
    """Hidden states for vectors."""

    inner: ClassVar[str] = ""
    """Before the encoder's names in the checkpoint."""
    ignored: ClassVar[tuple[str, ...]] = (r"head\..*", r"decoder\..*")
    """Heads of training that no vector is made by."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config)
        hf, base = config.hf, f"{prefix}{self.inner}"
        for pattern in self.ignored:
            config.weights.ignore(pattern)
        self.word = VocabEmbedding(
            hf.vocab_size, hf.hidden_size, config=config, prefix=f"{base}embeddings.tok_embeddings"
        )
        self.norm = _norm(config, f"{base}embeddings.norm")
        self.layers = nn.ModuleList(
            ModernBertLayer(index, config=config, prefix=f"{base}layers.{index}")
            for index in range(hf.num_hidden_layers)
        )
        self.final_norm = _norm(config, f"{base}final_norm")
        self.pooler = Pooler(config=config)

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden: Tensor = self.norm(self.word(batch.input_ids))
        for layer in self.layers:
            hidden = layer(hidden, batch)
        return hidden

    def hidden_states(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        states: Tensor = self.final_norm(hidden if rows is None else hidden[rows])
        return states


class ModernBertForMaskedLM(ModernBertModel):
    """Saved with its pre-training head, which is left out."""

    inner = "model."


class _Headed(ModernBertModel):
    """A dense layer with its norm, then the classes."""

    inner = "model."
    ignored = ()

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        assert config.pooling is not None
        hf = config.hf
        size, has_bias = hf.hidden_size, bool(hf.get("classifier_bias", False))
        self.dense = WholeLinear(size, {f"{prefix}head.dense": size}, config=config, bias=has_bias)
        self.head_activation: Any = activation(hf.get("classifier_activation", "gelu"))
        self.head_norm = _norm(config, f"{prefix}head.norm")
        self.classifier = WholeLinear(
            size, {f"{prefix}classifier": config.pooling.num_labels}, config=config, bias=True
        )

    def classify(self, vectors: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.head_norm(self.head_activation(self.dense(vectors))))
        return logits


class ModernBertForSequenceClassification(_Headed):
    """Classes from the first token's hidden state, or from the mean, as config.json says."""


class ModernBertForTokenClassification(_Headed):
    """A class for each token."""
