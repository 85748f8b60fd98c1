"""Llama's shape with experts in place of the MLP of some layers: what Mixtral, Qwen and GLM share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor

from pelton.attention.metadata import ForwardBatch
from pelton.errors import ConfigError
from pelton.layers.linear import QKVLinear
from pelton.model.build import BuildConfig, HFConfig
from pelton.model.loading import LazyWeight
from pelton.ops.moe import RoutingSpec
from pelton_plugins.models.experts import GatedMLP, SparseMoe
from pelton_plugins.models.llama import LlamaDecoderLayer, LlamaForCausalLM, keep_adapters
from pelton_plugins.models.olmo2 import QKNorm
from pelton_plugins.models.stacked_experts import one_for_each_expert


class MoeDecoderLayer(LlamaDecoderLayer):
    """A subclass says which layers have experts, and makes them."""

    experts: SparseMoe | None

    def make_mlp(self, index: int, config: BuildConfig, prefix: str) -> None:
        self.experts = None
        if self.has_experts(index, config.hf):
            self.experts = self.make_experts(config, prefix)
        else:
            super().make_mlp(index, config, prefix)

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        if self.experts is None:
            return super().forward(hidden, residual, batch)
        qkv, residual = self.qkv_proj(hidden, residual)
        hidden = self.o_proj(self.attend(qkv, batch))
        result: tuple[Tensor, Tensor] = self.experts(hidden, residual, batch)
        return result

    def forward_tokens(
        self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.experts is None:
            return super().forward_tokens(hidden, residual, batch, tokens)
        qkv, residual = self.qkv_proj(hidden, residual)
        attended, residual = self.attend(qkv, batch).index_select(0, tokens), residual.index_select(0, tokens)
        if not len(tokens):
            return residual, residual
        keep_adapters(batch, tokens)
        result: tuple[Tensor, Tensor] = self.experts(self.o_proj(attended), residual, batch, tokens)
        return result

    def has_experts(self, index: int, hf: HFConfig) -> bool:
        return True

    def make_experts(self, config: BuildConfig, prefix: str) -> SparseMoe:
        raise NotImplementedError


class JointlyNormedLayer(MoeDecoderLayer):
    """Queries and keys are normed over all heads together, as in OLMo 2."""

    def __init__(self, index: int, *, config: BuildConfig, prefix: str, **fields: Any) -> None:
        super().__init__(index, config=config, prefix=prefix, **fields)
        hf = config.hf
        self.qk_norm = QKNorm(
            hf.num_attention_heads, hf.get("num_key_value_heads", hf.num_attention_heads), self.attn.head_dim,
            config=config, prefix=f"{prefix}.self_attn",
        )  # fmt: skip

    def attend(self, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        self.qk_norm(qkv)
        return super().attend(qkv, batch)


class MoeForCausalLM(LlamaForCausalLM):
    """`layer_class` is all that a model of this shape replaces."""

    layer_class = MoeDecoderLayer
    warm_up_layers_of_a_kind = 2
    """A first start goes through so many: the second reads what the first gives."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        self._chain: tuple[Any, dict[Any, Any]] = None, {}
        self.link_layers()

    def link_layers(self) -> None:
        """Tell experts who reads what they give."""
        layers: list[Any] = list(self.layers)
        for layer in layers if self._has_own_forward else ():
            if isinstance(getattr(layer, "experts", None), SparseMoe) and _gives(layer):
                layer.experts.read_by(partial(self._reader, layer))

    def _reader(self, layer: Any, num_tokens: int) -> Callable[..., Any] | None:
        """Return the op of the layer above that alone reads so many rows of what one gives; None where hooks read them, too, as EAGLE-3's
        do. Warm-ups leave layers out."""
        if self._chain[0] is not self.layers:
            self._chain = self.layers, dict(pairwise(self.layers))
        above = self._chain[1].get(layer)
        if above is None or not _reads(above) or layer._forward_hooks or layer.experts._forward_hooks:
            return None
        if above._forward_pre_hooks or above.qkv_proj._forward_pre_hooks:
            return None
        op: Callable[..., Any] = above.qkv_proj.reader(num_tokens)
        return op

    @property
    def _has_own_forward(self) -> bool:
        """Return whether nobody but the layer above reads what a layer gives."""
        return type(self).forward is LlamaForCausalLM.forward

    @property
    def can_forward_tokens(self) -> bool:
        """Not where experts count all of their tokens, nor where ranks that have others wait for each other."""
        layer = self.layers[-1]
        experts = getattr(layer, "experts", None)
        if experts is None:
            return False
        return self._has_own_forward and is_of_moe(layer) and experts.has_all and experts.expert_load is None

    @property
    def keeps_adapters(self) -> bool:
        return getattr(type(self.layers[-1]), "forward_tokens", None) is MoeDecoderLayer.forward_tokens

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(one_for_each_expert(weights, self.weights.expected()))


def _gives(layer: Any) -> bool:
    """Return whether a layer gives what its experts' op does."""
    own = type(layer.experts)
    return is_of_moe(layer) and own.forward is SparseMoe.forward and own.with_input is SparseMoe.with_input


def _reads(layer: Any) -> bool:
    """Return whether QKV's op is the first thing to see what comes into a layer, in whichever way it is called."""
    is_own = is_of_moe(layer) and type(layer).forward_tokens is MoeDecoderLayer.forward_tokens
    return is_own and type(layer.qkv_proj).forward is QKVLinear.forward and layer.qkv_proj.bare is None


def is_of_moe(layer: Any) -> bool:
    """Return whether a layer does what `MoeDecoderLayer.forward` says: QKV, which reads what comes in, is its first product."""
    return type(layer).forward is MoeDecoderLayer.forward


def check_fields(hf: HFConfig, **computed: Any) -> None:
    """Refuse a field whose value is not the one that is computed; where config.json leaves it out, it has that value."""
    for name, value in computed.items():
        if (found := hf.get(name, value)) != value:
            raise ConfigError(f"{name} is {found!r}; this model has {value!r}. Use another checkpoint.")


def num_experts(hf: HFConfig) -> int:
    """Return how many a layer has, by the name that the checkpoint has for it."""
    for name in ("num_experts", "num_local_experts"):
        if hf.get(name) is not None:
            return int(hf.get(name))
    return int(hf.n_routed_experts)


def grouped_routing(hf: HFConfig) -> RoutingSpec:
    """Routing of DeepSeek-V3: sigmoid scores, the best groups, then the best experts of those by score and correction."""
    return RoutingSpec(
        num_experts=num_experts(hf), top_k=hf.num_experts_per_tok, scoring="sigmoid",
        is_renormalized=bool(hf.get("norm_topk_prob", True)), scale=hf.get("routed_scaling_factor", 1.0),
        num_groups=hf.get("n_group", 1), top_groups=hf.get("topk_group", 1), group_score="top2", has_correction=True,
    )  # fmt: skip


def shared_experts(config: BuildConfig, prefix: str, count: int | None = None) -> GatedMLP | None:
    """Experts that every token takes, as one MLP of their joint width (DeepSeek, GLM); count: `n_shared_experts` when None."""
    hf = config.hf
    count = hf.get("n_shared_experts", 0) if count is None else count
    if not count:
        return None
    return GatedMLP(
        hf.hidden_size, hf.moe_intermediate_size * count, activation=hf.get("hidden_act", "silu"), config=config,
        prefix=f"{prefix}.shared_experts",
    )  # fmt: skip
