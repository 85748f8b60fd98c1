"""The one table of sampling parameters that have a value for each request: name, dtype, neutral value, how it is read.

From it are made the columns of the batch on the device and on the host, what the sampler reads of a step, and the tensors of
`sample` ops, in the table's order. CONTRIBUTING.md says what else a new parameter needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pelton.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingColumn:
    """One parameter."""

    name: str
    dtype: str
    """float32 or int64."""
    neutral: float | None
    """The value with which it does nothing; None: the vocabulary's size."""
    read: Callable[[SamplingParams, int], float]
    """From a request's parameters and the vocabulary's size."""

    def neutral_value(self, vocab_size: int) -> float:
        return vocab_size if self.neutral is None else self.neutral


SAMPLING_COLUMNS = (
    # A temperature of 0 is greedy, so "neutral": no token is drawn.
    SamplingColumn("temperature", "float32", 0.0, lambda params, _: 0.0 if params.is_greedy else params.temperature),
    SamplingColumn("top_k", "int64", None, lambda params, vocab: params.top_k if 0 < params.top_k < vocab else vocab),
    SamplingColumn("top_p", "float32", 1.0, lambda params, _: params.top_p),
    SamplingColumn("min_p", "float32", 0.0, lambda params, _: params.min_p),
)
INTEGER_COLUMNS = tuple(column for column in SAMPLING_COLUMNS if column.dtype == "int64")
FLOAT_COLUMNS = tuple(column for column in SAMPLING_COLUMNS if column.dtype == "float32")
RANDOM = "temperature"
"""Rows whose value here is neutral are greedy: no other column is read for them."""


class SamplingTensors:
    """Where the columns lie on the device. The properties are names of old; what is new is read by its name."""

    sampling: dict[str, Tensor]
    """[S + 1] of each column, in the table's order."""

    @property
    def temperature(self) -> Tensor:
        return self.sampling["temperature"]

    @property
    def top_k(self) -> Tensor:
        return self.sampling["top_k"]

    @property
    def top_p(self) -> Tensor:
        return self.sampling["top_p"]

    @property
    def min_p(self) -> Tensor:
        return self.sampling["min_p"]


def host_columns(rows: int, vocab_size: int) -> dict[str, npt.NDArray[Any]]:
    """[rows] of each column, neutral."""
    return {
        column.name: np.full(rows, column.neutral_value(vocab_size), dtype=column.dtype) for column in SAMPLING_COLUMNS
    }


def active_columns(
    host: Mapping[str, npt.NDArray[Any]], rows: npt.NDArray[Any], vocab_size: int
) -> tuple[frozenset[str], int]:
    """(columns in which some of these rows that is not greedy has a value of its own, largest top_k below `vocab_size`)."""
    drawn = rows[host[RANDOM][rows] != 0]
    active = frozenset(
        column.name
        for column in SAMPLING_COLUMNS
        if (host[column.name][drawn] != column.neutral_value(vocab_size)).any()
    )
    top_k = host["top_k"][drawn] if "top_k" in active else drawn[:0]
    return active, int(top_k[top_k < vocab_size].max(initial=0))


def columns_of(params: Sequence[SamplingParams], vocab_size: int) -> tuple[dict[str, Tensor], frozenset[str], int]:
    """For a worker without a `BatchState`: the columns of some rows' parameters, and what `active_columns` says of them."""
    host = host_columns(len(params), vocab_size)
    for column in SAMPLING_COLUMNS:
        host[column.name][:] = [column.read(one, vocab_size) for one in params]
    active, max_top_k = active_columns(host, np.arange(len(params)), vocab_size)
    return {name: torch.from_numpy(values) for name, values in host.items()}, active, max_top_k
