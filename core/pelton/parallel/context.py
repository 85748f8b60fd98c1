"""This rank's place among the ranks that share one model, and the collectives between them.

With one rank every collective is the identity. An executor that spreads a model over devices hands the
worker a subclass over its process group; layers ask only for `rank`, `size` and these methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pelton.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.parallel.communicator import Communicator


class ParallelContext:
    """Tensor parallelism: `size` ranks, each with a slice of every layer. stages: the ranks of pipeline parallelism that this one belongs
    to, each with some of the layers, in their order; None where one has them all. context: the ranks of decode context parallelism
    that this one belongs to, which share the KV cache of the same heads token by token; None where each keeps all tokens."""

    context: Communicator | None = None

    experts: Any = None
    """Between the engines that share their experts, a `TokenExchange`; None where each has all of them."""

    def __init__(self, rank: int = 0, size: int = 1, stages: Communicator | None = None) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"Tensor-parallel rank is {rank} of {size}; use 0 to {size - 1}.")
        self.rank = rank
        self.size = size
        self.stages = stages

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks; may reuse `tensor`'s memory."""
        self._needs_group("all_reduce")
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Concatenation over ranks along `dim`, in order of rank."""
        self._needs_group("all_gather")
        return tensor

    def share(self, total: int, what: str) -> int:
        """This rank's part of `total` things that must divide evenly."""
        if total % self.size:
            raise ConfigError(
                f"{what} is {total}, which does not divide by tensor_parallel_size {self.size}. Use a size that divides it."
            )
        return total // self.size

    def check_copies(self, num_kv_heads: int) -> None:
        """Raises `ConfigError` where the ranks of `context` do not hold the same key heads, of `num_kv_heads` in all."""
        copies = self.size // num_kv_heads
        if self.context is not None and (copies == 0 or copies % self.context.size):
            raise ConfigError(
                f"decode_context_parallel_size is {self.context.size}; of {num_kv_heads} key heads tensor_parallel_size {self.size} "
                f"keeps {copies or 1} {'copies' if copies > 1 else 'copy'} each. Use a size that divides the number of copies."
            )

    def _needs_group(self, name: str) -> None:
        if self.size > 1:
            raise ConfigError(
                f"{name} over {self.size} ranks needs a process group, and this executor made none. "
                "Use tensor_parallel_size 1, or an executor that runs several workers."
            )
