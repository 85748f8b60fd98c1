"""Many rows by a matrix that is packed: it is decoded into memory, and multiplied as others are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from pelton_backends.triton.ops.linear.hopper_matmul import can_multiply_many, hopper_matmul, share_of_work
from pelton_backends.triton.ops.linear.large_batch import MIN_GATED_SHARE, MIN_ROWS, MIN_SHARE, gated
from pelton_backends.triton.runtime import num_sms

if TYPE_CHECKING:
    from torch import Tensor

NUMBERS_AT_ONCE = 2**27
"""Of a matrix: 256 MiB of two-byte numbers, in which gate and up of an 8B model are whole."""
ROWS_AT_ONCE = 64
"""Parts of a larger one are multiples of so many rows."""


class Decoder(Protocol):
    def __call__(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Rows of the matrix, in `dtype`."""
        ...


def multiply_decoded(
    x: Tensor, decoded: Decoder, out_features: int, bias: Tensor | None, activation: str | None
) -> Tensor:
    """x [T, K] -> x @ weight.T + bias [T, N], or activation(gate) * up of its halves."""
    in_features = x.shape[1]
    step = max(NUMBERS_AT_ONCE // in_features // ROWS_AT_ONCE, 1) * ROWS_AT_ONCE
    if step < out_features:
        out = torch.empty((len(x), out_features), dtype=x.dtype, device=x.device)
        for first in range(0, out_features, step):
            rows = slice(first, min(first + step, out_features))
            out[:, rows] = F.linear(x, decoded(rows, x.dtype), None if bias is None else bias[rows])
    else:
        weight = decoded(slice(0, out_features), x.dtype)
        share = share_of_work(len(x), out_features, in_features, num_sms(x.device), activation)
        least = MIN_SHARE if activation is None else MIN_GATED_SHARE
        is_readable = x.stride(0) % 8 == x.data_ptr() % 16 == 0
        if bias is None and is_readable and len(x) >= MIN_ROWS and share >= least and can_multiply_many(weight):
            return hopper_matmul(x, weight, activation)
        out = F.linear(x, weight, bias)
    return out if activation is None else gated(out, activation)
