"""The sampler that reads the logits which are computed next: where a mask allows few tokens, it needs no others."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

reader: ContextVar[tuple[Any, Tensor] | None] = ContextVar("pelton_native_reader", default=None)
"""Its struct, and the slots [n] of the rows of logits; None: all logits are wanted."""
