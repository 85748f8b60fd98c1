"""The communicator: each message is a file in a folder named after the store, read by the rank whose name it has."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pelton.errors import EngineError
from pelton.parallel.communicator import Communicator, CommunicatorContext

if TYPE_CHECKING:
    from torch import Tensor


class SkeletonCommunicator(Communicator):
    """Everything is made of `send` and `recv`: correct, and slow. Replace them with what your device has."""

    def __init__(self, context: CommunicatorContext) -> None:
        super().__init__(context)
        os.close(os.open(context.store, os.O_CREAT | os.O_RDWR, 0o600))
        store = os.stat(context.store)  # it may have no name of its own
        self._folder = Path(tempfile.gettempdir(), f"pelton-{store.st_dev}-{store.st_ino}-{context.group}")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._timeout_s = context.timeout_s
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self.all_reduce(torch.zeros(1))  # waits for all ranks

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._sum(self._gather(tensor))

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._gather(tensor), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return self._sum([part.chunk(self.size, dim)[self.rank] for part in self._gather(tensor)])

    def all_to_all(self, tensor: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        parts = tensor.split(list(send_counts))
        for rank in self._others():
            self.send(parts[rank], rank)
        found = [tensor.new_empty(count, *tensor.shape[1:]) for count in recv_counts]
        return torch.cat(
            [parts[rank] if rank == self.rank else self.recv(found[rank], rank) for rank in range(self.size)]
        )

    def send(self, tensor: Tensor, to: int) -> None:
        file = self._file(self.rank, to, self._sent[to])
        self._sent[to] += 1
        whole = file.with_suffix(".part")
        whole.write_bytes(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        os.replace(whole, file)  # seen as a whole, or not at all

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        file = self._file(source, self.rank, self._received[source])
        self._received[source] += 1
        deadline = time.monotonic() + self._timeout_s
        while not file.exists():
            if time.monotonic() > deadline:
                raise EngineError(f"Rank {self.rank} waited {self._timeout_s:.0f} s for rank {source}.")
            time.sleep(0.0005)
        data = bytearray(file.read_bytes())
        file.unlink()
        if data:
            tensor.copy_(torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape))
        return tensor

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        for rank in self._others():
            self.send(tensor, rank)
        return [tensor if rank == self.rank else self.recv(torch.empty_like(tensor), rank) for rank in range(self.size)]

    def _sum(self, parts: Sequence[Tensor]) -> Tensor:
        """In order of rank, so that every rank has the same bits."""
        wide = torch.float32 if parts[0].dtype.is_floating_point else parts[0].dtype
        return torch.stack([part.to(wide) for part in parts]).sum(0).to(parts[0].dtype)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _file(self, source: int, target: int, number: int) -> Path:
        return self._folder / f"{source}-{target}-{number}"
