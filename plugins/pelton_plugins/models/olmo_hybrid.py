"""OLMo Hybrid: of four layers three have the gated delta rule, and one is OLMo 2's, mostly without a rope."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import Rope, get_rope
from pelton.model.build import BuildConfig
from pelton.model.loading import LazyWeight
from pelton.quantization.interface import LinearShard
from pelton_plugins.models.delta_net import GatedDeltaNet
from pelton_plugins.models.hybrid import MLP, HybridDecoder, Parts, layer_kind, renamed
from pelton_plugins.models.olmo2 import Olmo2DecoderLayer
from pelton_plugins.models.shares import Share, row_shard

_NORMS = {".attention_layer_norm.": ".input_layernorm.", ".feedforward_layer_norm.": ".post_attention_layernorm."}


class OlmoDeltaNet(GatedDeltaNet):
    """With a matrix and a convolution for each of q, k and v, and by default with what takes up to twice what a key is known for."""

    output_name = "o_proj"

    def projections(self, prefix: str, heads: Share, groups: Share, hidden_size: int) -> Sequence[LinearShard]:
        keys, values = groups.times(self.state_size), heads.times(self.head_dim)
        rows = {"q": keys, "k": keys, "v": values, "b": heads, "a": heads, "g": values}
        return [row_shard(f"{prefix}.{name}_proj", own, hidden_size) for name, own in rows.items()]

    def make_taps(self, keys: Share, values: Share, taps: int) -> None:
        self.make_convolution({"q_conv1d": [keys], "k_conv1d": [keys], "v_conv1d": [values]}, taps)

    def make_norm(self, config: BuildConfig, prefix: str) -> RMSNorm:
        return RMSNorm(self.head_dim, eps=1e-5, config=config, prefix=f"{prefix}.o_norm")


class OlmoAttentionLayer(Olmo2DecoderLayer):
    """OLMo 2's layer, between others that leave a residual and parts of a sum, and read such: of the ranks the first gives them all."""

    def __init__(self, index: int, *, config: BuildConfig, prefix: str) -> None:
        super().__init__(index, config=config, prefix=prefix)
        self.takes_parts, self.gives_nothing = False, config.parallel.rank > 0

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, None]:
        hidden = self._sum(hidden)
        return super().forward(hidden if residual is None else hidden + residual, None, batch)

    def rope(self, head_dim: int, config: BuildConfig) -> Rope | None:
        """Released checkpoints have none: their rope_theta is null."""
        parameters = config.hf.get("rope_parameters")
        is_left_out = parameters is not None and parameters.get("rope_theta") is None
        return None if is_left_out else get_rope(config, head_dim)


class OlmoHybridForCausalLM(HybridDecoder):
    def make_layer(self, index: int, config: BuildConfig, prefix: str) -> nn.Module:
        hf = config.hf
        kind = layer_kind(index, hf)
        if kind == "full_attention" if kind is not None else index % 4 == 3:
            return OlmoAttentionLayer(index, config=config, prefix=prefix)
        mixer = OlmoDeltaNet(
            self.make_norm(config, f"{prefix}.input_layernorm"),
            max_beta=2.0 if hf.get("linear_allow_neg_eigval", True) else 1.0, config=config, prefix=f"{prefix}.linear_attn",
        )  # fmt: skip
        norm = self.make_norm(config, f"{prefix}.post_attention_layernorm")
        return Parts(mixer, MLP(norm, hf.intermediate_size, config=config, prefix=f"{prefix}.mlp"))

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(renamed(weights, _NORMS))
