"""Which blocks a request needs, and which of them are found again, for one kind of layer.

One manager serves all groups of equal spec: their tables have the same length and pass a window together, so what is
decided is decided once. The managers keep no requests: a request's tables are in its `TypeBlocks`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from pelton.errors import ConfigError, PluginError
from pelton.kv_cache.interface import NULL_BLOCK
from pelton.kv_cache.spec import ChunkedLocalSpec, FullAttentionSpec, KVCacheSpec, MambaSpec, MLASpec, SlidingWindowSpec
from pelton_plugins.kv_cache.block_pool import BlockPool

NEVER = sys.maxsize


class TypeBlocks:
    """One request's tables in all groups of one manager; they have equal length."""

    __slots__ = ("num_indexed", "num_passed", "tables")

    def __init__(self, tables: list[list[int]]) -> None:
        self.tables = tables  # block ids; 0 where a window has passed
        self.num_passed = 0  # leading places that hold no block any more
        self.num_indexed = len(tables[0])  # leading places that were made findable, or were found


class SingleTypeManager(ABC):
    """The rules of one `KVCacheSpec` class; a plugin adds one with the hook `pelton_kv_cache_specs`."""

    supports_prefix_cache: ClassVar[bool] = True
    hits_are_prefixes: ClassVar[bool] = False
    """Every shorter prefix of a hit is a hit: asked first, and never twice."""
    copies_hits: ClassVar[bool] = False
    """What is found is copied to a block of the request's own."""

    def __init__(self, spec: Any, group_ids: Sequence[int], pool: BlockPool, hash_block_size: int) -> None:
        self.spec = spec
        self.group_ids = tuple(group_ids)
        self.pool = pool
        self.block_size: int = spec.block_size
        self._hashes_per_block: int = max(self.block_size // hash_block_size, 1)

    # What a kind of layer answers.

    @abstractmethod
    def first_needed_token(self, num_computed_tokens: int) -> int:
        """The earliest token that the token at position `num_computed_tokens`, or a later one, reads."""

    @abstractmethod
    def tokens_until_passed(self, place: int) -> int:
        """Computed tokens from which on the block at `place` is not read any more; `NEVER`."""

    @abstractmethod
    def longest_hit(
        self, block_hashes: Sequence[bytes], max_tokens: int, alignment: int
    ) -> tuple[list[list[int]], int]:
        """Longest cached prefix of at most `max_tokens`, a multiple of `alignment`: (a table per group, tokens)."""

    def num_places(self, num_tokens: int) -> int:
        """Length of the table that holds `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def room(self, num_places: int) -> int:
        """Tokens that a table of `num_places` holds."""
        return num_places * self.block_size

    # What all kinds share.

    def first_needed_place(self, num_computed_tokens: int) -> int:
        return self.first_needed_token(num_computed_tokens) // self.block_size

    def leaving(self, blocks: TypeBlocks, first_needed: int) -> list[int]:
        """Held blocks before the place `first_needed`, last first."""
        if first_needed <= blocks.num_passed:
            return []
        rows = zip(*(table[blocks.num_passed : first_needed] for table in blocks.tables), strict=True)
        return [block_id for row in reversed(list(rows)) for block_id in row if block_id != NULL_BLOCK]

    def let_pass(self, blocks: TypeBlocks, first_needed: int) -> None:
        """Put null in the places before `first_needed`; the caller frees what `leaving` gave."""
        for table in blocks.tables:
            for place in range(blocks.num_passed, min(first_needed, len(table))):
                table[place] = NULL_BLOCK
        blocks.num_passed = max(blocks.num_passed, first_needed)

    def num_missing(self, table_length: int, num_places: int, first_needed: int) -> int:
        """Blocks to allocate, over all groups, so that tables reach `num_places`."""
        return max(num_places - max(table_length, first_needed), 0) * len(self.group_ids)

    def grow(self, blocks: TypeBlocks, num_places: int) -> list[list[int]]:
        """Append to each table until it has `num_places`; places that a window has passed stay null."""
        length = len(blocks.tables[0])
        num_new = num_places - length
        if num_new <= 0:
            return [[] for _ in self.group_ids]
        num_null = min(max(blocks.num_passed - length, 0), num_new)
        appended = []
        for table in blocks.tables:
            new = [NULL_BLOCK] * num_null + self.pool.allocate(num_new - num_null)
            table += new
            appended.append(new)
        return appended

    def cache_full_blocks(self, blocks: TypeBlocks, block_hashes: Sequence[bytes], num_tokens: int) -> None:
        """Put the full blocks of the first `num_tokens` tokens into the index."""
        per_block, first = self._hashes_per_block, blocks.num_indexed
        last = min(num_tokens // self.block_size, len(block_hashes) // per_block, len(blocks.tables[0]))
        if last <= first:
            return
        blocks.num_indexed = last
        if last == first + 1:  # as nearly always in decode
            block_hash = block_hashes[last * per_block - 1]
            for group_id, table in zip(self.group_ids, blocks.tables, strict=True):
                self.pool.cache_full_blocks(table[first], block_hash, group_id)
            return
        hashes = block_hashes[(first + 1) * per_block - 1 : last * per_block : per_block]
        for group_id, table in zip(self.group_ids, blocks.tables, strict=True):
            self.pool.cache_run(table[first:last], hashes, group_id)

    def tokens_until_full(self, blocks: TypeBlocks) -> int:
        """Known tokens at which the next block becomes findable."""
        return (blocks.num_indexed + 1) * self.block_size

    def _find(self, block_hashes: Sequence[bytes], place: int) -> list[int] | None:
        """The blocks of this place in all groups, or None when one of them is missing."""
        block_hash = block_hashes[(place + 1) * self._hashes_per_block - 1]
        found = []
        for group_id in self.group_ids:
            block_id = self.pool.find(block_hash, group_id)
            if block_id is None:
                return None
            found.append(block_id)
        return found

    def _num_full_places(self, block_hashes: Sequence[bytes], max_tokens: int) -> int:
        return min(max_tokens // self.block_size, len(block_hashes) // self._hashes_per_block)


class FullAttentionManager(SingleTypeManager):
    """Every block is kept; a hit is found left to right."""

    hits_are_prefixes = True

    def first_needed_token(self, num_computed_tokens: int) -> int:
        return 0

    def tokens_until_passed(self, place: int) -> int:
        return NEVER

    def longest_hit(
        self, block_hashes: Sequence[bytes], max_tokens: int, alignment: int
    ) -> tuple[list[list[int]], int]:
        per_block = self._hashes_per_block
        end = self._num_full_places(block_hashes, max_tokens) * per_block
        if not end or self.pool.find(block_hashes[per_block - 1], self.group_ids[0]) is None:
            return [[] for _ in self.group_ids], 0
        hashes = block_hashes[per_block - 1 : end : per_block]
        tables = [self.pool.find_first(hashes, group_id) for group_id in self.group_ids]
        num_tokens = min(map(len, tables)) * self.block_size // alignment * alignment
        return [table[: num_tokens // self.block_size] for table in tables], num_tokens


class WindowManager(SingleTypeManager):
    """Blocks that no later token reads are given back at once; a hit needs only the blocks that the next token reads."""

    def longest_hit(
        self, block_hashes: Sequence[bytes], max_tokens: int, alignment: int
    ) -> tuple[list[list[int]], int]:
        """From right to left, by whole windows.

        A block that is missing rules out every end whose window holds it, so the search goes on with the window that ends
        before it; within a window it looks from the left, where a miss rules out most. Each place is looked up at most
        twice, and one place a window when nothing is cached.
        """
        step = alignment // self.block_size
        end = self._num_full_places(block_hashes, max_tokens) // step * step
        while True:
            first = self.first_needed_place(end * self.block_size)
            run: list[list[int]] = []
            for place in range(first, end):
                found = self._find(block_hashes, place)
                if found is None:
                    end = place // step * step
                    break
                run.append(found)
            else:
                tables = [[NULL_BLOCK] * first + [row[i] for row in run] for i in range(len(self.group_ids))]
                return tables, end * self.block_size


class SlidingWindowManager(WindowManager):
    """A token reads itself and the `sliding_window - 1` tokens before it."""

    spec: SlidingWindowSpec

    def first_needed_token(self, num_computed_tokens: int) -> int:
        return max(num_computed_tokens - self.spec.sliding_window + 1, 0)

    def tokens_until_passed(self, place: int) -> int:
        return (place + 1) * self.block_size + self.spec.sliding_window - 1


class ChunkedLocalManager(WindowManager):
    """A token reads the tokens before it in its own aligned chunk."""

    spec: ChunkedLocalSpec

    def first_needed_token(self, num_computed_tokens: int) -> int:
        return num_computed_tokens - num_computed_tokens % self.spec.attention_chunk_size

    def tokens_until_passed(self, place: int) -> int:
        size = self.spec.attention_chunk_size
        return -(-(place + 1) * self.block_size // size) * size


class MambaManager(SingleTypeManager):
    """One block holds the whole state, from the first token to the last. A hit is the longest prefix whose state is kept."""

    copies_hits = True

    def first_needed_token(self, num_computed_tokens: int) -> int:
        return 0

    def tokens_until_passed(self, place: int) -> int:
        return NEVER

    def num_places(self, num_tokens: int) -> int:
        return 1 if num_tokens else 0

    def room(self, num_places: int) -> int:
        return NEVER if num_places else 0

    def longest_hit(
        self, block_hashes: Sequence[bytes], max_tokens: int, alignment: int
    ) -> tuple[list[list[int]], int]:
        """The table of each group is the one block to be copied."""
        step = alignment // self.block_size
        for end in range(self._num_full_places(block_hashes, max_tokens) // step * step, 0, -step):
            if (found := self._find(block_hashes, end - 1)) is not None:
                return [[block_id] for block_id in found], end * self.block_size
        return [[] for _ in self.group_ids], 0

    def cache_full_blocks(self, blocks: TypeBlocks, block_hashes: Sequence[bytes], num_tokens: int) -> None:
        """A running state is not found."""

    def tokens_until_full(self, blocks: TypeBlocks) -> int:
        return NEVER


ManagerEntry = tuple[type[KVCacheSpec], type[SingleTypeManager]]

BUILT_IN_MANAGERS: Mapping[type[KVCacheSpec], type[SingleTypeManager]] = {
    FullAttentionSpec: FullAttentionManager,
    MLASpec: FullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    ChunkedLocalSpec: ChunkedLocalManager,
    MambaSpec: MambaManager,
}


def make_managers(
    specs: Sequence[KVCacheSpec], pool: BlockPool, hash_block_size: int, extra_managers: Iterable[ManagerEntry] = ()
) -> list[SingleTypeManager]:
    """One manager for the groups of each distinct spec, group i having `specs[i]`.

    The exact class decides: a subclass has rules that its parent's manager does not know. Raises `ConfigError`.
    """
    known = {**BUILT_IN_MANAGERS, **dict(map(_checked, extra_managers))}
    groups: dict[KVCacheSpec, list[int]] = {}
    for group_id, spec in enumerate(specs):
        groups.setdefault(spec, []).append(group_id)
    managers = []
    for spec, group_ids in groups.items():
        manager = known.get(type(spec))
        if manager is None:
            names = ", ".join(sorted(cls.__name__ for cls in known))
            raise ConfigError(
                f"The model asks for {type(spec).__name__}, which no KV-cache manager handles; there are managers for {names}. "
                "Install a plugin that offers one through the hook pelton_kv_cache_specs."
            )
        managers.append(manager(spec, group_ids, pool, hash_block_size))
    return managers


def _checked(entry: Any) -> ManagerEntry:
    """Check what a plugin's `pelton_kv_cache_specs` entry has loaded."""
    match entry:
        case (type() as spec, type() as manager) if issubclass(spec, KVCacheSpec) and issubclass(
            manager, SingleTypeManager
        ):
            return spec, manager
    raise PluginError(
        f"An entry of pelton_kv_cache_specs loads {entry!r}; expected a pair of a KVCacheSpec class and a SingleTypeManager class."
    )
