"""Layers whose states read what a short convolution made of a step's tokens: one launch for it, then rows by their kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from pelton.attention.interface import BoundAttention
from pelton_backends.triton.states.conv import ShortConv

if TYPE_CHECKING:
    from torch import Tensor

    from pelton_backends.triton.states.backend import StateMetadata


class Step(Protocol):
    """Computes rows of one token, of the first `num_rows`, from what was convolved and from the query's columns behind that."""

    def __call__(self, convolved: Tensor, columns: Tensor, output: Tensor, /, *rows: Tensor, num_rows: int) -> None: ...


class Scan(Protocol):
    """The same of rows of any number of tokens, from `first_row` on."""

    def __call__(
        self, convolved: Tensor, columns: Tensor, output: Tensor, /, *rows: Tensor, num_reqs: int, first_row: int,
        skip_single: bool,
    ) -> None: ...  # fmt: skip


class RowStates(BoundAttention):
    """A layer's states: rows by their kind."""

    def __init__(self, layer: Any, *, step: Step, scan: Scan) -> None:
        super().__init__(layer)
        self._step, self._scan = step, scan

    def compute(self, convolved: Tensor, columns: Tensor, metadata: StateMetadata, output: Tensor) -> None:
        """Rows of padding are left as they are."""
        common = metadata.common
        rows = common.query_start_loc, common.seq_lens, common.block_table
        if metadata.single_rows:
            self._step(convolved, columns, output, *rows, num_rows=metadata.single_rows)
        if metadata.is_scanned:
            self._scan(
                convolved, columns, output, *rows, num_reqs=common.num_reqs, first_row=metadata.first_scanned_row,
                skip_single=metadata.is_mixed,
            )  # fmt: skip


class ConvolvedStates(RowStates):
    """A layer's convolution and states. Its query is [T, first + W + ...], of which W numbers are convolved."""

    def __init__(self, layer: Any, *, first: int, step: Step, scan: Scan, pdl: bool) -> None:
        super().__init__(layer, step=step, scan=scan)
        self._width = layer.conv_weight.shape[0]
        self._first, self._behind = first, first + self._width
        self._convolve = ShortConv(layer.conv_weight, layer.conv_bias, layer.conv_states, pdl=pdl)

    def __call__(self, query: Tensor, metadata: StateMetadata, output: Tensor) -> None:
        """query [T, ...] -> output [T, E]; rows of padding are left as they are"""
        projected, columns = query[:, self._first : self._behind], query[:, self._behind :]
        convolved, common = query.new_empty(len(query), self._width), metadata.common
        rows = common.query_start_loc, common.seq_lens, common.block_table
        self._convolve(projected, convolved, *rows, num_reqs=common.num_reqs, is_single=not metadata.is_scanned)
        self.compute(convolved, columns, metadata, output)
