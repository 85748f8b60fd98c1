"""The indexer of sparse attention over latents: it chooses which tokens each token attends to.

DeepSeek-AI, DeepSeek-V3.2-Exp (2025), section 1. Token t scores each token s up to itself, sum over j of w_tj relu(q_tj . k_s), and
attends to the `index_topk` tokens that score best; to all while there are no more. The indexer has queries, keys and a cache of its
own. Where scores are equal the earlier token is taken, so that the choice does not depend on how a prompt is cut into steps. A layer
may have none (GLM-5's `indexer_types`, arXiv:2603.12201): it attends to what the last one before it chose.

T tokens, J heads of the indexer, D numbers of each, K `index_topk`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from pelton.attention.cache_layer import register
from pelton.attention.interface import AttentionBackend, AttentionNeeds, BoundAttention
from pelton.errors import ConfigError
from pelton.kv_cache.spec import KVCacheSpec, MLASpec
from pelton.layers.linear import ShardLinear
from pelton.layers.rope import Rope
from pelton.ops.reference import rotate, write_rows
from pelton_plugins.models.encoder_layers import LayerNorm
from pelton_plugins.models.normed import whole_shard

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import ForwardBatch
    from pelton.model.build import BuildConfig, HFConfig

_KEY_NORM_EPS = 1e-6
_WITH_INDEXER, _WITHOUT_INDEXER = ("full", "F"), ("shared", "S")


class Choice:
    """A step's choice, which a layer's indexer makes, and its attention and that of layers without one read. One for all layers, at
    fixed addresses."""

    def __init__(
        self,
        config: BuildConfig,
        layers: range,
        *,
        reads_query_latent: bool = True,
        indexers: frozenset[int] | None = None,
    ) -> None:
        """layers: those of this stage. reads_query_latent: indexers do, and not what the attention reads. indexers: layers that have one,
        where no other reads what it chose; by config.json when None. Raises `ConfigError` for a query without a latent, where ranks share
        a cache token by token, and where the first layer has to read what one before it chose."""
        hf, context = config.hf, config.parallel.context
        if reads_query_latent and not hf.get("q_lora_rank"):
            raise ConfigError(
                f"q_lora_rank is {hf.get('q_lora_rank')}, and this model's indexer reads the query's latent. Give config.json its "
                "size, such as 1536."
            )
        if context is not None:
            raise ConfigError(
                f"decode_context_parallel_size is {context.size}, and this model's indexer compares all tokens of a row, of which "
                "each rank would keep a part. Set it to 1."
            )
        self.indexers = layers_with_indexer(hf) if indexers is None else indexers
        """Numbers of the layers that have one."""
        if indexers is None and layers[0] not in self.indexers:
            raise ConfigError(
                f"Layer {layers[0]} has no indexer, and none is before it in its pipeline stage. Layers {sorted(self.indexers)} have one: "
                "let stages begin there, by pipeline_layer_partition."
            )
        rows, top_k = config.max_num_batched_tokens, min(hf.index_topk, config.max_model_len)
        self.tokens = config.empty(rows, top_k, dtype=torch.int32)
        """[tokens of a step, K]: tokens of the row, in front of -1 where there are fewer."""
        self.weights = config.empty(rows, hf.index_n_heads, dtype=torch.float32)


class Window:
    """A step's choice that is each token's last ones: a sliding window, of layers whose attention reads what is chosen. Their caches keep
    all tokens."""

    def __init__(self, config: BuildConfig, size: int) -> None:
        """size: tokens, the token itself among them."""
        size = min(size, config.max_model_len)
        self.tokens = config.empty(config.max_num_batched_tokens, size, dtype=torch.int32)
        """As in `Choice`."""
        self._places = torch.arange(size, device=config.device)

    def choose(self, positions: Tensor) -> None:
        """positions [T] of a step's tokens in their rows."""
        last = positions[:, None]
        tokens = (last - (len(self._places) - 1)).clamp(min=0) + self._places
        self.tokens[: len(positions)] = torch.where(tokens <= last, tokens, -1)


def layers_with_indexer(hf: HFConfig) -> frozenset[int]:
    """Return their numbers, by config.json's list or pattern of layers, else by how often one has it; all where it says nothing."""
    name = "index_topk_pattern" if hf.get("indexer_types") is None else "indexer_types"
    total, kinds = hf.num_hidden_layers, hf.get(name)
    if kinds is None:
        every, offset = max(hf.get("index_topk_freq", 1), 1), hf.get("index_skip_topk_offset", 2)
        return frozenset(index for index in range(total) if max(index - offset + 1, 0) % every == 0)
    if len(kinds) < total or not {*kinds} <= {*_WITH_INDEXER, *_WITHOUT_INDEXER}:
        raise ConfigError(
            f"{name} is {kinds!r}; expected 'full' or 'shared' (or F, S) for each of {total} layers. Fix config.json."
        )
    return frozenset(index for index in range(total) if kinds[index] in _WITH_INDEXER)


class Indexer(nn.Module):
    """A `CacheLayer` whose cache holds keys of the indexer. Every rank has all of it, and makes the same choice.

    Its backend's call takes queries [T, J, D], reads their heads' `weights` and fills `Choice.tokens`.
    """

    cache: Tensor  # [num_blocks, block_size, D], a view of the pool
    backend: AttentionBackend
    attend: BoundAttention

    def __init__(
        self,
        choice: Choice,
        *,
        rope: Rope | None,
        config: BuildConfig,
        prefix: str,
        query_size: int | None = None,
        key_eps: float = _KEY_NORM_EPS,
        turns_last: bool = False,
    ) -> None:
        """query_size: of what the queries are made of; `q_lora_rank` when None. key_eps: of the keys' norm. turns_last: the last numbers
        of a head turn, not the first."""
        super().__init__()
        hf = config.hf
        query_size = hf.q_lora_rank if query_size is None else query_size
        self.layer_name = prefix
        self.shares: str | None = None
        self.num_heads, self.head_dim = hf.index_n_heads, hf.index_head_dim
        self.metadata_index = self.group_id = -1
        self.block_size = config.block_size
        self.kv_dtype = config.dtype_name if config.kv_dtype == "auto" else config.kv_dtype
        self.choice, self.weights, self.rope = choice, choice.weights, rope
        self.is_interleaved, self.turns_last = bool(hf.get("indexer_rope_interleave")), turns_last
        self.wq_b = ShardLinear(
            whole_shard(f"{prefix}.wq_b", self.num_heads * self.head_dim, query_size), config=config
        )
        self.wk = ShardLinear(whole_shard(f"{prefix}.wk", self.head_dim, hf.hidden_size), config=config)
        self.k_norm = LayerNorm(self.head_dim, config=config, prefix=f"{prefix}.k_norm", eps=key_eps)
        if config.adapters is not None:
            config.adapters.refuse(f"{prefix}.weights_proj", "it is kept in float32")
        self.weights_proj = nn.Parameter(
            config.empty(self.num_heads, hf.hidden_size, dtype=torch.float32), requires_grad=False
        )
        config.weights.expect(f"{prefix}.weights_proj.weight", tuple(self.weights_proj.shape), self.weights_proj)
        self._scale = (self.num_heads * self.head_dim) ** -0.5
        self.needs = AttentionNeeds(
            head_dim=self.head_dim, num_heads=self.num_heads, num_kv_heads=1, block_size=config.block_size,
            dtype=config.dtype_name, kv_dtype=config.kv_dtype, attention_type="indexer",
        )  # fmt: skip
        self.selection = config.attention.select(self.needs)
        register(self, config)

    def cache_spec(self) -> KVCacheSpec:
        """A key of every token: a row of numbers, as a latent is one."""
        return MLASpec(block_size=self.block_size, latent_dim=self.head_dim, dtype=self.kv_dtype)

    def bind_cache(self, views: tuple[Tensor, ...], metadata_index: int, backend: AttentionBackend) -> None:
        (self.cache,) = views
        self.metadata_index, self.group_id, self.backend = metadata_index, backend.group_id, backend
        self.attend = backend.bind(self)

    def queries(self, source: Tensor, positions: Tensor) -> Tensor:
        """source [T, rank of the query's latent] -> [T, J, D], before rope."""
        made: Tensor = self.wq_b(source)
        return made.view(-1, self.num_heads, self.head_dim)

    def forward(self, hidden: Tensor, source: Tensor, batch: ForwardBatch) -> None:
        """hidden [T, H], normed; source: what `queries` reads. Leaves the choice in `Choice.tokens`."""
        num_tokens = hidden.shape[0]
        query, key = self.queries(source, batch.positions), self.k_norm(self.wk(hidden))[:, None]
        if self.rope is not None:
            cos, sin = self.rope.cos_sin[batch.positions][:, None, :].chunk(2, dim=-1)
            query, key = (rotate(self._halves(x, self.rope.rotary_dim), cos, sin) for x in (query, key))
        torch.mul(F.linear(hidden.float(), self.weights_proj), self._scale, out=self.weights[:num_tokens])
        if not batch.attention:  # the pass that measures memory, before there is a cache
            return
        write_rows(key[:, 0], self.cache, batch.slot_mappings[self.group_id])
        chosen = self.choice.tokens[:num_tokens]
        if batch.cut is None:
            self.attend(query, batch.attention[self.metadata_index], chosen)
        else:
            batch.cut(self, query, chosen)

    def _halves(self, x: Tensor, turned: int) -> Tensor:
        """Numbers that turn brought to the front, and pairs (2i, 2i + 1) of them to (i, i + turned / 2), as in `MLALayer`."""
        if self.turns_last:
            x = x.roll(turned, dims=-1)
        return torch.cat([x[..., :turned:2], x[..., 1:turned:2], x[..., turned:]], dim=-1) if self.is_interleaved else x
