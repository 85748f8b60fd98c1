"""Allocate the KV pool's memory and hand each attention layer its views and its group's backend."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pelton.attention.interface import AttentionBackend, KVLayout
from pelton.errors import ConfigError
from pelton.kv_cache.spec import FullAttentionSpec, KVCachePlan

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.layer import AttentionLayer
    from pelton.model.build import BuildConfig

_TORCH_NAMES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def bind_kv_cache(plan: KVCachePlan, build: BuildConfig) -> list[AttentionBackend]:
    """Allocate `plan`'s buffers (zeroed: the null block must be finite), bind every layer; one backend per group.

    Raises `MemoryError` when there is no room for them.
    """
    backends = [
        _group_backend([build.attention_layers[name] for name in group.layer_names], group.spec.block_size, build)
        for group in plan.groups
    ]
    place = {name: index for index, group in enumerate(plan.groups) for name in group.layer_names}
    for tensor in plan.tensors:
        memory = _zeros(tensor.size_bytes, build)
        for name in tensor.shared_by:
            layer, spec = build.attention_layers[name], plan.groups[place[name]].spec
            assert isinstance(spec, FullAttentionSpec), f"{name} has no attention spec"
            k_cache, v_cache = page_views(memory, plan.num_blocks, spec, layer.selection.backend.kv_layout(layer.needs))
            layer.bind_cache(backends[place[name]], place[name], k_cache, v_cache)
    return backends


def _zeros(num_bytes: int, build: BuildConfig) -> Tensor:
    try:
        if build.device.type == "cpu":
            return build.large_pages.zeros((num_bytes,), torch.uint8)
        return torch.zeros(num_bytes, dtype=torch.uint8, device=build.device)
    except (OSError, OverflowError, torch.OutOfMemoryError) as error:  # OverflowError: more than can be addressed
        raise MemoryError(str(error)) from error


def page_views(memory: Tensor, num_blocks: int, spec: FullAttentionSpec, layout: KVLayout) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim], as `layout` lays them.

    With kernel blocks, a manager block is `ratio` of them one after the other, each with its keys and values: the views have
    num_blocks * ratio blocks, block `b` of the manager is `b * ratio` and on, and a slot keeps its number.
    """
    dtype = getattr(torch, _TORCH_NAMES.get(spec.dtype, spec.dtype))
    block_size = layout.kernel_block_size or spec.block_size
    if spec.block_size % block_size:
        raise ConfigError(
            f"The backend wants kernel blocks of {block_size} tokens, and blocks have {spec.block_size}; "
            f"set block_size to a multiple of {block_size}."
        )
    num_blocks *= spec.block_size // block_size
    axes = (spec.num_kv_heads, block_size) if layout.heads_first else (block_size, spec.num_kv_heads)
    pages = memory.view(dtype).view(num_blocks, 2, *axes, spec.head_dim)
    if layout.heads_first:
        pages = pages.transpose(2, 3)
    keys, values = pages.unbind(1)
    return keys, values


def _group_backend(layers: list[AttentionLayer], block_size: int, build: BuildConfig) -> AttentionBackend:
    first = layers[0]
    for layer in layers[1:]:
        if layer.selection.backend is not first.selection.backend:
            raise ConfigError(
                f"Layers {first.layer_name} and {layer.layer_name} share a KV group, and their backends are "
                f"{first.selection.name} and {layer.selection.name}. Name one with --attention-backend."
            )
    windows = [layer.needs.sliding_window for layer in layers if layer.needs.sliding_window is not None]
    return first.selection.backend(
        replace(first.needs, block_size=block_size, sliding_window=windows[0] if windows else None),
        build.device,
        max_num_seqs=build.max_num_seqs,
        max_num_tokens=build.max_num_batched_tokens,
        max_model_len=build.max_model_len,
    )
