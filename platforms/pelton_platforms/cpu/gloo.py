"""`GlooCommunicator`: collectives of CPU tensors between processes of this host, over torch's gloo.

Its process group is its own: torch's global one is left alone. Ranks of one host listen on the loopback device, and find each other through
a file; those of several find each other through a store that the executor has at a TCP address.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import socket
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from pelton.errors import EngineError
from pelton.graphs.recordable import launch, recording
from pelton.parallel.communicator import Communicator, CommunicatorContext
from pelton_platforms.device.meeting import TCP, meeting

if TYPE_CHECKING:
    from torch import Tensor

WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""What sums of a dtype are computed in, where not in itself."""
_MOST_SENT = 4
"""Tensors on their way to one rank, for each rank of the group: with more the sender waits until the oldest was taken."""


def _shut_down(reference: weakref.ref[GlooCommunicator]) -> None:
    communicator = reference()
    if communicator is not None:
        communicator.shutdown()


class GlooCommunicator(Communicator):
    def __init__(self, context: CommunicatorContext) -> None:
        super().__init__(context)
        self._group_name, self._timeout = context.group, timedelta(seconds=context.timeout_s)
        self._group: Any = None
        self._sent: defaultdict[int, deque[tuple[Any, Tensor]]] = defaultdict(deque)  # by who has to take it
        with self._naming("the meeting of all ranks"):
            store = self._store = dist.PrefixStore(  # type: ignore[attr-defined]
                context.group, meeting(context.store, context.size)
            )
            store.set_timeout(self._timeout)
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [_device(context.store)]
            options._timeout = self._timeout
            self._group = dist.ProcessGroupGloo(store, context.rank, context.size, options)
        # A group that is there when the process ends takes it down: its threads still run.
        atexit.register(_shut_down, weakref.ref(self))

    # Those that models call: where a step is recorded, so are they, as calls on the addresses of their memory.

    def all_reduce(self, tensor: Tensor) -> Tensor:
        wide = tensor.to(WIDE.get(tensor.dtype, tensor.dtype))
        if wide.numel():
            launch(self._reduce_at, wide.data_ptr(), wide.numel(), wide.dtype)
        return wide.to(tensor.dtype)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        tensor = tensor.contiguous()
        gathered = torch.empty(self.size, *tensor.shape, dtype=tensor.dtype)
        if tensor.numel():
            launch(self._gather_at, gathered.data_ptr(), tensor.data_ptr(), tensor.numel(), tensor.dtype)
        return torch.cat(gathered.unbind(), dim)

    def send(self, tensor: Tensor, to: int) -> None:
        if tensor.numel():
            launch(self._send_at, tensor.data_ptr(), tensor.numel(), tensor.dtype, to)

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        if tensor.numel():
            launch(self._recv_at, tensor.data_ptr(), tensor.numel(), tensor.dtype, source)
        return tensor

    def _reduce_at(self, address: int, count: int, dtype: torch.dtype) -> None:
        self._wait("all_reduce", lambda: self._group.allreduce([tensor_at(address, count, dtype)]))

    def _gather_at(self, target: int, source: int, count: int, dtype: torch.dtype) -> None:
        parts = list(tensor_at(target, count * self.size, dtype).view(self.size, count).unbind())
        self._wait("all_gather", lambda: self._group.allgather([parts], [tensor_at(source, count, dtype)]))

    def reduce_scatter(self, tensor: Tensor, dim: int = -1) -> Tensor:
        if tensor.shape[dim] % self.size:
            raise EngineError(
                f"reduce_scatter of {list(tensor.shape)} along {dim}: it does not divide by {self.size} ranks."
            )
        # Added up in order of rank by whom the part is for: every rank computes each number once.
        parts = torch.stack(tensor.chunk(self.size, dim))
        mine = self.all_to_all(parts, [1] * self.size, [1] * self.size)
        return mine.to(WIDE.get(tensor.dtype, tensor.dtype)).sum(0).to(tensor.dtype)

    def all_to_all(self, tensor: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        tensor, row = tensor.contiguous(), math.prod(tensor.shape[1:])
        found = torch.empty(sum(recv_counts), *tensor.shape[1:], dtype=tensor.dtype)
        sent, received = ([row * count for count in counts] for counts in (send_counts, recv_counts))
        if row:
            launch(self._swap_at, found.data_ptr(), tensor.data_ptr(), received, sent, tensor.dtype)
        return found

    def _swap_at(
        self, target: int, source: int, received: Sequence[int], sent: Sequence[int], dtype: torch.dtype
    ) -> None:
        """received, sent: numbers from and to each rank."""
        found, mine = tensor_at(target, sum(received), dtype), tensor_at(source, sum(sent), dtype)
        self._wait("all_to_all", lambda: self._group.alltoall_base(found, mine, list(received), list(sent)))

    def _send_at(self, address: int, count: int, dtype: torch.dtype, to: int) -> None:
        """gloo's send ends when the other side has taken it: a copy goes, and nobody waits, so that two ranks may send to each other."""
        sent = self._sent[to]
        with self._naming(f"send to {to}"), unseen():
            copy = tensor_at(address, count, dtype).clone()
            sent.append((self._group.send([copy], to, 0), copy))
            if len(sent) > _MOST_SENT * self.size:
                sent.popleft()[0].wait(self._timeout)

    def _recv_at(self, address: int, count: int, dtype: torch.dtype, source: int) -> None:
        self._wait(f"recv from {source}", lambda: self._group.recv([tensor_at(address, count, dtype)], source, 0))

    def shutdown(self) -> None:
        self._group = None

    def _wait(self, what: str, begin: Callable[[], Any]) -> None:
        with self._naming(what), unseen():
            begin().wait(self._timeout)

    def _naming(self, what: str) -> _Naming:
        return _Naming(f"rank {self.rank} of {self.size} in group {self._group_name!r}: {what}")


def _device(store: str) -> Any:
    """The loopback device for ranks of one host; else the one by which this host reaches the executor's."""
    if not store.startswith(TCP):
        return dist.ProcessGroupGloo.create_device(interface="lo")
    host, _, port = store.removeprefix(TCP).rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return dist.ProcessGroupGloo.create_device(hostname=probe.getsockname()[0])


def unseen() -> AbstractContextManager[Any]:
    """Around ops that a collective is made of: a recorder of torch's ops must not see them."""
    return nullcontext() if recording.get() is None else _disable_current_modes()


def tensor_at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """View the memory there as a flat tensor."""
    if not count:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count)


class _Naming:
    """Around a call into gloo: what it raises is an `EngineError` that says who waited for what."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            raise EngineError(f"Communication fails at {self._what}: {str(error).strip().splitlines()[0]}") from error
