"""`NcclCommunicator`: collectives of GPU tensors over NCCL (RCCL with ROCm), each rank with a device of its own.

Its process group is its own: torch's global one is left alone. Calls end on the device, in the order of the current stream; they may be
captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pelton.errors import EngineError
from pelton.parallel.communicator import Communicator, CommunicatorContext
from pelton.platform.compiling import compile_only
from pelton_platforms.device.meeting import meeting

if TYPE_CHECKING:
    from torch import Tensor

_ROUNDED = (torch.float16, torch.bfloat16)


class NcclCommunicator(Communicator):
    def __init__(self, context: CommunicatorContext) -> None:
        super().__init__(context)
        self._what = f"rank {self.rank} of {self.size} in group {context.group!r}"
        self._group: Any = None
        if self.size == 1:
            return
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=context.timeout_s)
        store = dist.PrefixStore(f"nccl {context.group}", meeting(context.store, context.size))
        store.set_timeout(options._timeout)
        with torch.cuda.device(context.device):
            try:
                self._group = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
                # NCCL meets at the first call: here, where a missing rank is an error and nothing is captured.
                self._group.allreduce([torch.zeros(1, device=context.device)]).wait()
                torch.cuda.synchronize()
            except RuntimeError as error:
                raise EngineError(
                    f"Communication fails at {self._what}: NCCL's meeting: {_first_line(error)}"
                ) from error

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self.size == 1 or not tensor.numel():
            return tensor
        if self.size > 2 and tensor.dtype in _ROUNDED:  # NCCL rounds at every hop
            flat = tensor.view(-1)
            rest = -flat.numel() % self.size
            whole = torch.cat([flat, flat.new_zeros(rest)]) if rest else flat
            return self.all_gather(self.reduce_scatter(whole, 0), 0)[: flat.numel()].view(tensor.shape)
        self._run("all_reduce", lambda: self._group.allreduce([tensor]))
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        if self.size == 1:
            return tensor
        gathered = tensor.new_empty(self.size, *tensor.shape)
        if tensor.numel():
            source = tensor.contiguous()
            self._run("all_gather", lambda: self._group._allgather_base(gathered.view(-1), source.view(-1)))
        return torch.cat(gathered.unbind(), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int = -1) -> Tensor:
        if tensor.shape[dim] % self.size:
            raise EngineError(
                f"reduce_scatter of {list(tensor.shape)} along {dim}: it does not divide by {self.size} ranks."
            )
        parts = torch.stack(tensor.chunk(self.size, dim))
        mine = self.all_to_all(parts, [1] * self.size, [1] * self.size)
        wide = torch.float32 if tensor.dtype in _ROUNDED else tensor.dtype
        return mine.to(wide).sum(0).to(tensor.dtype)

    def all_to_all(self, tensor: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        if self.size == 1:
            return tensor
        found = tensor.new_empty(sum(recv_counts), *tensor.shape[1:])
        source, sent, received = tensor.contiguous(), list(send_counts), list(recv_counts)
        self._run("all_to_all", lambda: self._group.alltoall_base(found, source, received, sent))
        return found

    def send(self, tensor: Tensor, to: int) -> None:
        if tensor.numel():
            self._run(f"send to {to}", lambda: self._group.send([tensor], to, 0))

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        if tensor.numel():
            self._run(f"recv from {source}", lambda: self._group.recv([tensor], source, 0))
        return tensor

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _run(self, what: str, begin: Any) -> None:
        if compile_only.get():  # other ranks may have nothing to compile, and go through fewer steps
            return
        try:
            begin().wait()  # the current stream waits, not the host
        except RuntimeError as error:
            raise EngineError(f"Communication fails at {self._what}: {what}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
