"""From the needs of layers to groups, buffers and a number of blocks.

Layers whose block tables are alike (`KVCacheSpec.block_tables_alike`) share a group, whatever their pages hold. A model of
such layers alone is one group, and each layer has a buffer of pages of its own size.

Otherwise all groups share one pool, so all have one page size: bytes of a block of one layer, times layers of a group. Layers
of equal need are cut into groups of m layers; m buffers result, each shared by one layer of every group. Few layers whose
pages differ ride along with a group of their kind, in buffers that the other groups leave unused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from pelton.errors import ConfigError
from pelton.kv_cache.spec import KVCacheGroup, KVCachePlan, KVCacheSpec, KVCacheTensor

MAX_REGULAR_GROUPS = 8
"""Host work a step grows with the number of groups: an unpadded division may cost so many, more only if padding has more."""
MAX_BLOCK_SIZE = 65_536
"""Tokens; a block size raised above this wastes most of it."""
MAX_RIDING_SHARE = 0.25
"""Of a block's bytes: what layers that ride along may take in blocks of groups which have no use for it."""


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

    num_blocks_override: this many blocks, whatever `available_bytes`. disable_hybrid: windows keep every token. max_num_batched_tokens:
    most tokens of one step, which bounds what a window holds. Raises `ConfigError` when a request of `max_model_len` does not fit.
    """
    if not specs:
        return KVCachePlan(num_blocks=1, tensors=(), groups=())
    if disable_hybrid:
        specs = {name: spec.without_window() for name, spec in specs.items()}
    groups, buffers = plan_groups(specs)
    bytes_per_block = sum(page_size for page_size, _ in buffers)
    num_blocks = num_blocks_override if num_blocks_override is not None else available_bytes // bytes_per_block
    tensors = tuple(KVCacheTensor(page_size * num_blocks, shared_by) for page_size, shared_by in buffers)
    plan = KVCachePlan(num_blocks=num_blocks, tensors=tensors, groups=groups)
    _check_fit(plan, bytes_per_block, max_model_len, max_num_batched_tokens)
    return plan


Buffers = list[tuple[int, tuple[str, ...]]]
"""Bytes of a page, and the layers that share the buffer."""


def plan_groups(specs: Mapping[str, KVCacheSpec]) -> tuple[tuple[KVCacheGroup, ...], Buffers]:
    """Which layers share a block table, and which share memory. Raises `ConfigError`."""
    if all(_is_alike(spec) for spec in specs.values()) and len({spec.block_size for spec in specs.values()}) == 1:
        return (_mixed_group(specs),), [(spec.page_size_bytes, (name,)) for name, spec in specs.items()]
    riders = find_riders(specs)
    groups, buffers = _shared_buffers(
        unify_page_sizes({name: spec for name, spec in specs.items() if name not in riders})
    )
    return _with_riders(groups, buffers, riders) if riders else (groups, buffers)


def _shared_buffers(specs: Mapping[str, KVCacheSpec]) -> tuple[tuple[KVCacheGroup, ...], Buffers]:
    """Groups of one size over layers whose pages have one size: buffer i is shared by each group's layer i."""
    groups = group_layers(specs)
    page_size = next(iter(specs.values())).page_size_bytes
    names = [group.layer_names for group in groups]
    group_size = max(map(len, names))
    return groups, [(page_size, tuple(own[i] for own in names if i < len(own))) for i in range(group_size)]


def find_riders(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Layers that differ from most of the layers of their kind in their pages alone, where they are few enough to ride along.

    A draft head with half the kv heads is one. Without this its page size would be unified with the others', and one odd
    layer would make a group of each layer.
    """
    counts: dict[KVCacheSpec, int] = {}
    for spec in specs.values():
        counts[spec] = counts.get(spec, 0) + 1
    alike = [spec for spec in counts if _is_alike(spec)]
    if not alike or len(alike) == len(counts):
        return {}
    main = max(alike, key=lambda spec: counts[spec])
    odd = {name: spec for name, spec in specs.items() if spec != main and _is_alike(spec)}
    if any(spec.block_size != main.block_size for spec in odd.values()):
        return {}
    rest = {name: spec for name, spec in specs.items() if name not in odd}
    try:
        _, buffers = _shared_buffers(unify_page_sizes(rest))
    except ConfigError:
        return {}
    most = MAX_RIDING_SHARE * sum(page_size for page_size, _ in buffers)
    return odd if sum(spec.page_size_bytes for spec in odd.values()) <= most else {}


def _is_alike(spec: KVCacheSpec) -> bool:
    """Ask the spec's own class: a subclass may hold other blocks than its parent."""
    return bool(vars(type(spec)).get("block_tables_alike", False))


def _mixed_group(specs: Mapping[str, KVCacheSpec]) -> KVCacheGroup:
    """One group of layers with pages of different sizes."""
    kinds = dict.fromkeys(specs.values())
    first, *others = kinds
    return KVCacheGroup(tuple(specs), first, layer_specs=tuple(specs.values()) if others else ())


def _with_riders(
    groups: tuple[KVCacheGroup, ...], buffers: Buffers, riders: Mapping[str, KVCacheSpec]
) -> tuple[tuple[KVCacheGroup, ...], Buffers]:
    """The riders belong to the first group, which keeps every token as they do. Its blocks are theirs, so these have as many tokens."""
    first, *others = groups
    raised = {name: spec.with_block_size(first.spec.block_size) for name, spec in riders.items()}
    with_riders = replace(
        first,
        layer_names=(*first.layer_names, *raised),
        layer_specs=(*(first.spec for _ in first.layer_names), *raised.values()),
    )
    return (with_riders, *others), [*buffers, *((spec.page_size_bytes, (name,)) for name, spec in raised.items())]


def with_num_blocks(plan: KVCachePlan, num_blocks: int) -> KVCachePlan:
    """The same groups over a pool of another size, whether a request fits in it or not."""
    tensors = tuple(
        replace(tensor, size_bytes=tensor.size_bytes // plan.num_blocks * num_blocks) for tensor in plan.tensors
    )
    return replace(plan, num_blocks=num_blocks, tensors=tensors)


def unify_page_sizes(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Raise block sizes until every layer's block has the same bytes; pad states of fixed size to that, which get all others' block size.

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
    if sizes := {spec.block_size for spec in unified.values() if not spec.has_fixed_page}:
        states = {name: spec for name, spec in unified.items() if spec.has_fixed_page}
        unified |= {name: spec.with_block_size(math.lcm(*sizes)) for name, spec in states.items()}
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
    said = f"Set max_model_len to at most {fitting}" if fitting else "No max_model_len fits: give the cache more memory"
    raise ConfigError(
        f"max_model_len is {max_model_len}, which needs {needed(max_model_len)} blocks of KV cache "
        f"({_mib((needed(max_model_len) + 1) * bytes_per_block)}, with the null block); there are {max(usable, 0)} "
        f"({_mib(plan.num_blocks * bytes_per_block)}). {said}, or raise kv_cache_memory_bytes, gpu_memory_utilization "
        "or num_gpu_blocks_override; where layers have a window, a lower max_num_batched_tokens needs fewer blocks."
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
