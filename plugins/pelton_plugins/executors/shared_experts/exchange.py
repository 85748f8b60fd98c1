"""`EngineExchange`: tokens of one engine on their way to the experts that other engines have, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pelton.errors import EngineDeadError, EngineError

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.parallel.communicator import Communicator


class EngineExchange:
    """Over the ranks at the same place of each engine. Between `open` and `close` all of them enter every layer once, in order. Otherwise
    (the memory profile, warm-up) nobody else is there, and this engine's tokens stand for those of all.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self._communicator = communicator
        self._layers: list[Callable[[], object]] = []
        self._most_rows: int | None = None  # None: nobody else is there
        self.rows: Sequence[int] = ()
        self.num_swapped = 0  # layers that were entered by `swap`
        self._num_entered = 0

    def add_layer(self, join: Callable[[], object]) -> None:
        self._layers.append(join)

    def open(self, rows: Sequence[int]) -> None:
        """All enter the layers now, each engine with so many tokens at most."""
        self.rows, self._most_rows, self._num_entered = rows, max(rows), 0

    def close(self) -> None:
        """Enter the layers that are left without tokens: all of them where this engine had no step, the rest where its step failed."""
        try:
            while self._most_rows and self._num_entered < len(self._layers):
                self._layers[self._num_entered]()
        finally:
            self.rows, self._most_rows = (), None

    def gather(self, rows: Tensor) -> Tensor:
        most = self._most_rows
        if most is None:
            return rows.repeat(self.size, 1)
        self._enter(len(rows), most)
        if len(rows) < most:
            padded = rows.new_zeros(most, rows.shape[1])
            padded[: len(rows)] = rows
            rows = padded
        try:
            return self._communicator.all_gather(rows, 0)
        except EngineError as error:
            raise EngineDeadError(str(error)) from error

    def swap(
        self, rows: Tensor, counts: Sequence[int], back: Sequence[int] | None = None
    ) -> tuple[Tensor, Sequence[int]]:
        import torch

        try:
            if back is None:
                self._enter(max(counts), self._most_rows or 0)
                self.num_swapped += 1
                back = self._communicator.swap(torch.tensor(counts)).tolist()
            return self._communicator.all_to_all(rows, counts, back), back
        except EngineError as error:
            raise EngineDeadError(str(error)) from error

    def _enter(self, num_rows: int, most: int) -> None:
        if num_rows > most or (most and self._num_entered == len(self._layers)):
            raise EngineError(
                f"Layer of experts {self._num_entered} of {len(self._layers)} is entered with {num_rows} tokens; this step has {most}."
            )
        self._num_entered += 1

    def scatter(self, rows: Tensor, num_rows: int) -> Tensor:
        if self._most_rows is None:
            return rows[:num_rows]
        try:
            return self._communicator.reduce_scatter(rows, 0)[:num_rows]
        except EngineError as error:
            raise EngineDeadError(str(error)) from error
