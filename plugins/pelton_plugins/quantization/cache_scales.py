"""Scales that checkpoints have for a key-value cache in 8 bits (`k_scale`, `v_scale`).

The cache holds key / k_scale and value / v_scale, rounded. Rotation and products are linear, so no kernel knows: before attention
QKV's rows are multiplied in float32, the queries by k_scale, the others by 1 / k_scale and 1 / v_scale; after it the output is, by
v_scale. Queries and keys that a norm makes have theirs in the norm's weights. Layers without scales take no part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from pelton.errors import ConfigError
from pelton.layers.attention import AttentionLayer

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.model.build import BuildConfig
    from pelton.model.loading import LazyWeight
    from pelton.model.weights import WeightMap

PATTERN = r".*\.((q|k|v|kv|prob)_scale|[kv]_proj\.output_scale)"
_NAME = re.compile(r"(?P<layer>.*?)(\.attn)?(\.[kv]_proj)?\.((?P<what>k|v|kv)_scale|output_scale)")
_OF_PRODUCT = re.compile(r".*\.([kv])_proj\.output_scale")
_taken: WeakKeyDictionary[WeightMap, CacheScales]


def take_cache_scales(config: BuildConfig) -> None:
    """Skip these tensors where the cache is not in fp8, which needs none; else have them heeded."""
    if config.weights in _taken:
        return
    scales = _taken[config.weights] = CacheScales(config.cache_layers, config.device)
    is_fp8 = config.kv_dtype.startswith("fp8")
    config.weights.ignore(PATTERN, scales.take if is_fp8 else None)
    config.weights.finishers.append(scales.apply)


def check_scheme(kv_dtype: str, scheme: Mapping[str, Any]) -> None:
    """Refuse a compressed-tensors checkpoint's `kv_cache_scheme`, where the cache is in 8 bits, that is another than this file's."""
    known = {"type": "float", "num_bits": 8, "symmetric": True, "strategy": "tensor", "dynamic": False}
    for field, right in known.items():
        found = scheme.get(field, right)
        if kv_dtype.startswith("fp8") and found != right:
            raise ConfigError(
                f"config.json's quantization_config.kv_cache_scheme has {field} {found!r}, and kv_cache_dtype is {kv_dtype!r}; served is "
                f"{right!r}. Leave kv_cache_dtype unset, which needs no scheme."
            )


class CacheScales:
    """The scales of one checkpoint, by the layers' names in it."""

    def __init__(self, layers: dict[str, Any], device: torch.device) -> None:
        self._layers, self._device = layers, device
        self._found: dict[str, dict[str, float]] = {}

    def take(self, name: str, weight: LazyWeight) -> None:
        found = _NAME.fullmatch(name)
        if found is None:  # of queries and of softmax's weights, which are not rounded here
            return
        numbers = weight.read().float().flatten()
        scale = numbers[0].item() if len(numbers) else math.nan
        if not (math.isfinite(scale) and scale > 0 and (numbers == scale).all()):
            shown = f"{scale:.4g}" if len(numbers) == 1 else f"{len(numbers)} numbers"
            raise ConfigError(
                f"The checkpoint has {name} {shown}; a cache in fp8 takes one number above 0 for a layer. "
                "Leave kv_cache_dtype unset, which needs none."
            )
        product = _OF_PRODUCT.fullmatch(name)
        for what in product[1] if product else found["what"]:
            self._found.setdefault(found["layer"], {})[what] = scale

    def apply(self) -> None:
        """Called when all weights are in place."""
        for name, scales in self._found.items():
            key, value = scales.get("k", 1.0), scales.get("v", 1.0)
            if (key, value) == (1.0, 1.0):
                continue
            owners = [layer for own, layer in self._layers.items() if own == name or own.startswith(f"{name}.")]
            for owner in owners:  # none where another stage has the layer
                readers = [layer for layer in self._layers.values() if layer.shares == owner.layer_name]
                for layer in (owner, *readers):
                    if not isinstance(layer, AttentionLayer):
                        raise ConfigError(
                            f"The checkpoint has scales for the cache of {name}, whose latents are kept without. "
                            "Leave kv_cache_dtype unset, which needs none."
                        )
                    scale_layer(layer, key, value, self._device)


def scale_layer(layer: AttentionLayer, key: float, value: float, device: torch.device) -> None:
    """Have a layer keep key / `key` and value / `value`."""
    needs, tensors = layer.write_needs, layer.write_tensors
    is_key_normed = needs.k_norm is not None and needs.writes_kv
    for spec, weight, factor in ((needs.q_norm, tensors.q_norm, key), (needs.k_norm, tensors.k_norm, 1 / key)):
        if spec is not None and weight is not None:
            offset = float(spec.unit_offset)
            weight.data.copy_((weight.float() + offset) * factor - offset)
    parts = [(layer.num_heads, 1.0 if needs.q_norm is not None else key)]
    if needs.writes_kv:
        parts += [(layer.num_kv_heads, 1.0 if is_key_normed else 1 / key), (layer.num_kv_heads, 1 / value)]
    factors = torch.cat([torch.full((heads * layer.head_dim,), factor) for heads, factor in parts])
    Scaling(layer, factors.to(device), value)


class Scaling:
    """The two products around a layer's call."""

    def __init__(self, layer: AttentionLayer, factors: Tensor, value: float) -> None:
        self._factors, self._value = factors, value
        layer.register_forward_pre_hook(self._before)
        layer.register_forward_hook(self._after)

    def _before(self, layer: AttentionLayer, arguments: tuple[Any, ...]) -> None:
        qkv: Tensor = arguments[0]
        qkv.mul_(self._factors)

    def _after(self, layer: AttentionLayer, arguments: tuple[Any, ...], output: Tensor) -> None:
        output.mul_(self._value)


_taken = WeakKeyDictionary()
