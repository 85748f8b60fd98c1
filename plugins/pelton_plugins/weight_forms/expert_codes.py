"""Integer weights of experts: how their codes lie in memory. Scales, zero points and minima are words as `groups` has them.

8 bits   a byte a code, columns in order.
4 bits   blocks of 32 columns in 16 bytes: byte b has column b below column 16 + b.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32  # columns of 4 bits whose bytes lie together


def put_codes(codes: Tensor, target: Tensor) -> None:
    """codes [n, in], unsigned -> target [n, in] uint8, or [n, in / 2], which takes codes below 16."""
    numbers = codes.to(torch.uint8)
    if target.shape[1] < codes.shape[1]:
        halves = numbers.unflatten(1, (-1, 2, BLOCK // 2))
        numbers = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    target.copy_(numbers)
