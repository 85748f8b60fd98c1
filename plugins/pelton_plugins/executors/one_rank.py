"""The communicator of a worker that is alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pelton.errors import EngineError
from pelton.parallel.communicator import Communicator

if TYPE_CHECKING:
    from torch import Tensor


class OneRank(Communicator):
    """The communicator of a rank that is alone: what comes in goes out."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return tensor

    def reduce_scatter(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return tensor

    def all_to_all(self, tensor: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        return tensor

    def send(self, tensor: Tensor, to: int) -> None:
        raise EngineError(f"send to rank {to}: this rank is the only one.")

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        raise EngineError(f"recv from rank {source}: this rank is the only one.")
