"""The device's communicator: ranks of one host over a socket for each pair, the bytes of a tensor one after another.

Every rank knows what it gets next, so messages have no heads. A pair exchanges in the order of its ranks: the lower one writes first.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from pelton.errors import EngineError
from pelton.parallel.communicator import Communicator, CommunicatorContext

if TYPE_CHECKING:
    from torch import Tensor

WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""What sums of a dtype are computed in, where not in itself."""


class SocketCommunicator(Communicator):
    """A rank listens at a name without a file, made of the store and its number, until all higher ranks have come."""

    def __init__(self, context: CommunicatorContext) -> None:
        super().__init__(context)
        self._timeout_s = context.timeout_s
        self._peers: dict[int, socket.socket] = {}
        with self._naming("the meeting of all ranks"):
            os.close(os.open(context.store, os.O_CREAT | os.O_RDWR, 0o600))
            store = os.stat(context.store)  # it may have no name of its own
            self._meet(f"\0pelton-{store.st_dev}-{store.st_ino}-{context.group}")

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return _sum(self._gather(tensor))

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._gather(tensor), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int = -1) -> Tensor:
        parts = [part.contiguous() for part in tensor.chunk(self.size, dim)]
        return _sum(self._exchange(parts, [torch.empty_like(parts[self.rank]) for _ in parts]))

    def all_to_all(self, tensor: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        found = [tensor.new_empty(count, *tensor.shape[1:]) for count in recv_counts]
        return torch.cat(self._exchange(torch.split(tensor, list(send_counts)), found))

    def send(self, tensor: Tensor, to: int) -> None:
        with self._naming(f"send to {to}"):
            self._peers[to].sendall(_bytes(tensor))

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        with self._naming(f"recv from {source}"):
            _fill(self._peers[source], _bytes(tensor))
        return tensor

    def shutdown(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _meet(self, place: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(f"{place}.{self.rank}")
            door.listen(self.size)
            for rank in range(self.rank):
                self._peers[rank] = self._knock(f"{place}.{rank}", deadline)
            door.settimeout(self._timeout_s)
            for _ in range(self.rank + 1, self.size):
                peer, _ = door.accept()
                peer.settimeout(self._timeout_s)
                number = bytearray(2)
                _fill(peer, memoryview(number))
                self._peers[int.from_bytes(number)] = peer

    def _knock(self, place: str, deadline: float) -> socket.socket:
        while True:
            peer = socket.socket(socket.AF_UNIX)
            try:
                peer.connect(place)
            except ConnectionRefusedError:  # it does not listen yet
                peer.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
                continue
            peer.settimeout(self._timeout_s)
            peer.sendall(self.rank.to_bytes(2))
            return peer

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        return self._exchange([tensor.contiguous()] * self.size, [torch.empty_like(tensor) for _ in range(self.size)])

    def _exchange(self, parts: Sequence[Tensor], found: list[Tensor]) -> list[Tensor]:
        """Return what every rank has for this one, in order of rank, in the memory of `found`; part r is for rank r."""
        for rank in range(self.size):
            if rank == self.rank:
                found[rank] = parts[rank]
            elif self.rank < rank:
                self.send(parts[rank], rank)
                self.recv(found[rank], rank)
            else:
                self.recv(found[rank], rank)
                self.send(parts[rank], rank)
        return found

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EngineError(f"Communication fails at rank {self.rank} of {self.size}: {what}: {error}") from error


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """In order of rank, so that every rank has the same bits."""
    dtype = parts[0].dtype
    return torch.stack([part.to(WIDE.get(dtype, dtype)) for part in parts]).sum(0).to(dtype)


def _bytes(tensor: Tensor) -> memoryview:
    """The tensor's own memory; it is contiguous."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _fill(peer: socket.socket, target: memoryview) -> None:
    done = 0
    while done < len(target):
        count = peer.recv_into(target[done:])
        if not count:
            raise ConnectionError("it is gone")
        done += count
