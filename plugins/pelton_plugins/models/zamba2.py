"""Zamba2: layers of Mamba-2, before some of which a block of attention and MLP reads hidden states and the embedding beside each other. Few
such blocks take turns: layers share their matrices, and add products of low rank of their own. Glorioso et al. (arXiv:2411.15242).

T tokens, H hidden size, of which a block reads 2 H.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.errors import ConfigError
from pelton.layers.attention import AttentionLayer
from pelton.layers.linear import RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import get_rope
from pelton.model.build import BuildConfig, HFConfig
from pelton.ops.reference import ACTIVATIONS
from pelton_plugins.models.moe import check_fields
from pelton_plugins.models.normed import BareLinear, whole_shard
from pelton_plugins.models.shares import Share, row_shard, shards_of
from pelton_plugins.models.stages import StagedDecoder
from pelton_plugins.models.state_space import Mamba2Mixer

_NAMES = {"mamba": "linear_attention"}
"""transformers' newer names of layers."""
_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}


class LowRank(nn.Module):
    """Two matrices of one layer, whose product is added to one that it shares."""

    def __init__(self, prefix: str, rows: list[Share], columns: int, *, config: BuildConfig) -> None:
        super().__init__()
        rank = int(config.hf.get("adapter_rank", 128))
        self.first = BareLinear([whole_shard(f"{prefix}.0", rank, columns)], config=config)
        self.second = BareLinear(shards_of(f"{prefix}.1", rows, rank), config=config)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x))
        return result


class SharedBlock(nn.Module):
    """Norms and matrices of attention and MLP, which several layers have."""

    def __init__(self, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        hf, self.prefix = config.hf, prefix
        size, wide, bias = hf.hidden_size, 2 * hf.hidden_size, bool(hf.get("add_bias_linear"))
        num_heads, attention, mlp = hf.num_attention_heads, f"{prefix}.self_attn", f"{prefix}.feed_forward"
        num_kv_heads = hf.get("num_key_value_heads") or num_heads
        config.parallel.check_copies(num_kv_heads)
        self.head_dim = int(hf.get("attention_head_dim", wide // num_heads))
        self.heads = Share.split(num_heads, "num_attention_heads", config)
        self.kv_heads = Share.copied(num_kv_heads, "num_key_value_heads", config)
        rows = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        self.rows = {name: heads.times(self.head_dim) for name, heads in rows.items()}
        self.input_layernorm = RMSNorm(wide, config=config, prefix=f"{prefix}.input_layernorm")
        self.qkv_proj = BareLinear(
            [row_shard(f"{attention}.{name}_proj", own, wide) for name, own in self.rows.items()], config=config
        )
        self.o_proj = RowParallelLinear(num_heads * self.head_dim, size, config=config, prefix=f"{attention}.o_proj")
        self.pre_ff_layernorm = RMSNorm(size, config=config, prefix=f"{prefix}.pre_ff_layernorm")
        width = hf.get("intermediate_size") or 4 * size
        self.width = Share.split(width, "intermediate_size", config)
        gate_up = shards_of(f"{mlp}.gate_up_proj", [self.width, self.width], size)
        self.gate_up_proj = BareLinear(gate_up, bias=bias, config=config)
        self.down_proj = RowParallelLinear(width, size, bias=bias, config=config, prefix=f"{mlp}.down_proj")


class Zamba2Layer(nn.Module):
    """A layer of Mamba-2. Its result is added to the residual, and a block's to what it reads alone. Of ranks each has parts of sums."""

    def __init__(
        self, index: int, block: SharedBlock | None, turn: int, *, config: BuildConfig, prefix: str
    ) -> None:  # fmt: skip
        """turn: how many layers before this one have a block."""
        super().__init__()
        self.block, mamba = block, prefix if block is None else f"{prefix}.mamba_decoder"
        self.input_layernorm = RMSNorm(config.hf.hidden_size, config=config, prefix=f"{mamba}.input_layernorm")
        self.mixer = _mixer(None if block is not None else self.input_layernorm, config, f"{mamba}.mamba")
        if block is not None:
            self._make_own_parts(block, turn, config, prefix)

    def _make_own_parts(self, block: SharedBlock, turn: int, config: BuildConfig, prefix: str) -> None:
        hf, size, head_dim = config.hf, config.hf.hidden_size, block.head_dim
        attention, mlp = f"{block.prefix}.self_attn", f"{block.prefix}.feed_forward"
        self.attn = AttentionLayer(
            block.heads.count, block.kv_heads.count, head_dim, scale=(head_dim / 2) ** -0.5,
            rope=get_rope(config, head_dim) if hf.get("use_mem_rope") else None, config=config, prefix=f"{prefix}.self_attn.attn",
        )  # fmt: skip
        self.adapters = nn.ModuleList()
        if hf.get("use_shared_attention_adapter"):
            if block.kv_heads.total != block.heads.total:
                raise ConfigError(
                    f"num_key_value_heads is {block.kv_heads.total} with use_shared_attention_adapter; such layers have "
                    f"num_attention_heads, {block.heads.total}, of them. Fix config.json."
                )
            self.adapters.extend(
                LowRank(f"{attention}.linear_{name}_adapter_list.{turn}", [rows], 2 * size, config=config)
                for name, rows in block.rows.items()
            )
        adapter, rows = f"{mlp}.gate_up_proj_adapter_list.{turn}", [block.width, block.width]
        self.mlp_adapter = LowRank(adapter, rows, size, config=config)
        self.linear = BareLinear([whole_shard(f"{prefix}.linear", size, size)], config=config)
        self.activation = ACTIVATIONS[_activation(hf)]
        self.all_reduce = config.all_reduce(size)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch, embedding: Tensor
    ) -> tuple[Tensor, Tensor]:
        """hidden, residual, embedding [T, H] -> (bare output, residual)"""
        if self.block is None:
            result: tuple[Tensor, Tensor] = self.mixer(hidden, residual, batch)
            return result
        hidden = self._sum(hidden)
        if residual is not None:
            hidden = hidden + residual
        x = self.input_layernorm(hidden + self._transformed(self.block, torch.cat([hidden, embedding], dim=1), batch))
        return self.mixer.mixed(self.mixer.in_proj(x), batch), hidden

    def _transformed(self, block: SharedBlock, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, 2 H] -> [T, H], through attention and MLP."""
        x = block.input_layernorm(x)
        qkv = block.qkv_proj(x)
        if len(self.adapters):
            qkv = qkv + torch.cat([adapter(x) for adapter in self.adapters], dim=1)
        x = block.pre_ff_layernorm(self._sum(block.o_proj(self.attn(qkv, batch))))
        gate, up = (block.gate_up_proj(x) + self.mlp_adapter(x)).chunk(2, dim=1)
        transformed: Tensor = self.linear(self._sum(block.down_proj(self.activation(gate) * up)))
        return transformed

    def _sum(self, partial: Tensor) -> Tensor:
        return partial if self.all_reduce is None else self.all_reduce(partial)


class Zamba2ForCausalLM(StagedDecoder):
    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config)
        hf, model, is_tied = config.hf, f"{prefix}model", bool(config.hf.get("tie_word_embeddings", True))
        check_fields(hf, use_long_context=False)
        self.embed_tokens = self.make_embedding(config, f"{model}.embed_tokens", is_tied=is_tied)
        self.all_reduce = config.all_reduce(hf.hidden_size)
        hybrid = [index for index, kind in enumerate(_kinds(hf)) if kind == "hybrid"]
        own, num_blocks = self.own_layers(config, f"{model}.layers"), int(hf.get("num_mem_blocks", 1))
        blocks: dict[int, SharedBlock] = {}
        self.layers = nn.ModuleList()
        for index in own:
            block, turn = None, hybrid.index(index) if index in hybrid else 0
            if index in hybrid:
                # The checkpoint has a block's tensors with the first of its layers. With a head of its own it has no ties at all.
                first = hybrid[turn % num_blocks] if is_tied else index
                if first not in blocks:
                    blocks[first] = SharedBlock(config=config, prefix=f"{model}.layers.{first}.shared_transformer")
                block = blocks[first]
            self.layers.append(
                Zamba2Layer(index, block, turn, config=config, prefix=f"{model}.layers.{index}")
            )  # fmt: skip
        # Copies that a checkpoint may have, and what is of other stages' layers.
        copies = "|".join(map(str, hybrid[num_blocks:] if is_tied else ()))
        config.weights.ignore(rf"{re.escape(model)}\.layers\.({copies})\.shared_transformer\..*")
        config.weights.ignore(rf"{re.escape(model)}\.layers\.\d+\.shared_transformer\..*_adapter_list\..*")
        self.norm = RMSNorm(hf.hidden_size, config=config, prefix=f"{model}.final_layernorm")
        self.lm_head = self.make_head(config, f"{prefix}lm_head", norm=self.norm, is_tied=is_tied)

    def forward(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        residual: Any = None
        if self._stage == 0:
            hidden = self.embed_tokens(batch.input_ids)
            embedding = hidden.clone()  # layers may write into what they read
            if self.all_reduce is not None:
                embedding = self.all_reduce(embedding)
        else:
            shape = len(batch.input_ids), self._made_of[1]
            hidden, residual, embedding = (self._received(batch, *shape) for _ in range(3))
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, batch, embedding)
        if self._stage < self._last:
            assert self._stages is not None
            for tensor in (hidden, residual, embedding):
                self._stages.send(tensor.contiguous(), self._stage + 1)
        return hidden, residual


def _mixer(norm: RMSNorm | None, config: BuildConfig, prefix: str) -> Mamba2Mixer:
    hf, num_heads = config.hf, config.hf.get("n_mamba_heads", 8)
    return Mamba2Mixer(
        num_heads=num_heads, head_dim=int(hf.get("mamba_expand", 2) * hf.hidden_size) // num_heads,
        state_size=hf.get("mamba_d_state", 64), num_groups=hf.get("mamba_ngroups", 1), conv_kernel=hf.get("mamba_d_conv", 4), norm=norm,
        has_conv_bias=True, has_bias=bool(hf.get("add_bias_linear")),
        dt_limit=(float(hf.get("time_step_min", 0.001)), float("inf")), eps=1e-5, fields=("n_mamba_heads", "mamba_ngroups"),
        config=config, prefix=prefix,
    )  # fmt: skip


def _kinds(hf: HFConfig) -> list[str]:
    kinds = [_NAMES.get(kind, kind) for kind in hf.get("layers_block_type") or hf.layer_types]
    if len(kinds) != hf.num_hidden_layers:
        raise ConfigError(
            f"layers_block_type has {len(kinds)} entries; expected one for each of {hf.num_hidden_layers} layers (num_hidden_layers). Fix "
            "config.json."
        )
    if unknown := sorted({*kinds} - {"linear_attention", "hybrid"}):
        raise ConfigError(
            f"layers_block_type has {unknown[0]!r}; this model has linear_attention, hybrid. Fix config.json."
        )
    return kinds


def _activation(hf: HFConfig) -> str:
    name = hf.get("hidden_act", "gelu")
    if name not in _ACTIVATIONS:
        raise ConfigError(f"hidden_act is {name!r}; this model has {', '.join(_ACTIVATIONS)}. Use another checkpoint.")
    return _ACTIVATIONS[name]
