"""From the needs of layers to groups, buffers and a number of blocks.

All groups share one pool, so all have one page size: bytes of a block of one layer, times layers of a group. Layers of equal
need are cut into groups of m layers; m buffers result, each shared by one layer of every group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from pelton.errors import ConfigError
from pelton.kv_cache.spec import KVCacheGroup, KVCachePlan, KVCacheSpec, KVCacheTensor

MAX_REGULAR_GROUPS = 8
"""Host work a step grows with the number of groups: an unpadded division may cost so many, more only if padding has more."""
MAX_BLOCK_SIZE = 65_536
"""Tokens; a block size raised above this wastes most of it."""


def plan_kv_cache(
    specs: Mapping[str, KVCacheSpec],
    available_bytes: int,
    *,
    num_blocks_override: int | None = None,
    max_model_len: int,
    disable_hybrid: bool = False,
    max_num_batched_tokens: int | None = None,
) -> KVCachePlan:
    """Group the layers (name to need; layers that share another layer's cache are left out) and size the pool.

    num_blocks_override: this many blocks, whatever `available_bytes`. disable_hybrid: windows keep every token.
    max_num_batched_tokens: most tokens of one step, which bounds what a window holds. Raises `ConfigError` when a
    request of `max_model_len` does not fit.
    """
    if not specs:
        return KVCachePlan(num_blocks=1, tensors=(), groups=())
    if disable_hybrid:
        specs = {name: spec.without_window() for name, spec in specs.items()}
    specs = unify_page_sizes(specs)
    groups = group_layers(specs)
    page_size = next(iter(specs.values())).page_size_bytes
    group_size = max(len(group.layer_names) for group in groups)
    bytes_per_block = page_size * group_size
    num_blocks = num_blocks_override if num_blocks_override is not None else available_bytes // bytes_per_block
    tensors = tuple(
        KVCacheTensor(
            size_bytes=page_size * num_blocks,
            shared_by=tuple(group.layer_names[i] for group in groups if i < len(group.layer_names)),
        )
        for i in range(group_size)
    )
    plan = KVCachePlan(num_blocks=num_blocks, tensors=tensors, groups=groups)
    _check_fit(plan, bytes_per_block, max_model_len, max_num_batched_tokens)
    return plan


def with_num_blocks(plan: KVCachePlan, num_blocks: int) -> KVCachePlan:
    """The same groups over a pool of another size, whether a request fits in it or not."""
    tensors = tuple(
        replace(tensor, size_bytes=tensor.size_bytes // plan.num_blocks * num_blocks) for tensor in plan.tensors
    )
    return replace(plan, num_blocks=num_blocks, tensors=tensors)


def unify_page_sizes(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Raise block sizes until every layer's block has the same bytes; pad states of fixed size to that.

    Raised sizes are multiples of the given ones, which backends take, and need not be powers of two. Raises `ConfigError`.
    """
    pages = {spec.page_size_bytes for spec in specs.values() if not spec.has_fixed_page}
    state = max((spec.page_size_bytes for spec in specs.values() if spec.has_fixed_page), default=0)
    if pages:
        page = math.lcm(*pages)
        page *= max(-(-state // page), 1)
    else:
        page = state
    unified = {name: _with_page(spec, page) for name, spec in specs.items()}
    for name, spec in unified.items():
        if spec.block_size > MAX_BLOCK_SIZE:
            raise ConfigError(
                f"Layer {name} would need block_size {spec.block_size} (at most {MAX_BLOCK_SIZE}) to share pages of {page} "
                f"bytes with layers whose pages have {', '.join(map(str, sorted(pages)))} bytes. Choose another block_size, "
                "or another kv_cache_dtype."
            )
    return unified


def group_layers(specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Layers of equal need, in their order, in groups of one size; full attention first."""
    kinds: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        kinds.setdefault(spec, []).append(name)
    size = _group_size([len(names) for names in kinds.values()])
    groups = []
    for spec, names in sorted(kinds.items(), key=lambda kind: not kind[0].keeps_all_tokens):
        for start in range(0, len(names), size):
            layer_names = tuple(names[start : start + size])
            groups.append(KVCacheGroup(layer_names, spec, num_padding_layers=size - len(layer_names)))
    return tuple(groups)


def bytes_per_block(specs: Iterable[KVCacheSpec]) -> int:
    """Bytes of one block over all these layers: 2 x block_size x kv_heads x head_dim x dtype bytes, summed."""
    return sum(spec.page_size_bytes for spec in specs)


def bytes_per_token(specs: Iterable[KVCacheSpec]) -> int:
    """Bytes of one token over all these layers; states of fixed size have none."""
    return sum(spec.page_size_bytes // spec.block_size for spec in specs if not spec.has_fixed_page)


def _with_page(spec: KVCacheSpec, page_size_bytes: int) -> KVCacheSpec:
    if spec.page_size_bytes == page_size_bytes:
        return spec
    if spec.has_fixed_page:
        return spec.with_page_size(page_size_bytes)
    return spec.with_block_size(spec.block_size * page_size_bytes // spec.page_size_bytes)


def _group_size(counts: list[int]) -> int:
    """Layers of a group: the common divisor of the counts when that gives few groups, else the smallest count, padded.

    52 window and 10 full layers divide by 2, into 31 groups: too many, so groups of 10, the last padded by 8. 20 full and
    30 window layers divide by 10, into 5 groups without padding, where the smallest count would waste 10 places of 60.
    """
    regular, smallest = math.gcd(*counts), min(counts)
    num_padded_groups = sum(-(-count // smallest) for count in counts)
    num_regular_groups = sum(counts) // regular
    return regular if num_regular_groups <= max(MAX_REGULAR_GROUPS, num_padded_groups) else smallest


def _check_fit(plan: KVCachePlan, bytes_per_block: int, max_model_len: int, max_num_batched_tokens: int | None) -> None:
    """Refuse a pool in which a request of `max_model_len` could never run, saying what would fit."""

    def needed(num_tokens: int) -> int:
        return plan.max_blocks_needed(num_tokens, max_num_batched_tokens)

    usable = plan.num_blocks - 1
    if needed(max_model_len) <= usable:
        return
    fitting = _largest(lambda num_tokens: needed(num_tokens) <= usable, max_model_len)
    advice = (
        f"Set max_model_len to at most {fitting}" if fitting else "No max_model_len fits: give the cache more memory"
    )
    raise ConfigError(
        f"max_model_len is {max_model_len}, which needs {needed(max_model_len)} blocks of KV cache "
        f"({_mib((needed(max_model_len) + 1) * bytes_per_block)}, with the null block); there are {max(usable, 0)} "
        f"({_mib(plan.num_blocks * bytes_per_block)}). {advice}, or raise kv_cache_memory_bytes, gpu_memory_utilization "
        "or num_gpu_blocks_override."
    )


def _largest(fits: Callable[[int], bool], upper: int) -> int:
    """The largest number below `upper` that fits, 0 for none; what fits is a prefix."""
    low, high = 0, upper
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
