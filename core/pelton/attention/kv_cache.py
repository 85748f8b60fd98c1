"""Allocate the KV pool's memory; hand each layer with a cache its views and the backend that describes steps to it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pelton.attention.interface import AttentionBackend, AttentionNeeds, KVLayout
from pelton.attention.metadata import NO_CACHE
from pelton.attention.phases import BackendChoice
from pelton.errors import ConfigError
from pelton.kv_cache.spec import KVCachePlan, KVCacheSpec

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.cache_layer import CacheLayer
    from pelton.attention.encoder import CachelessLayer
    from pelton.model.build import BuildConfig


def cache_specs(build: BuildConfig) -> dict[str, KVCacheSpec]:
    """The need of every layer with a cache of its own, by name. Raises `ConfigError` where a layer gives something else."""
    specs = {}
    for name, layer in build.cache_layers.items():
        if layer.shares is not None:
            continue
        spec = layer.cache_spec()
        if not isinstance(spec, KVCacheSpec):
            raise ConfigError(
                f"Layer {name!r} ({type(layer).__name__}) gives {spec!r} as its cache_spec(); expected a KVCacheSpec."
            )
        specs[name] = spec
    return specs


@dataclass(slots=True)
class BoundCaches:
    """The backends that a plan led to, and what each layer with a cache of its own was given."""

    backends: list[AttentionBackend]
    """One for each set of metadata: a KV group, a class of backends, and what its builder reads of the layers' needs. Groups
    come in their order; `group_id` names each one's."""
    layers: list[BoundLayer]
    kernel_block_sizes: list[int]  # tokens of a block as the backends of each group count


@dataclass(frozen=True, slots=True)
class BoundLayer:
    name: str
    group_id: int
    spec: KVCacheSpec
    views: tuple[Tensor, ...]


def bind_kv_cache(plan: KVCachePlan, build: BuildConfig) -> list[AttentionBackend]:
    """`bind_caches`, for callers that need its backends alone."""
    return bind_caches(plan, build).backends


def bind_caches(plan: KVCachePlan, build: BuildConfig) -> BoundCaches:
    """Allocate `plan`'s buffers, zeroed, and bind every layer with a cache.

    Raises `MemoryError` when there is no room for them, `ConfigError` where a layer's kind or backend does not fit.
    """
    return _Binder(plan, build).bind()


class _Binder:
    def __init__(self, plan: KVCachePlan, build: BuildConfig) -> None:
        self._plan, self._build = plan, build
        self._backends: list[AttentionBackend] = []
        self._indices: dict[Hashable, int] = {}  # of a set of metadata, in `_backends`

    def bind(self) -> BoundCaches:
        plan, layers = self._plan, self._build.cache_layers
        memory = {}
        for tensor in plan.tensors:
            buffer = _zeros(tensor.size_bytes, self._build)
            memory.update(dict.fromkeys(tensor.shared_by, buffer))
        kernel_sizes = [self._kernel_size(group_id) for group_id in range(len(plan.groups))]
        bound = {}
        for group_id, group in enumerate(plan.groups):
            for name in group.layer_names:
                spec = group.spec_of(name)
                views = _views(name, spec, memory[name], plan.num_blocks, _layout(layers[name], spec.page_tokens))
                bound[name] = BoundLayer(name, group_id, spec, views)
                self._bind_layer(layers[name], bound[name])
        for layer in layers.values():
            if layer.shares is not None:
                self._bind_layer(layer, bound[layer.shares])
        for cacheless in self._build.cacheless_layers.values():
            self._bind_cacheless(cacheless)
        return BoundCaches(self._backends, list(bound.values()), kernel_sizes)

    def _bind_cacheless(self, layer: CachelessLayer) -> None:
        backend_class = layer.selection.backend
        index = self._backend(NO_CACHE, backend_class, layer.needs)
        layer.bind_backend(index, self._backends[index])

    def _bind_layer(self, layer: CacheLayer, bound: BoundLayer) -> None:
        needs = replace(layer.needs, block_size=self._plan.groups[bound.group_id].spec.page_tokens)
        index = self._backend(bound.group_id, layer.selection.backend, needs)
        layer.bind_cache(bound.views, index, self._backends[index])

    def _backend(self, group_id: int, backend_class: BackendChoice, needs: AttentionNeeds) -> int:
        """The index of the backend that describes a group's steps to layers of such needs."""
        key = (group_id, backend_class, backend_class.builder_needs(needs))
        index = self._indices.setdefault(key, len(self._backends))
        if index == len(self._backends):
            build = self._build
            backend = backend_class(
                needs, build.device, max_num_seqs=build.max_num_seqs, max_num_tokens=build.max_num_batched_tokens,
                max_model_len=build.max_model_len,
            )  # fmt: skip
            backend.group_id = group_id
            self._backends.append(backend)
        return index

    def _kernel_size(self, group_id: int) -> int:
        """A step's block table counts in kernel blocks of one size, for the whole group."""
        group, layers = self._plan.groups[group_id], self._build.cache_layers
        sizes: dict[int, str] = {}
        page_tokens, num_ranks = group.spec.page_tokens, group.spec.num_ranks
        for name in group.layer_names:
            layout = _layout(layers[name], page_tokens)
            sizes.setdefault(layout.kernel_block_size or page_tokens, name)
        if len(sizes) > 1:
            (one, first), (other, second), *_ = sizes.items()
            raise ConfigError(
                f"Layers {first} and {second} share a KV group, and their backends ({layers[first].selection.name}, "
                f"{layers[second].selection.name}) want kernel blocks of {one} and of {other} tokens. Name one backend for "
                "both with --attention-backend, or set block_size to the smaller number."
            )
        return next(iter(sizes), page_tokens) * num_ranks  # none of its layers may be in this stage


def _layout(layer: CacheLayer, block_size: int) -> KVLayout:
    return layer.selection.backend.kv_layout(replace(layer.needs, block_size=block_size))


def _views(name: str, spec: KVCacheSpec, memory: Tensor, num_blocks: int, layout: KVLayout) -> tuple[Tensor, ...]:
    views = spec.views(memory, num_blocks, layout)
    if not isinstance(views, tuple) or not all(isinstance(view, torch.Tensor) for view in views):
        raise ConfigError(
            f"{type(spec).__name__}.views of layer {name!r} gives {type(views).__name__}; expected tensors."
        )
    for view in views:
        if view.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr():
            raise ConfigError(
                f"{type(spec).__name__}.views of layer {name!r} gives a tensor with memory of its own; expected views of the "
                "memory that it is given."
            )
    return views


def _zeros(num_bytes: int, build: BuildConfig) -> Tensor:
    try:
        if build.allocate is not None:
            return build.allocate((num_bytes,), torch.uint8)
        return torch.zeros(num_bytes, dtype=torch.uint8, device=build.device)
    except (OSError, OverflowError, torch.OutOfMemoryError) as error:  # OverflowError: more than can be addressed
        raise MemoryError(str(error)) from error
