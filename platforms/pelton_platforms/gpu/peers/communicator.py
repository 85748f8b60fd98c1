"""`PeerCommunicator`: collectives of GPUs of one host through memory that they map from each other, and NCCL for what is large.

Each rank maps the memory of all others (CUDA IPC), and a kernel on each writes there what it brings. Ranks may share a device, which
NCCL refuses: then the kernels do all of it, large tensors too, and ranks wait for each other's turn on the device. On several hosts all
goes over NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from pelton.errors import EngineError
from pelton.parallel.communicator import Communicator, CommunicatorContext
from pelton.platform.compiling import launch
from pelton_platforms.device.meeting import all_told, meeting, this_host
from pelton_platforms.gpu.background_call import BackgroundCall
from pelton_platforms.gpu.nccl import NcclCommunicator
from pelton_platforms.gpu.peers import kernels

if TYPE_CHECKING:
    from torch import Tensor

NCCL_FROM_BYTES, NCCL_FROM_BYTES_OF_TWO = 1 << 19, 1 << 21
"""Tensors from here on go over NCCL, whose data does not travel with a flag in each word; collectives of two ranks from the second
on. On two H200s 1 MiB takes NCCL 23 us; 128 rows of 8 KiB are summed, added and normed in 11.7 (docs/parallelism.md). Each of three
ranks has twice as much to send, and so on. Sums with a norm of two ranks have no bound (`add_norm.py`)."""
_LOOKS_S = (
    4_000_000  # how often a kernel looks in a second, at most about: who waits in vain is told so after 60 s or later
)
DTYPES: dict[torch.dtype, Any] = {
    torch.float32: kernels.tl.float32,
    torch.bfloat16: kernels.tl.bfloat16,
    torch.float16: kernels.tl.float16,
}


class PeerCommunicator(Communicator):
    def __init__(self, context: CommunicatorContext) -> None:
        super().__init__(context)
        self._what = f"rank {self.rank} of {self.size} in group {context.group!r}"
        self.device, self.limit = context.device, int(min(context.timeout_s * self.looks_a_second(), 2**31 - 1))
        self.nccl_from_bytes = max(NCCL_FROM_BYTES, NCCL_FROM_BYTES_OF_TWO // max(self.size - 1, 1))
        self._nccl: BackgroundCall[NcclCommunicator | None] | None = None
        self._is_near = True
        self.kept: dict[Any, Any] = {}
        """What others keep for all layers: memory for rows."""
        if self.size == 1:
            return
        self._store = store = dist.PrefixStore(f"peers {context.group}", meeting(context.store, context.size))
        try:
            self._meet(context, store)
        except RuntimeError as error:
            raise EngineError(f"Communication fails at {self._what}: the meeting of all ranks: {error}") from error

    def _meet(self, context: CommunicatorContext, store: dist.Store) -> None:
        BackgroundCall.wait_for_last()  # NCCL of another group of these ranks
        here, device = this_host("/dev/shm"), self.device_name()
        places = all_told(store, self.rank, self.size, "place", here + b" " + device)
        self._is_near = all(place.startswith(here + b" ") for place in places)
        if self._is_near:
            self._open(store)
        if len(set(places)) == self.size:
            self._nccl = BackgroundCall(lambda: self.make_nccl(context))
        elif not self._is_near:
            raise EngineError(
                f"{self._what}: some ranks share a device and others are on another host. Give each a device of its own."
            )

    def _open(self, store: dist.Store) -> None:
        counts = all_told(store, self.rank, self.size, "multiprocessors", str(self.multiprocessors()).encode())
        self.num_multiprocessors = min(int(count) for count in counts)
        """Of the smallest device."""
        self._peers = self.map_memory(store, kernels.memory_words(self.size))
        self._addresses = self._addresses_of(self._peers)
        self._calls = torch.zeros(kernels.PROGRAMS, dtype=torch.int32, device=self.device)
        self._sent, self._received = (
            torch.zeros(self.size, kernels.PROGRAMS, dtype=torch.int32, device=self.device) for _ in range(2)
        )
        self.failed = torch.zeros(1, dtype=torch.int32, pin_memory=self.device.type != "cpu")
        """A kernel sets it that has waited in vain."""
        self._has_failed = self.failed.numpy()
        self.synchronize()
        all_told(store, self.rank, self.size, "open", b"")  # nobody writes to memory that is still being cleared

    def _addresses_of(self, peers: Sequence[Tensor]) -> Tensor:
        return torch.tensor([peer.data_ptr() for peer in peers], dtype=torch.int64, device=self.device)

    def open_memory(self, name: str, count: int) -> tuple[list[Tensor], Tensor] | None:
        """Map [count] int64 of each rank, all zeros at first, for kernels of others: tensors and their addresses [size]. Every rank asks
        for it at the same time. None: some ranks are on another host, or there is one."""
        if self.size == 1 or not self._is_near:
            return None
        store = dist.PrefixStore(name, self._store)
        peers = self.map_memory(store, count)
        addresses = self._addresses_of(peers)
        self.synchronize()
        all_told(store, self.rank, self.size, "open", b"")
        return peers, addresses

    # What a device does its own way; tests run the kernels on the host.

    def looks_a_second(self) -> int:
        return _LOOKS_S

    def device_name(self) -> bytes:
        return str(torch.cuda.get_device_properties(self.device).uuid).encode()

    def multiprocessors(self) -> int:
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def make_nccl(self, context: CommunicatorContext) -> NcclCommunicator | None:
        return NcclCommunicator(context)

    def map_memory(self, store: dist.Store, count: int) -> list[Tensor]:
        """Return [count] int64 of each rank, in order of rank, all zeros at first."""
        with torch.cuda.device(self.device):
            own = torch.zeros(count, dtype=torch.int64, device=self.device)
            torch.cuda.synchronize()
            handles = all_told(
                store, self.rank, self.size, "memory", msgspec.msgpack.encode(own.untyped_storage()._share_cuda_())
            )  # type: ignore[attr-defined]
            peers = []
            for rank, handle in enumerate(handles):
                if rank == self.rank:
                    peers.append(own)
                    continue
                # Opened as this rank's device, which the mapping is for, whichever holds the memory.
                given = [self.device.index, *msgspec.msgpack.decode(handle)[1:]]
                storage = torch.UntypedStorage._new_shared_cuda(*given)  # type: ignore[attr-defined]
                peers.append(torch.empty(0, dtype=torch.int64, device=self.device).set_(storage, 0, (count,)))
            return peers

    # Collectives.

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self.size == 1 or not tensor.numel():
            return tensor
        if (nccl := self._large(tensor)) is not None:
            return nccl.all_reduce(tensor)
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            return self._gathered(tensor).sum(0)
        words = _words(tensor)
        found = words if words.data_ptr() == tensor.data_ptr() else torch.empty_like(words)
        self._exchange(words, found, dtype)
        return tensor if found is words else _numbers(found, tensor)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        if self.size == 1:
            return tensor
        if (nccl := self._large(tensor)) is not None:
            return nccl.all_gather(tensor, dim)
        gathered = self._gathered(tensor)
        return gathered.flatten(0, 1) if dim == 0 and tensor.dim() else torch.cat(gathered.unbind(), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int = -1) -> Tensor:
        if tensor.shape[dim] % self.size:
            raise EngineError(
                f"reduce_scatter of {list(tensor.shape)} along {dim}: it does not divide by {self.size} ranks."
            )
        if self.size == 1:
            return tensor
        if (nccl := self._large(tensor)) is not None:
            return nccl.reduce_scatter(tensor, dim)
        return self.all_reduce(tensor.clone()).chunk(self.size, dim)[self.rank].contiguous()

    def all_to_all(self, tensor: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        if self.size == 1:
            return tensor
        if (nccl := self.nccl) is not None:
            return nccl.all_to_all(tensor, send_counts, recv_counts)
        found = tensor.new_empty(sum(recv_counts), *tensor.shape[1:])
        sources, targets = tensor.contiguous().split(list(send_counts)), found.split(list(recv_counts))
        targets[self.rank].copy_(sources[self.rank])
        # Pair after pair, all ranks in one order, the lower one sends first: nobody waits for somebody who waits.
        for low in range(self.size):
            for high in range(low + 1, self.size):
                for source, target in ((low, high), (high, low)):
                    if self.rank == source and sources[target].numel():
                        self.send(sources[target], target)
                    elif self.rank == target and targets[source].numel():
                        self.recv(targets[source], source)
        return found

    def swap(self, tensor: Tensor) -> Tensor:
        if self.size == 1:
            return tensor
        if self._large(tensor) is not None:
            return super().swap(tensor)
        return self._gathered(tensor)[:, self.rank].contiguous()

    def send(self, tensor: Tensor, to: int) -> None:
        if (nccl := self._large(tensor, NCCL_FROM_BYTES)) is not None:
            nccl.send(tensor, to)
        elif tensor.numel():
            words = _words(tensor)
            self._move(words, words, self._sent, to, sends=True)

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        if (nccl := self._large(tensor, NCCL_FROM_BYTES)) is not None:
            return nccl.recv(tensor, source)
        if tensor.numel():
            found = torch.empty_like(_words(tensor))
            self._move(found, found, self._received, source, sends=False)
            tensor.copy_(_numbers(found, tensor))
        return tensor

    def shutdown(self) -> None:
        if self._nccl is not None and self._nccl.has_succeeded and (nccl := self.nccl) is not None:
            nccl.shutdown()

    @property
    def nccl(self) -> NcclCommunicator | None:
        """None: the ranks share devices, or there is one. Waits until it is made: half a second on two H200s, beside the model's layers."""
        return None if self._nccl is None else self._nccl.result()

    def _large(self, tensor: Tensor, from_bytes: int | None = None) -> NcclCommunicator | None:
        """Return who moves tensors of this size; None: the kernels do."""
        if not self._is_near or tensor.numel() * tensor.element_size() >= (from_bytes or self.nccl_from_bytes):
            return self.nccl
        return None

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Return [ranks, *shape]."""
        tensor = tensor.contiguous()
        if not tensor.numel():
            return tensor.new_empty(self.size, *tensor.shape)
        words = _words(tensor)
        found = words.new_empty(self.size, words.numel())
        self._exchange(words, found, None)
        numbers = found.view(torch.uint8)[:, : tensor.numel() * tensor.element_size()]
        return numbers.contiguous().view(tensor.dtype).view(self.size, *tensor.shape)

    def _exchange(self, words: Tensor, found: Tensor, dtype: Any) -> None:
        self.check()
        launch(
            kernels.exchange_kernel, (_programs(words),), words, found, self._addresses, self._calls, self.failed,
            words.numel(), self.limit, RANK=self.rank, SIZE=self.size, WORDS=kernels.WORDS, SLOTS=kernels.SLOTS, DTYPE=dtype,
        )  # fmt: skip

    def _move(self, given: Tensor, found: Tensor, counts: Tensor, other: int, *, sends: bool) -> None:
        self.check()
        launch(
            kernels.move_kernel, (_programs(given),), given, found, self._addresses, counts, self.failed, given.numel(),
            self.limit, other, SENDS=sends, RANK=self.rank, SIZE=self.size, WORDS=kernels.WORDS, SLOTS=kernels.SLOTS, AHEAD=kernels.AHEAD,
            PROGRAMS=kernels.PROGRAMS,
        )  # fmt: skip

    def check(self) -> None:
        """Raise `EngineError` where a kernel has waited in vain for another rank. Called before each launch of a kernel that waits for
        others: none runs while NCCL is made, which may wait for the device."""
        if BackgroundCall.last is not None:
            BackgroundCall.wait_for_last()
        if self._has_failed[0]:
            raise EngineError(f"Communication fails at {self._what}: another rank did not come in time.")


def _programs(words: Tensor) -> int:
    return min(-(-words.numel() // kernels.WORDS), kernels.PROGRAMS)


def _words(tensor: Tensor) -> Tensor:
    """View the tensor as flat int32, or a copy of it, filled up with zeros, where its bytes are no whole words."""
    data = tensor.reshape(-1).view(torch.uint8)
    rest = -data.numel() % 4
    if rest or data.data_ptr() % 4:
        data = torch.cat([data, data.new_zeros(rest)])
    return data.view(torch.int32)


def _numbers(words: Tensor, like: Tensor) -> Tensor:
    data = words.view(torch.uint8)[: like.numel() * like.element_size()]
    return data.view(like.dtype).view(like.shape)
