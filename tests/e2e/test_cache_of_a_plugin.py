"""A kind of cache of a plugin's own: its spec with views, its manager, its layer and its backend, through the whole engine."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from pelton_e2e import generate, greedy, make_llm, make_prompts
from torch import Tensor, nn

from pelton.attention.cache_layer import register as register_layer
from pelton.attention.interface import AttentionBackend, AttentionNeeds, BoundAttention
from pelton.entries import BackendEntry, Entry, ModelEntry
from pelton.hookspecs import hookimpl
from pelton.kv_cache.spec import KVCacheSpec
from pelton.kv_cache.views import KVLayout, token_rows
from pelton.layers.decoder import Decoder
from pelton.layers.embedding import LMHead, VocabEmbedding
from pelton.layers.norm import RMSNorm
from pelton.ops.reference import write_rows
from pelton.plugins import load_plugins, register
from pelton.testing.cache_specs import CacheSpecConformance
from pelton.testing.models import VOCAB_SIZE
from pelton_plugins.kv_cache.single_type import FullAttentionManager

SIZE, NUM_TOKENS, LENGTHS = 32, 40, (1, 5, 16, 17, 48, 129, 200)
MODULE = "running_mean_plugin"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpec(KVCacheSpec):
    """One row of numbers a token."""

    size: int

    @property
    def page_size_bytes(self) -> int:
        return self.block_size * self.size * 4

    def views(self, memory: Tensor, num_blocks: int, layout: KVLayout) -> tuple[Tensor, ...]:
        return (token_rows(memory, num_blocks, self.block_size, [self.size], "float32", layout),)


class RowManager(FullAttentionManager):
    """Rows are held and found again as keys and values are."""


class TestRowSpec(CacheSpecConformance):
    specs = (RowSpec(block_size=4, size=3),)
    managers = ((RowSpec, RowManager),)


class MeanBackend(AttentionBackend):
    name: ClassVar[str] = "running_mean"
    handles: ClassVar[frozenset[str]] = frozenset({"is_sparse"})

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        return [] if needs.is_sparse else ["only running means"]

    def build(self, common: Any, key: Any = None) -> Any:
        return common

    def bind(self, layer: Any) -> BoundAttention:
        return Means(layer)


class Means(BoundAttention):
    def __call__(self, query: Tensor, metadata: Any, output: Tensor) -> None:
        layer, starts, size = self.layer, metadata.query_start_loc.tolist(), self.layer.rows.shape[1]
        for row, length in enumerate(metadata.seq_lens.tolist()):
            first, last = starts[row], starts[row + 1]
            place = torch.arange(length)
            context = layer.rows[metadata.block_table[row][place // size].long(), place % size]
            means = context.cumsum(0) / (place + 1)[:, None]
            output[first:last] = means[length - (last - first) :]


class RunningMean(nn.Module):
    """The mean of all rows of the request so far."""

    def __init__(self, *, config: Any, prefix: str) -> None:
        super().__init__()
        self.layer_name, self.shares, self.block_size = prefix, None, config.block_size
        self.needs = AttentionNeeds(
            head_dim=SIZE, num_heads=1, num_kv_heads=1, block_size=config.block_size, dtype=config.dtype_name,
            is_sparse=True,
        )  # fmt: skip
        self.selection = config.attention.select(self.needs)
        register_layer(self, config)

    def cache_spec(self) -> KVCacheSpec:
        return RowSpec(block_size=self.block_size, size=SIZE)

    def bind_cache(self, views: tuple[Tensor, ...], metadata_index: int, backend: AttentionBackend) -> None:
        (self.rows,), self.metadata_index, self.group_id = views, metadata_index, backend.group_id
        self.attend = backend.bind(self)

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: Any) -> tuple[Tensor, Tensor]:
        output = torch.zeros_like(hidden)
        if batch.attention:
            write_rows(hidden, self.rows, batch.slot_mappings[self.group_id])
            self.attend(hidden, batch.attention[self.metadata_index], output)
        return output, hidden


class MeanForCausalLM(Decoder):
    def __init__(self, *, config: Any, prefix: str = "") -> None:
        super().__init__(config=config)
        self.embed_tokens = VocabEmbedding(VOCAB_SIZE, SIZE, config=config, prefix="embed_tokens")
        self.layers = nn.ModuleList([RunningMean(config=config, prefix="mean")])
        self.norm = RMSNorm(SIZE, config=config, prefix="norm")
        self.lm_head = LMHead(norm=self.norm, embedding=self.embed_tokens, config=config)


@pytest.fixture
def mean_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any, dict[str, Tensor]]:
    """Checkpoint, plugins with all of the above, weights."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    weights = {
        "embed_tokens.weight": torch.randn(VOCAB_SIZE, SIZE, generator=generator),
        "lm_head.weight": torch.randn(VOCAB_SIZE, SIZE, generator=generator),
        "norm.weight": torch.ones(SIZE),
    }
    save_file(weights, tmp_path / "model.safetensors")
    fields = {
        "architectures": ["MeanForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": SIZE,
        "max_position_embeddings": 512, "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    module = ModuleType(MODULE)
    vars(module).update(MeanForCausalLM=MeanForCausalLM, MeanBackend=MeanBackend, PAIR=(RowSpec, RowManager))
    monkeypatch.setitem(sys.modules, MODULE, module)
    model = ModelEntry(name="mean", load=f"{MODULE}:MeanForCausalLM", architectures=("MeanForCausalLM",))
    backend = BackendEntry(name="running_mean", load=f"{MODULE}:MeanBackend", priority=1, device_types=("cpu",))
    plugins = load_plugins()
    plugin = SimpleNamespace(
        PELTON_API=">=1,<2",
        pelton_models=hookimpl(lambda: [model]),
        pelton_attention_backends=hookimpl(lambda: [backend]),
        pelton_kv_cache_specs=hookimpl(lambda: [Entry(name="rows", load=f"{MODULE}:PAIR")]),
    )
    register(plugins.manager, plugin, "running_mean", "test")
    return str(tmp_path), plugins, weights


def continued(weights: dict[str, Tensor], prompt: list[int]) -> list[int]:
    embed, head = weights["embed_tokens.weight"].double(), weights["lm_head.weight"].double()
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        rows = embed[tokens]
        hidden = rows[-1] + rows.mean(0)
        tokens.append(int((hidden / (hidden.square().mean() + 1e-6).sqrt() @ head.T).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 16}, {"block_size": 8}], ids=str)
def test_a_plugins_own_cache_serves_the_engine(
    mean_model: tuple[str, Any, dict[str, Tensor]], settings: dict[str, Any]
) -> None:
    path, plugins, weights = mean_model
    prompts = make_prompts(VOCAB_SIZE, LENGTHS)
    expected = [continued(weights, prompt) for prompt in prompts]
    with make_llm(path, plugins=plugins, **settings) as llm:
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == expected
        again = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy(NUM_TOKENS), use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in again] == expected
        assert sum(output.num_cached_tokens or 0 for output in again) >= 256
