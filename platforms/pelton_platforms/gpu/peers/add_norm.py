"""The sum over ranks with the residual's add and the norm behind it, as one launch: `add_norm` of several ranks where rows are few."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from pelton import env
from pelton.ops.interface import AllReduce, AllReduceNeeds, AllReduceTensors, NormSpec, RowsToSend
from pelton.platform.compiling import launch
from pelton_platforms.gpu.peers import norm_kernel
from pelton_platforms.gpu.peers.communicator import DTYPES, PeerCommunicator

if TYPE_CHECKING:
    from pelton.parallel.communicator import Communicator

LEAST_WIDTH = 64
TWO_SHOTS_FROM_BYTES = 3 << 16
"""With more than two ranks: four H200s sum 128 KiB in 7.7 us in one shot and 8.1 in two, 256 KiB in 10.9 and 8.9."""
MANY_FROM_BYTES, MANY_FROM_BYTES_OF_MORE = 1 << 19, 5 << 18
"""From here on rows go as they are, not a flag with each word: between two ranks, and between more. Four H200s sum 1 MiB in 16.9 us with a
flag a word and 21.1 with one a row, 1.25 MiB in 22.9 and 22.2."""
SENT_ROWS, SENT_BYTES, SENT_BLOCK = 1 << 14, 1 << 27, 64
"""Of a product's rows that are sent on the way: at most so many, and so many bytes. They are counted by blocks of 64."""
SENT_TURN = 384
"""Of these the ranks add up so many in turn: two of a product's tiles. Of tiles that follow each other half are sent, so that few programs
at a time wait for the link."""
_REGISTERS = {} if torch.version.hip is not None else {"maxnreg": norm_kernel.MOST_REGISTERS}


class PeerAllReduce:
    """The op `all_reduce` where the ranks' communicator is `peers`, with `add_norm`."""

    @staticmethod
    def unsupported(needs: AllReduceNeeds) -> list[str]:
        return []

    @staticmethod
    def bind(needs: AllReduceNeeds, tensors: AllReduceTensors) -> AllReduce:
        reduce: AllReduce = tensors.parallel.all_reduce
        communicator: Communicator | None = getattr(tensors.parallel, "communicator", None)
        if not isinstance(communicator, PeerCommunicator):
            return reduce
        memory = open_rows(communicator, needs.hidden_size, getattr(torch, needs.dtype))
        return reduce if memory is None else SumAddNorm(reduce, communicator, memory, needs)


def open_rows(communicator: PeerCommunicator, width: int, dtype: torch.dtype) -> RowMemory | None:
    """Make room for rows of `width` numbers, once for all layers; every rank makes it at the same place of its model. None: the kernel
    does not serve them."""
    num_bytes = width * dtype.itemsize
    if dtype not in DTYPES or num_bytes % 4 or width < LEAST_WIDTH or num_bytes > 4 * norm_kernel.MOST_WORDS:
        return None
    words = num_bytes // 4
    opened: dict[Any, RowMemory] = communicator.kept
    if words not in opened:
        found = communicator.open_memory(f"rows of {words}", norm_kernel.memory_words(communicator.size, words))
        if found is None:
            return None
        opened[words] = RowMemory(*found, norm_kernel.PROGRAMS, min(max(triton.next_power_of_2(words) // 128, 1), 16))
        programs, num_warps = norm_kernel.programs_of_many(communicator.num_multiprocessors, words)
        num_words = norm_kernel.memory_words_of_many(programs, words, communicator.size)
        many = communicator.open_memory(f"many rows of {words}", num_words)
        if many is not None:
            opened[words].many = RowMemory(*many, programs, num_warps)
    return opened[words]


class RowMemory:
    """Where rows of one width go round. peers: kept while addresses are used; num_programs: the most of a launch; many: for rows from
    `MANY_FROM_BYTES` on; sent: for those that products send."""

    def __init__(self, peers: list[Tensor], addresses: Tensor, num_programs: int, num_warps: int) -> None:
        self.peers, self.addresses, self.num_programs, self.num_warps = peers, addresses, num_programs, num_warps
        self.calls = torch.zeros(num_programs, dtype=torch.int32, device=addresses.device)
        self.many: RowMemory | None = None
        self.sent: SentMemory | None = None


class SentMemory:
    """Where products of two ranks leave rows for each other, in turn, and sums of rows after them: [2, most_rows, words] int32, then
    [2, blocks] counts and [most_rows] flags.

    A rank begins a call when it has all sums of the one before, its own and the other's: so the other has counted all of that one's parts,
    and has read what came with it. So two places are enough; and before it counts its own first part it clears the next call's counts,
    which the other adds to when it has these. A sum is sent to the place of a row that is never sent there, when a part of its call has
    come, so when the other has read the call before. A call that nobody adds up (rows are summed another way) leaves nothing behind."""

    def __init__(self, peers: list[Tensor], rank: int, words: int, most_rows: int, blocks: int) -> None:
        self._peers, self._rank, self.words, self.most_rows, self.blocks = peers, rank, words, most_rows, blocks
        self.calls = torch.zeros(2, dtype=torch.int32, device=peers[rank].device)
        self.came, self.counts, self.flags = self._parts(rank)
        self.theirs, self._their_counts, self.their_flags = self._parts(1 - rank)

    @classmethod
    def open(cls, communicator: PeerCommunicator, words: int) -> SentMemory | None:
        most_rows = min(SENT_ROWS, SENT_BYTES // (4 * words)) // SENT_BLOCK * SENT_BLOCK
        blocks = triton.next_power_of_2(
            most_rows // SENT_BLOCK + 4
        )  # a product's last tile may end behind the last row
        found = communicator.open_memory(f"sent rows of {words}", most_rows * words + blocks + most_rows // 2)
        return None if found is None else cls(found[0], communicator.rank, words, most_rows, blocks)

    def _parts(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        sizes = 2 * self.most_rows * self.words, 2 * self.blocks, self.most_rows
        rows, counts, flags = self._peers[rank].view(torch.int32)[: sum(sizes)].split(sizes)
        return rows.view(2, self.most_rows, self.words), counts.view(2, self.blocks), flags

    def to_send(self, num_rows: int, dtype: torch.dtype) -> RowsToSend | None:
        if num_rows > self.most_rows:
            return None
        even, odd = self.theirs.view(dtype)[:, :num_rows]
        return RowsToSend((even, odd), self._their_counts, self.counts, self.calls, self._rank, SENT_TURN)


class SumAddNorm:
    """A sum over ranks; see `AllReduce`."""

    def __init__(
        self,
        reduce: Callable[[Tensor], Tensor],
        communicator: PeerCommunicator,
        memory: RowMemory,
        needs: AllReduceNeeds,
    ) -> None:
        self._reduce, self._communicator, self._memory = reduce, communicator, memory
        self._dtype, self._width = getattr(torch, needs.dtype), needs.hidden_size
        self._pdl = has_pdl(communicator.device)

    def __call__(self, partial: Tensor) -> Tensor:
        return self._reduce(partial)

    def open_to_send(self) -> None:
        """See `AllReduce`. Once for all layers, and between two ranks alone."""
        if self._communicator.size == 2 and self._memory.many is not None and self._memory.sent is None:
            words = self._width * self._dtype.itemsize // 4
            self._memory.sent = SentMemory.open(self._communicator, words)

    def to_send(self, num_rows: int) -> RowsToSend | None:
        """See `AllReduce`."""
        sent = self._memory.sent
        return None if sent is None else sent.to_send(num_rows, self._dtype)

    def add_norm(
        self, hidden: Tensor, residual: Tensor | None, norm: Tensor, spec: NormSpec, post_norm: Tensor | None,
        post_spec: NormSpec | None,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """-> (normed rows, residual'), the latter in residual's memory, or hidden's. None: there is nothing, or too much for it."""
        num_bytes = hidden.numel() * hidden.element_size()
        parts, sent = getattr(hidden, "pelton_parts", None), self._memory.sent
        communicator, memory, size = self._communicator, self._memory, self._communicator.size
        many = memory.many
        if not num_bytes or (many is None and num_bytes >= communicator.nccl_from_bytes):
            return None
        if hidden.dtype != self._dtype or norm.dtype != self._dtype:
            return None
        if not hidden.is_contiguous() or (residual is not None and not residual.is_contiguous()):
            return None
        rows, total = torch.empty_like(hidden), hidden if residual is None else residual
        given = [_as_words(one) for one in (hidden, residual, total, rows, norm, post_norm)]
        row_words, num_rows = self._width * hidden.element_size() // 4, len(hidden)
        block = triton.next_power_of_2(row_words)
        communicator.check()
        if num_bytes < (MANY_FROM_BYTES if size == 2 else MANY_FROM_BYTES_OF_MORE):
            many = None
        memory = many or memory
        numbers = (num_rows, communicator.limit, spec.eps, 0.0 if post_spec is None else post_spec.eps)
        constants = dict(
            NUMBERS=self._width, ROW=row_words, BLOCK=block, DTYPE=DTYPES[hidden.dtype],
            UNIT_OFFSET=spec.unit_offset, POST_UNIT_OFFSET=post_spec is not None and post_spec.unit_offset, PDL=self._pdl,
            num_warps=memory.num_warps, **({"launch_pdl": True} if self._pdl else {}),
        )  # fmt: skip
        if parts is not None and sent is not None:
            constants["num_warps"] = min(max(block // 512, 1), 16)
            launch(
                norm_kernel.sum_sent_add_norm_kernel, (SENT_TURN * -(-num_rows // (2 * SENT_TURN)),), *given, sent.came, sent.counts,
                sent.flags, sent.theirs, sent.their_flags, sent.calls, communicator.failed, num_rows, communicator.limit, parts,
                *numbers[2:], sent.most_rows, COUNTS=sent.blocks, RANK=communicator.rank, TURN=SENT_TURN, **constants,
            )  # fmt: skip
        elif many is not None:
            rows_at_once = 1 if size == 2 else size
            num_programs = min(-(-num_rows // rows_at_once), many.num_programs)
            if 2 * num_programs <= many.num_programs:  # 6 % faster on two H200s
                constants["num_warps"] = min(2 * many.num_warps, 16)
            arguments = (*given, memory.addresses, memory.calls, communicator.failed, *numbers)
            constants |= {"PROGRAMS": memory.num_programs, "RANK": communicator.rank, **_REGISTERS}
            if size == 2:
                constants["AHEAD"] = norm_kernel.AHEAD
                launch(norm_kernel.sum_add_norm_many_kernel, (num_programs,), *arguments, **constants)
            else:
                constants |= {"SIZE": size, "TURNS": norm_kernel.TURNS}
                launch(norm_kernel.sum_add_norm_shared_kernel, (num_programs,), *arguments, **constants)
        else:
            launch(
                norm_kernel.sum_add_norm_kernel, (min(num_rows, memory.num_programs),), *given, memory.addresses,
                memory.calls, communicator.failed, *numbers,
                SIZE=size, SLOTS=norm_kernel.SLOTS, RANK=communicator.rank,
                TWO_SHOT=size > 2 and num_bytes >= TWO_SHOTS_FROM_BYTES, **constants,
            )  # fmt: skip
        return rows, total


def _as_words(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.view(torch.int32)


def has_pdl(device: torch.device) -> bool:
    """Compute capability 9.0 and later, unless PELTON_DEPENDENT_LAUNCH says no."""
    if device.type != "cuda" or torch.version.hip is not None or not env.dependent_launch():
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
