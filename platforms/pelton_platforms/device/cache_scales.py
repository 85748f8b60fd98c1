"""Scales of a key-value cache in 8 bits that are found from the first step's keys and values (`calculate_kv_scales`).

The cache holds key / key scale and value / value scale, rounded; products around a layer's attention apply both. They are in
device memory, 1 until then, so that graphs captured before read what the first step finds. That step runs without a graph, each
layer before it writes. Scales are powers of two: the products round nothing. Keys that a norm makes are kept as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from pelton.errors import ConfigError
from pelton.layers.attention import AttentionLayer
from pelton.logging import get_logger

if TYPE_CHECKING:
    from torch import Tensor

    from pelton_platforms.device.loaded import LoadedModel

logger = get_logger(__name__)
LARGEST = 448.0
"""Of e4m3; e5m2 has room for more."""
HEADROOM = 2.0
"""How many times larger than the first step's any later number may be, at least."""
LEAST = 2.0**-6
"""Of scales: a first prompt of one token may have values that are next to nothing. Numbers of e4m3 reach down to 2^-9 of it."""


class CalculatedScales:
    """The scales of all layers."""

    def __init__(self, layers: Iterable[AttentionLayer], device: torch.device) -> None:
        self.is_due = True
        self.is_measuring = False
        found = list(layers)
        self.layers = {layer.layer_name: LayerScales(layer, self, device) for layer in found if layer.shares is None}
        for layer in found:
            if layer.shares in self.layers:
                self.layers[layer.shares].share(layer)

    def remove(self) -> None:
        """Leave the layers as they were: of a runner that only listed kernels."""
        for layer in self.layers.values():
            for handle in layer.handles:
                handle.remove()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Find them in the forward pass of this context, which is no graph's."""
        self.is_measuring = True
        try:
            yield
            self.is_due = False
        finally:
            self.is_measuring = False


class LayerScales:
    """One layer's, [1] float32 on the device, and the products around it and around those that read its cache."""

    def __init__(self, layer: AttentionLayer, owner: CalculatedScales, device: torch.device) -> None:
        self._owner = owner
        self.key, self.value = (torch.ones(1, dtype=torch.float32, device=device) for _ in range(2))
        needs = layer.write_needs
        self._scales_keys = needs.q_norm is None and needs.k_norm is None
        self._heads, self._kv_heads, self._head_dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        self._rotary_dim = needs.rotary_dim
        self.handles = [layer.register_forward_pre_hook(self._before), layer.register_forward_hook(self._after)]

    def share(self, layer: AttentionLayer) -> None:
        self.handles.append(layer.register_forward_pre_hook(self._before_reader))
        self.handles.append(layer.register_forward_hook(self._after))

    def _before(self, layer: AttentionLayer, arguments: tuple[Any, ...]) -> None:
        qkv: Tensor = arguments[0]
        sizes = [count * self._head_dim for count in (self._heads, self._kv_heads, self._kv_heads)]
        query, key, value = qkv.split(sizes, dim=1)
        if self._owner.is_measuring:
            if self._scales_keys:
                self.key.copy_(scale_of(self._turned(key)))
            self.value.copy_(scale_of(value))
        if self._scales_keys:
            query.mul_(self.key)
            key.div_(self.key)
        value.div_(self.value)

    def _before_reader(self, layer: AttentionLayer, arguments: tuple[Any, ...]) -> None:
        if self._scales_keys:
            arguments[0].mul_(self.key)

    def _after(self, layer: AttentionLayer, arguments: tuple[Any, ...], output: Tensor) -> None:
        output.mul_(self.value)

    def _turned(self, key: Tensor) -> Tensor:
        """Return the largest that a rope can make of each number: of two that turn together, their length."""
        heads, half = key.float().unflatten(1, (self._kv_heads, self._head_dim)), self._rotary_dim // 2
        first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return torch.cat([torch.hypot(first, second), rest], dim=-1)


def scale_of(numbers: Tensor) -> Tensor:
    """Return the smallest power of two, from `LEAST` on, by which they are at most LARGEST / HEADROOM: [] float32."""
    wanted = (numbers.abs().amax().float() * (HEADROOM / LARGEST)).clamp(min=LEAST)
    mantissa, exponent = torch.frexp(wanted)  # in [0.5, 1)
    return torch.ldexp(torch.ones_like(wanted), exponent - (mantissa == 0.5).int())


def make_calculated_scales(loaded: LoadedModel) -> CalculatedScales | None:
    """Return them where the settings ask for them. Layers whose scales the checkpoint has keep those."""
    settings, layers = loaded.config.kv_cache, loaded.build.cache_layers
    if not settings.calculate_kv_scales:
        return None
    if not settings.kv_cache_dtype.startswith("fp8"):
        raise ConfigError(
            f"calculate_kv_scales is set, and kv_cache_dtype is {settings.kv_cache_dtype!r}, whose numbers have no scales. Set "
            "kv_cache_dtype to fp8, or leave calculate_kv_scales unset."
        )
    if loaded.config.kv_transfer.kv_connector is not None:
        raise ConfigError(
            "calculate_kv_scales is set beside kv_connector: another engine's blocks have scales of their own. Leave one of them unset."
        )
    if loaded.config.parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"calculate_kv_scales is set, and pipeline_parallel_size is {loaded.config.parallel.pipeline_parallel_size}; served is 1. "
            "Leave one of them unset."
        )
    others = [name for name, layer in layers.items() if not isinstance(layer, AttentionLayer)]
    if others:
        raise ConfigError(
            f"calculate_kv_scales is set, and {others[0]} keeps latents or states, which have no scales here. Leave it unset."
        )
    wanted = [layer for layer in layers.values() if isinstance(layer, AttentionLayer) and not layer._forward_pre_hooks]
    logger.info("scales of the KV cache of %d layers follow from the first step's keys and values", len(wanted))
    return CalculatedScales(wanted, loaded.device)
