"""Interface of a communicator: collectives between the ranks that share a model, one process each.

A plugin offers one for a device type through the hook `pelton_communicators`. An executor that runs several workers makes one in
each (`make_communicator`), and hands it to its worker as `WorkerContext.parallel` (`GroupContext`). A worker that is alone has one, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pelton.parallel.context import ParallelContext
from pelton.plugins import Plugins, make

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pelton.config import EngineConfig


HOOK = "pelton_communicators"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorContext:
    """Everything that a communicator is made from, in each rank. A new feature is a new field with a default."""

    rank: int
    size: int
    device: torch.device
    store: str
    """A file that all ranks see and nobody else may write, where they find each other: made by the first, left to the executor. For ranks
    of several hosts tcp://host:port, of a `torch.distributed.TCPStore`."""
    group: str = "tp"
    """Told apart in the store from other groups of the same ranks."""
    timeout_s: float = 60.0
    engine_config: EngineConfig | None = None
    """All settings, for `read_settings`; None in tests of a communicator alone."""


class Communicator(ABC):
    """All ranks call the same methods with tensors of the same shape and dtype, in one order, from one thread each, which may be another
    one than made it; `send` and `recv` pair up. Tensors are contiguous and on the context's device. Results have the same bits on every
    rank that gets them.
    What cannot be done in `timeout_s`, since a rank is gone, raises `EngineError`; where the device computes behind the host, the
    next call does. Making one waits for all ranks.
    """

    def __init__(self, context: CommunicatorContext) -> None:
        self.rank, self.size = context.rank, context.size

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks; may reuse `tensor`'s memory. float16 and bfloat16 are rounded once, after the sum."""

    @abstractmethod
    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Concatenate over ranks along `dim`, in order of rank."""

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Sum over ranks, of which rank r gets the r-th of `size` equal parts along `dim`."""

    @abstractmethod
    def all_to_all(self, tensor: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        """Send `send_counts[r]` rows of `tensor` [sum(send_counts), ...] to rank r, one part after another; returns the
        `recv_counts[r]` rows that came from each rank r, in order of rank. A count may be 0."""

    def swap(self, tensor: Tensor) -> Tensor:
        """Send `tensor[r]` of [size, ...] to each rank r; returns what came from each, in order of rank."""
        counts = [1] * self.size
        return self.all_to_all(tensor, counts, counts)

    @abstractmethod
    def send(self, tensor: Tensor, to: int) -> None:
        """Send to another rank. Returns before it was taken, of a few at least; `tensor` may be written afterwards."""

    @abstractmethod
    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """Fill `tensor` with what rank `source` sends next, and return it."""

    def shutdown(self) -> None:  # noqa: B027
        """Let go of the connections. Called once, without waiting for other ranks."""


class GroupContext(ParallelContext):
    """This rank's place in a communicator's group: what layers ask."""

    def __init__(self, communicator: Communicator, stages: Communicator | None = None) -> None:
        super().__init__(communicator.rank, communicator.size, stages)
        self.communicator = communicator

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self.communicator.all_reduce(tensor)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return self.communicator.all_gather(tensor, dim)


def make_communicator(
    plugins: Plugins, context: CommunicatorContext, device_type: str, name: str | None = None
) -> Communicator:
    """Make the communicator of this name, or the best by priority that plugins offer for the device type. Raises `ConfigError`
    that lists those there are."""
    offered = plugins.entries(HOOK, device_type=device_type)
    wanted = name or (offered[0].name if offered else "any")
    entry = plugins.find(HOOK, wanted, setting=f"communicator for {device_type!r}", device_type=device_type)
    return make(entry, Communicator, context)  # type: ignore[type-abstract]
