"""Interface of a weight loader, and the weights it hands to a model.

A model asks for nothing: the loader walks a checkpoint once, in file order, and gives (name, weight)
pairs under Hugging Face names. A weight is lazy: only the rows or columns that this rank keeps are read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pelton.config import EngineConfig
from pelton.model.resolved import ResolvedModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pelton.parallel.context import ParallelContext


class LazyWeight(ABC):
    """One tensor of a checkpoint, not read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None  # None: not known before it is read

    @abstractmethod
    def read(self, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        """The tensor, or its slice [start, stop) along `dim`, on the CPU, in the checkpoint's dtype. May be a view of a
        memory-mapped file: copy it into place, do not keep it."""

    def fill(self, target: Tensor, dim: int | None = None, start: int = 0, stop: int | None = None) -> bool:
        """Put what `read` would give into `target` without a detour over the host, where this weight can do that. False,
        with `target` untouched, where it cannot: it is read and copied then."""
        return False

    def fill_later(self, target: Tensor, dim: int | None = None, start: int = 0, stop: int | None = None) -> bool:
        """As `fill`, but `target` may be filled as late as when `WeightLoader.weights` ends."""
        return self.fill(target, dim, start, stop)


class WeightLoader(ABC):
    """Chosen by --load-format or the checkpoint's form; one per worker. `parallel` is set before anything is called."""

    parallel: ParallelContext | None = None

    @abstractmethod
    def __init__(self, config: EngineConfig, model: ResolvedModel) -> None: ...

    def expect(self, expected: Mapping[str, tuple[int, ...]]) -> None:  # noqa: B027
        """Take the names that the model will read, by checkpoint name, told before `weights`: for loaders that make weights up."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, LazyWeight]]:
        """Every tensor once. Raises `ConfigError` naming the file when one is missing or broken."""

    @property
    @abstractmethod
    def total_bytes(self) -> int:
        """For progress; 0 when not known."""
