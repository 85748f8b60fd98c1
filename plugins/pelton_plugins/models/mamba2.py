"""Mamba-2: a norm and a layer with a state, and nothing else; no attention anywhere."""

from __future__ import annotations

from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.layers.decoder import Decoder
from pelton.layers.embedding import LMHead, VocabEmbedding
from pelton.layers.norm import RMSNorm
from pelton.model.build import BuildConfig
from pelton_plugins.models.state_space import Mamba2Mixer, dt_limit


class Mamba2Block(nn.Module):
    def __init__(self, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        hf = config.hf
        eps = hf.get("layer_norm_epsilon", 1e-5)
        self.norm = RMSNorm(hf.hidden_size, eps=eps, config=config, prefix=f"{prefix}.norm")
        self.mixer = Mamba2Mixer(
            num_heads=hf.num_heads, head_dim=hf.head_dim, state_size=hf.state_size, num_groups=hf.n_groups,
            conv_kernel=hf.conv_kernel, norm=self.norm, has_conv_bias=bool(hf.get("use_conv_bias", True)),
            has_bias=bool(hf.get("use_bias")), dt_limit=dt_limit(config), eps=eps, config=config,
            prefix=f"{prefix}.mixer",
        )  # fmt: skip

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        return self.mixer(hidden, residual, batch)


class Mamba2ForCausalLM(Decoder):
    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config)
        hf, backbone = config.hf, f"{prefix}backbone"
        self.embed_tokens = VocabEmbedding(
            hf.vocab_size, hf.hidden_size, config=config, prefix=f"{backbone}.embeddings"
        )
        self.layers = nn.ModuleList(
            Mamba2Block(config=config, prefix=f"{backbone}.layers.{index}") for index in range(hf.num_hidden_layers)
        )
        eps = hf.get("layer_norm_epsilon", 1e-5)
        self.norm = RMSNorm(hf.hidden_size, eps=eps, config=config, prefix=f"{backbone}.norm_f")
        self.lm_head = LMHead(
            norm=self.norm, embedding=self.embed_tokens, tied=bool(hf.get("tie_word_embeddings")), config=config,
            prefix=f"{prefix}lm_head",
        )  # fmt: skip
