"""A layer with a cache, as the worker sees it: a need, a choice of backend, and views to keep.

Attention over keys and values is one such layer (`AttentionLayer`), attention over latents another (`MLALayer`); a state-space
layer or an indexer is one as well. The worker knows them by this alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pelton.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.interface import AttentionBackend, AttentionNeeds
    from pelton.attention.selector import Selection
    from pelton.kv_cache.spec import KVCacheSpec
    from pelton.model.build import BuildConfig


@runtime_checkable
class CacheLayer(Protocol):
    """Made with the model, it registers itself by `register`; bound once, when the pool has been allocated."""

    layer_name: str
    shares: str | None
    """The layer whose cache it reads: it has no spec of its own, is given that layer's views, and writes nothing."""
    needs: AttentionNeeds
    selection: Selection  # of the backend that describes steps to it

    def cache_spec(self) -> KVCacheSpec:
        """The layer's spec; not asked of a layer that shares another's."""
        ...

    def bind_cache(self, views: tuple[Tensor, ...], metadata_index: int, backend: AttentionBackend) -> None:
        """views: what its spec made of its memory. In a step, `ForwardBatch.attention[metadata_index]` is what `backend`
        built for it, and `ForwardBatch.slot_mappings[backend.group_id]` are the slots of the step's tokens."""
        ...


def register(layer: CacheLayer, config: BuildConfig) -> None:
    """Enter a layer in `config.cache_layers` under its name. Raises `ConfigError` where the name is taken, or where the layer
    whose cache it shares is not there, has no cache of its own or another shape."""
    if layer.layer_name in config.cache_layers:
        raise ConfigError(f"Two attention layers are named {layer.layer_name!r}; give each its own prefix.")
    if layer.shares is not None:
        _check_source(layer, config)
    config.cache_layers[layer.layer_name] = layer


def _check_source(layer: CacheLayer, config: BuildConfig) -> None:
    source = config.cache_layers.get(layer.shares or "")
    if source is None:
        raise ConfigError(
            f"Layer {layer.layer_name!r} shares the cache of {layer.shares!r}, and no layer made before it has that name. "
            "Name one that writes a cache of its own."
        )
    if source.shares is not None:
        raise ConfigError(
            f"Layer {layer.layer_name!r} shares the cache of {layer.shares!r}, which itself shares that of {source.shares!r}. "
            f"Name {source.shares!r}."
        )
    named = ("head_dim", "num_kv_heads", "kv_dtype", "is_mla", "latent_dim", "sliding_window", "attention_chunk_size")
    for name in named:
        own, theirs = getattr(layer.needs, name), getattr(source.needs, name)
        if own != theirs:
            raise ConfigError(
                f"Layer {layer.layer_name!r} shares the cache of {layer.shares!r}, but its {name} is {own} and that layer's "
                f"{theirs}. Layers that share a cache have the same."
            )
