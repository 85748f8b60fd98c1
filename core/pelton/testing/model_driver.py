"""Run a model through the paged path by hand: no scheduler, no worker, one step at a time.

For tests of models and layers. `ModelDriver` builds the model from a checkpoint folder, gives every request its own
blocks in every KV group and runs the steps it is told to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pelton.attention.kv_cache import bind_caches, cache_specs
from pelton.attention.metadata import ForwardBatch
from pelton.attention.selector import AttentionSelector
from pelton.kv_cache.spec import KVCacheGroup, KVCachePlan, KVCacheTensor
from pelton.model.build import BuildConfig, HFConfig
from pelton.model.loading import LazyWeight
from pelton.model.registry import build_model, find_named
from pelton.model.resolve import text_config
from pelton.ops.selector import OpSelector
from pelton.parallel.context import ParallelContext
from pelton.plugins import Plugins, load_plugins
from pelton.testing.paged_rows import step_metadata

if TYPE_CHECKING:
    from torch import Tensor


class TensorWeight(LazyWeight):
    """A tensor that is in memory already."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.shape = tuple(tensor.shape)

    def read(self, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        if dim is None:
            return self.tensor
        return self.tensor.narrow(dim, start, (self.shape[dim] if stop is None else stop) - start)


def checkpoint_weights(path: str | Path) -> Iterator[tuple[str, LazyWeight]]:
    """Every tensor of a safetensors folder, file after file."""
    from safetensors.torch import load_file

    for file in sorted(Path(path).glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            yield name, TensorWeight(tensor)


def make_test_build(
    hf_config: dict[str, Any], plugins: Plugins | None = None, *, dtype: torch.dtype = torch.float32, **fields: Any
) -> BuildConfig:
    """A `BuildConfig` on the CPU, without engine settings; `fields` replace its own."""
    plugins = plugins or load_plugins(only=[])
    fields.setdefault("max_model_len", hf_config.get("max_position_embeddings", 512))
    ops = plugins.entries("pelton_ops", device_type="cpu")
    fields.setdefault("ops", OpSelector(ops, plugins.entries("pelton_fused_ops")))
    fields.setdefault("attention", AttentionSelector(plugins.entries("pelton_attention_backends", device_type="cpu")))
    return BuildConfig(hf=HFConfig(hf_config), dtype=dtype, device=torch.device("cpu"), **fields)


class ModelDriver:
    """One model, a pool of `num_blocks`, requests by name."""

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        num_blocks: int = 128,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        parallel: ParallelContext | None = None,
        plugins: Plugins | None = None,
        hf_config: dict[str, Any] | None = None,
        hf_overrides: dict[str, Any] | None = None,
        weights: Iterable[tuple[str, LazyWeight]] | Callable[[dict[str, tuple[int, ...]]], Any] | None = None,
        model_class: Any = None,
        **fields: Any,
    ) -> None:
        """path: a checkpoint folder, from which config and weights come where they are not given. weights: may be made from the
        shapes that the model expects, by name. model_class: in place of the one that plugins offer for the architecture."""
        plugins = plugins or load_plugins(only=[])
        if path is not None:
            hf_config = hf_config or json.loads((Path(path) / "config.json").read_text())
            weights = weights or checkpoint_weights(path)
        assert hf_config is not None and weights is not None, "without a path, give hf_config and weights"
        named = find_named(plugins.entries("pelton_models"), *(hf_config.get("architectures") or ()))
        if named is None:  # a model on others' modules reads all of config.json
            hf_config = {**hf_config, **(hf_overrides or {})}
        else:
            hf_config = {**dict(named.config_defaults), **text_config(hf_config, hf_overrides or {})}
        self.build = make_test_build(
            hf_config, plugins, dtype=dtype, block_size=block_size, parallel=parallel or ParallelContext(), **fields
        )
        if model_class is None:
            self.model = build_model(self.build, hf_config["architectures"][0], plugins)
        else:
            self.model = model_class(config=self.build).eval()
        self.used_weights = self.model.load_weights(
            weights(self.build.weights.expected()) if callable(weights) else weights
        )
        self.build.ops.weights_loaded()
        if hasattr(self.model, "weights_loaded"):
            self.model.weights_loaded()
        self.block_size = block_size
        self.plan = plan_one_group_per_spec(self.build, num_blocks)
        bound = bind_caches(self.plan, self.build)
        self.backends, self.caches = bound.backends, bound.layers
        self._free = list(range(num_blocks - 1, 0, -1))
        self._tables: dict[str, list[list[int]]] = {}
        self._computed: dict[str, int] = {}

    def step(self, work: Mapping[str, Sequence[int]], *, num_padding: int = 0) -> dict[str, Tensor]:
        """Run each request's next tokens in one batch; the result is their logits, [len(tokens), vocab] each.

        num_padding: rows of padding (no query, no context, block 0) and tokens (slot -1) after the real ones.
        """
        rows = sorted(work, key=lambda name: len(work[name]) > 1)  # rows with one token first
        token_ids = [token for name in rows for token in work[name]] + [0] * num_padding
        positions: list[int] = []
        for name in rows:
            start = self._computed.get(name, 0)
            positions += range(start, start + len(work[name]))
            self._computed[name] = start + len(work[name])
            self._grow(name)
        counts = [(len(work[name]), self._computed[name] - len(work[name])) for name in rows]  # new, before
        tables = [[self._tables[name][group] for name in rows] for group in range(len(self.plan.groups))]
        groups = [step_metadata(counts, table, self.block_size, num_padding=num_padding) for table in tables]
        batch = ForwardBatch(
            input_ids=torch.tensor(token_ids),
            positions=torch.tensor(positions + [0] * num_padding),
            attention=tuple(backend.build(groups[backend.group_id]) for backend in self.backends),
            num_tokens=len(token_ids),
            slot_mappings=tuple(common.slot_mapping for common in groups),
            groups=tuple(groups),
        )
        with torch.inference_mode():
            hidden = self.model.forward(batch)
            logits = self.model.compute_logits(hidden, torch.arange(len(positions)))
        return dict(zip(rows, logits.split([len(work[name]) for name in rows]), strict=True))

    def finish(self, name: str) -> None:
        """Forget a request; its blocks may be handed out again."""
        for table in self._tables.pop(name):
            self._free += table
        del self._computed[name]

    def _grow(self, name: str) -> None:
        tables = self._tables.setdefault(name, [[] for _ in self.plan.groups])
        for table in tables:
            while len(table) * self.block_size < self._computed[name]:
                table.append(self._free.pop())


def plan_one_group_per_spec(build: BuildConfig, num_blocks: int) -> KVCachePlan:
    """A plan for tests: layers of equal spec form a group, every layer has memory of its own."""
    groups: dict[Any, list[str]] = {}
    for name, spec in cache_specs(build).items():
        groups.setdefault(spec, []).append(name)
    tensors = [
        KVCacheTensor(num_blocks * spec.page_size_bytes, (name,)) for spec, names in groups.items() for name in names
    ]
    return KVCachePlan(
        num_blocks, tuple(tensors), tuple(KVCacheGroup(tuple(names), spec) for spec, names in groups.items())
    )
