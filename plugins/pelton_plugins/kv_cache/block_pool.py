"""Hand out, take back and find again fixed-size KV blocks.

A block holds `block_size` token slots of every layer of one group. This file knows nothing of requests
or tokens: `single_type.py` says which blocks a request needs, `hashing.py` what a block's hash is.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from pelton.errors import EngineError
from pelton.kv_cache.interface import NULL_BLOCK


class OutOfBlocksError(EngineError):
    """More blocks were asked for than are free; the caller counts first."""


class Block:
    """One block. In the free list exactly when `ref_cnt` is 0 (the null block aside)."""

    __slots__ = ("block_hash", "block_id", "group_id", "is_duplicate", "next", "prev", "ref_cnt", "sample")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None  # set while the block can be found
        self.is_duplicate = False  # others have this hash too
        self.group_id = 0
        self.prev: Block = self  # both mean something while it is in the free list
        self.next: Block = self
        self.sample: Residency | None = None


class Residency:
    """Times of one sampled block, from its allocation to its eviction."""

    __slots__ = ("allocated_at", "touched_at", "was_touched")

    def __init__(self, now: float) -> None:
        self.allocated_at = now
        self.touched_at = now
        self.was_touched = False


class ResidencySampler:
    """Lifetime = allocation to eviction, idle = last touch to eviction, reuse gap = touch to touch, of a share of the blocks."""

    def __init__(
        self, share: float, clock: Callable[[], float] = time.monotonic, rng: random.Random | None = None
    ) -> None:
        self._share = share
        self._clock = clock
        self._rng = rng or random.Random()
        self._clear()

    def _clear(self) -> None:
        self._lifetimes: list[float] = []
        self._idle: list[float] = []
        self._gaps: list[float] = []

    def allocated(self, block: Block) -> None:
        block.sample = Residency(self._clock()) if self._rng.random() < self._share else None

    def touched(self, block: Block) -> None:
        sample = block.sample
        if sample is None:
            return
        now = self._clock()
        if sample.was_touched:
            self._gaps.append(now - sample.touched_at)
        sample.touched_at = now
        sample.was_touched = True

    def evicted(self, block: Block) -> None:
        sample = block.sample
        if sample is None:
            return
        now = self._clock()
        self._lifetimes.append(now - sample.allocated_at)
        self._idle.append(now - sample.touched_at)
        block.sample = None

    def take(self) -> tuple[list[float], list[float], list[float]]:
        """(lifetimes, idle times, reuse gaps) since the last call."""
        taken = self._lifetimes, self._idle, self._gaps
        self._clear()
        return taken


class BlockPool:
    """All blocks, made once; the free ones in a doubly linked list, least recently used first.

    A free block keeps its hash, and so can be found, until it is handed out again. One hash and group may have
    several blocks: tables are never rewritten to share. A duplicate leaves the index when it is freed.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1, *, sampler: ResidencySampler | None = None) -> None:
        self.num_blocks = num_blocks
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.num_free = num_blocks - 1
        self._sampler = sampler
        # One dict per group: the key is (hash, group id) without a tuple made per look-up.
        self._index: list[dict[bytes, int | dict[int, None]]] = [{} for _ in range(num_groups)]  # block ids
        self._ends = Block(-1)  # before the first and after the last free block
        previous = self._ends
        for block in self.blocks[1:]:
            previous.next, block.prev = block, previous
            previous = block
        previous.next, self._ends.prev = self._ends, previous

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    def free_ids(self) -> Iterator[int]:
        """Free blocks in the order in which they will be handed out."""
        block = self._ends.next
        while block is not self._ends:
            yield block.block_id
            block = block.next

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, least recently used first; cached ones among them are evicted. Takes none when it raises."""
        if count > self.num_free:
            raise OutOfBlocksError(
                f"KV cache is full: {count} blocks requested, {self.num_free} of {self.num_usable} free. "
                "Lower max_num_seqs or raise kv_cache_memory_bytes."
            )
        taken = []
        sampler, indexes = self._sampler, self._index
        block = self._ends.next
        for _ in range(count):
            if (block_hash := block.block_hash) is not None:
                if block.is_duplicate or sampler is not None:
                    self._evict(block)
                else:  # the same, of nearly all blocks
                    del indexes[block.group_id][block_hash]
                    block.block_hash = None
            block.ref_cnt = 1
            taken.append(block.block_id)
            block = block.next
        self._ends.next = block
        block.prev = self._ends
        self.num_free -= count
        if sampler is not None:
            for block_id in taken:
                sampler.allocated(self.blocks[block_id])
        return taken

    def touch(self, block_ids: Sequence[int]) -> None:
        """Hold found blocks, free or not."""
        blocks, num_taken = self.blocks, 0
        # What a request gave back lies in the free list in one run, its last block first: runs are taken out as a whole.
        first: Block | None = None
        last = first
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            block = blocks[block_id]
            if not block.ref_cnt:
                num_taken += 1
                if block.next is not first:
                    _take_out(first, last)
                    last = block
                first = block
            block.ref_cnt += 1
        _take_out(first, last)
        self.num_free -= num_taken
        if self._sampler is not None:
            for block_id in block_ids:
                if block_id != NULL_BLOCK:
                    self._sampler.touched(blocks[block_id])

    def free(self, block_ids: Iterable[int]) -> None:
        """Let go of blocks, in the order in which they shall be reused. Null blocks are skipped."""
        blocks, ends, num_freed = self.blocks, self._ends, 0
        last = ends.prev  # the list is closed behind it at the end
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            block = blocks[block_id]
            count = block.ref_cnt - 1
            assert count >= 0, f"block {block_id} is freed twice"
            block.ref_cnt = count
            if count:
                continue
            num_freed += 1
            if block.is_duplicate:
                self._unindex(block)  # nothing is lost by reusing it: to the front
                last.next, ends.prev = ends, last
                after = ends.next
                block.prev, block.next = ends, after
                ends.next = after.prev = block
                last = ends.prev
            else:
                last.next, block.prev = block, last
                last = block
        last.next, ends.prev = ends, last
        self.num_free += num_freed

    def free_first(self, block_ids: Iterable[int]) -> None:
        """Let go of blocks that one request holds and nobody finds: they are handed out before all others."""
        for block_id in block_ids:
            block, after = self.blocks[block_id], self._ends.next
            assert block.ref_cnt == 1 and block.block_hash is None, f"block {block_id} is shared, or can be found"
            block.ref_cnt = 0
            block.prev, block.next = self._ends, after
            self._ends.next = after.prev = block
            self.num_free += 1

    def num_free_among(self, block_ids: Sequence[int]) -> int:
        """How many of these are free now: touching them takes so many from the free list."""
        blocks = self.blocks
        return [blocks[block_id].ref_cnt for block_id in block_ids].count(0) - block_ids.count(NULL_BLOCK)

    def num_held_once(self, block_ids: Iterable[int]) -> int:
        """How many of these one `free` would make free."""
        blocks = self.blocks
        return sum(1 for block_id in block_ids if block_id != NULL_BLOCK and blocks[block_id].ref_cnt == 1)

    def find(self, block_hash: bytes, group_id: int) -> int | None:
        """A block with this content, or None."""
        entry = self._index[group_id].get(block_hash)
        if entry is None:
            return None
        return entry if isinstance(entry, int) else next(iter(entry))

    def find_first(self, block_hashes: Sequence[bytes], group_id: int) -> list[int]:
        """`find` of each, up to the first that is not there."""
        index = self._index[group_id]
        if not block_hashes or block_hashes[0] not in index:
            return []
        entries = list(map(index.get, block_hashes))
        if None in entries:
            del entries[entries.index(None) :]
        return [entry if isinstance(entry, int) else next(iter(entry)) for entry in entries if entry is not None]

    def cache_full_blocks(self, block_id: int, block_hash: bytes, group_id: int) -> None:
        """Put a full block into the index. A block that is there already stays as it is."""
        block = self.blocks[block_id]
        if block_hash == block.block_hash or block_id == NULL_BLOCK:
            return
        assert block.block_hash is None, f"block {block_id} is in the index with another hash"
        block.block_hash, block.group_id = block_hash, group_id
        index = self._index[group_id]
        entry = index.get(block_hash)
        if entry is None:
            index[block_hash] = block_id
        elif isinstance(entry, int):
            index[block_hash] = {entry: None, block_id: None}
            block.is_duplicate = self.blocks[entry].is_duplicate = True
        else:
            entry[block_id] = None
            block.is_duplicate = True

    def cache_run(self, block_ids: Sequence[int], block_hashes: Sequence[bytes], group_id: int) -> None:
        """`cache_full_blocks` of each block."""
        blocks, index = self.blocks, self._index[group_id]
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            block = blocks[block_id]
            if block.block_hash is None and block_hash not in index and block_id != NULL_BLOCK:
                block.block_hash, block.group_id = block_hash, group_id
                index[block_hash] = block_id
            else:
                self.cache_full_blocks(block_id, block_hash, group_id)

    def rename(self, block_ids: Iterable[int], block_hash: bytes) -> None:
        """Have blocks that are in the index found by another hash."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            self._unindex(block)
            self.cache_full_blocks(block_id, block_hash, block.group_id)

    def evict(self, block_ids: Iterable[int]) -> None:
        """Take blocks out of the index; holders keep them, free ones stay free."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.block_hash is not None:
                self._evict(block)

    def cached_ids(self, group_id: int = 0) -> set[int]:
        """All blocks of a group that can be found."""
        found: set[int] = set()
        for entry in self._index[group_id].values():
            found.update((entry,) if isinstance(entry, int) else entry)
        return found

    def reset(self) -> bool:
        """Empty the index; False, and nothing done, while any block is held."""
        if self.num_free != self.num_usable:
            return False
        for index in self._index:
            index.clear()
        for block in self.blocks:
            block.block_hash = None
            block.is_duplicate = False
            block.sample = None
        return True

    def common_prefix(self, tables: Sequence[Sequence[int]]) -> int:
        """Leading blocks that all tables share; a null block is not shared."""
        num_tables, count = len(tables), 0
        for block_id in tables[0]:
            # The count is a cheap no for most batches; it may include holders that were not asked about.
            if block_id == NULL_BLOCK or self.blocks[block_id].ref_cnt < num_tables:
                break
            count += 1
        head = tables[0][:count]
        for table in tables:
            if table[:count] != head:
                count = next(place for place, block_id in enumerate(head) if table[place : place + 1] != [block_id])
                head = head[:count]
        return count

    def _evict(self, block: Block) -> None:
        self._unindex(block)
        if self._sampler is not None:
            self._sampler.evicted(block)

    def _unindex(self, block: Block) -> None:
        assert block.block_hash is not None
        index = self._index[block.group_id]
        entry = index[block.block_hash]
        if isinstance(entry, int):
            del index[block.block_hash]
        else:
            del entry[block.block_id]
            block.is_duplicate = False
            if len(entry) == 1:
                index[block.block_hash] = last = next(iter(entry))
                self.blocks[last].is_duplicate = False
        block.block_hash = None


def _take_out(first: Block | None, last: Block | None) -> None:
    """The run from `first` to `last` out of the list; None: there is none."""
    if first is not None and last is not None:
        before, after = first.prev, last.next
        before.next, after.prev = after, before
