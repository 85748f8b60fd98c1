"""States that the prefix cache keeps: copies of a request's state as it is where a block of tokens ends.

A running state changes with every step, so no two requests share one. What is kept is a copy, and who finds it runs on a copy of that.
Both are made before a step, of states as the steps before have left them: `StateKeeper.take_copies`.

Nobody holds what is kept. It lies in the free list from the start, and is found until its block is handed out again, least recently used
first. So it takes no room from a request, nothing can leak, and the pool is the bound.

How many: a state has the bytes of a block of tokens or of many, and few are ever asked for. A prompt leaves the one behind its last
full block, where the next turn of its chat begins or the request itself after a preemption, and one where tokens that others have
computed end, if no state is kept there: what two have in common a third will have too. Both end a chunk of the prompt. The output
leaves one, of its last full block, which is written over at the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton.kv_cache.interface import CacheableRequest
from pelton_plugins.kv_cache.block_pool import BlockPool
from pelton_plugins.kv_cache.single_type import NEVER


class RequestStates:
    """The kept states of one request, and where the next one is kept."""

    __slots__ = ("kept", "last", "next", "unnamed", "unnamed_at", "wanted")

    def __init__(self, wanted: Sequence[int]) -> None:
        self.wanted = wanted  # tokens of the prompt whose state is to be kept, ascending
        self.next = NEVER  # the next tokens whose state is
        self.kept: list[bytes] = []  # hashes that those of the prompt are found by
        self.last: bytes | None = None  # and the output's
        # Of the output's: what stands for its hash while the host does not know all of its tokens.
        self.unnamed: bytes | None = None
        self.unnamed_at = NEVER  # how many these are


class StateKeeper:
    """Keeps states of requests, in all groups of states together. alignment: tokens between two places where that may be."""

    def __init__(self, group_ids: Sequence[int], pool: BlockPool, *, alignment: int, hash_block_size: int) -> None:
        self._group_ids, self._pool = tuple(group_ids), pool
        self._alignment, self._hash_block_size = alignment, hash_block_size
        self._copies: list[tuple[int, int]] = []
        self._shared = ("", 0)  # the last request that was looked up, and its tokens that other layers had found
        self._num_unnamed = 0

    def take_copies(self) -> list[tuple[int, int]]:
        copies, self._copies = self._copies, []
        return copies

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._copies += zip(sources, targets, strict=True)

    # Where.

    def note_shared(self, request: CacheableRequest, num_tokens: int) -> None:
        """Note how many of the request's tokens other layers have found, whether a state is kept there or not."""
        self._shared = (request.request_id, num_tokens)

    def wanted(self, request: CacheableRequest) -> list[int]:
        """Tokens of a request that has not begun, whose state is to be kept."""
        name, num_shared = self._shared
        last = (request.num_tokens - 1) // self._alignment * self._alignment  # its last token is never found
        return sorted({last, num_shared}) if name == request.request_id else [last]

    def begin(self, request: CacheableRequest, num_computed: int) -> RequestStates:
        """Return the states of a request that goes on behind so many tokens; none is kept yet."""
        states = RequestStates(self.wanted(request))
        self.plan_next(states, num_computed)
        return states

    def plan_next(self, states: RequestStates, num_computed: int) -> None:
        following = (num_computed // self._alignment + 1) * self._alignment
        states.next = next((place for place in states.wanted if place > num_computed), following)

    # What.

    def keep(
        self, states: RequestStates, running: Sequence[int], block_hashes: Sequence[bytes], num_computed: int
    ) -> None:
        """Keep the state behind these tokens, which is in the blocks `running`, one of each group. Not where too few blocks are free."""
        is_output = num_computed not in states.wanted
        self._forget_unnamed(states)
        name = self._hash(block_hashes, num_computed)
        if name is not None and self._find(name) is not None:
            self._note(states, name, is_output=is_output)
            return
        last = self._find(states.last) if is_output else None
        if last is None and self._pool.num_free < len(running):
            return
        if name is None:
            self._num_unnamed += 1
            name = b"a state behind tokens that are not known yet, the %d. of them" % self._num_unnamed
            states.unnamed, states.unnamed_at = name, num_computed
        else:
            self._note(states, name, is_output=is_output)
        if last is None:
            last = self._pool.allocate(len(running))
            for group_id, block_id in zip(self._group_ids, last, strict=True):
                self._pool.cache_full_blocks(block_id, name, group_id)
        else:  # written over
            self._pool.touch(last)
            self._pool.rename(last, name)
        self.copy(running, last)
        self._pool.free(last)

    def name(self, states: RequestStates, block_hashes: Sequence[bytes]) -> None:
        """Have the output's state found by its tokens, as soon as they are known."""
        name = self._hash(block_hashes, states.unnamed_at)
        if name is None:
            return
        kept = self._find(states.unnamed)
        if kept is not None and self._find(name) is None:
            self._pool.rename(kept, name)
        self._forget_unnamed(states)
        self._note(states, name, is_output=True)

    def end(self, states: RequestStates) -> None:
        """The request is over: what is kept of it was used with the blocks that it gives back."""
        self._forget_unnamed(states)
        for name in (*states.kept, states.last):
            kept = self._find(name)
            if kept is not None:
                self._pool.touch(kept)
                self._pool.free(kept)

    def _note(self, states: RequestStates, name: bytes, *, is_output: bool) -> None:
        if is_output:
            states.last = name
        else:
            states.kept.append(name)

    def _forget_unnamed(self, states: RequestStates) -> None:
        self._pool.evict(self._find(states.unnamed) or ())
        states.unnamed, states.unnamed_at = None, NEVER

    def _hash(self, block_hashes: Sequence[bytes], num_tokens: int) -> bytes | None:
        index = num_tokens // self._hash_block_size - 1
        return block_hashes[index] if index < len(block_hashes) else None

    def _find(self, name: bytes | None) -> list[int] | None:
        """The kept blocks, one of each group, or None when one of them is missing."""
        if name is None:
            return None
        found = [block_id for group_id in self._group_ids if (block_id := self._pool.find(name, group_id)) is not None]
        return found if len(found) == len(self._group_ids) else None
