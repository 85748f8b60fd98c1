"""Rows of an embedding in C: plain, or in the panels into which a tied head brings it (`quant.py` has those of blocks)."""

from __future__ import annotations

from ctypes import Structure, byref
from typing import TYPE_CHECKING, ClassVar

import torch

from pelton.ops.interface import Embed, EmbedNeeds, EmbedTensors
from pelton_backends.native import library
from pelton_backends.native.library import DTYPES
from pelton_backends.native.linear import PANELS
from pelton_backends.native.linear_ops import HANDLES, refusals

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class NativeEmbed:
    handles = HANDLES
    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: EmbedNeeds) -> list[str]:
        if needs.weight_format != "plain":
            return [f"weight format {needs.weight_format!r}, only 'plain'"]
        return [f"tp_size {needs.tp_size}, only 1"] if needs.tp_size > 1 else refusals(needs)

    @staticmethod
    def bind(needs: EmbedNeeds, tensors: EmbedTensors) -> Embed:
        op = library.Embed(tensors.weight.data_ptr(), needs.hidden_size, scale_of(needs), DTYPES[needs.dtype], False)
        return PlainRows(needs, tensors, library.kernels(dtype=needs.dtype).embed, op)


class EmbeddingRows:
    """Rows of a matrix in any form: `run` takes the struct `op`."""

    def __init__(self, needs: EmbedNeeds, tensors: EmbedTensors, run: Callable[..., int], op: Structure) -> None:
        self.dtype, self.hidden_size = getattr(torch, needs.dtype), needs.hidden_size
        self.weight = tensors.weight  # the struct has its address
        self.run, self.op, self.struct = run, op, byref(op)

    def __call__(self, input_ids: Tensor) -> Tensor:
        input_ids = input_ids.contiguous()
        num_ids = input_ids.shape[0]
        output = torch.empty(num_ids, self.hidden_size, dtype=self.dtype)
        self.run(self.struct, input_ids.data_ptr(), num_ids, output.data_ptr())
        return output


class PlainRows(EmbeddingRows):
    """In panels once a tied head has packed them."""

    orders = (PANELS,)

    @property
    def is_bare(self) -> bool:
        """Return whether rows are as they lie in the weight."""
        return not self.op.is_packed and self.op.scale == 1.0

    def pack(self, order: str) -> bool:
        return False

    def packed(self, order: str) -> None:
        self.op.is_packed = True


def scale_of(needs: EmbedNeeds) -> float:
    """As the model's dtype holds it, like the reference; 1 for none."""
    return 1.0 if needs.scale is None else torch.tensor(needs.scale).to(getattr(torch, needs.dtype)).item()
