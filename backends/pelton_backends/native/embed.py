"""Rows of an embedding in C, plain or in the panels into which a tied head brings it."""

from __future__ import annotations

from ctypes import byref
from typing import TYPE_CHECKING, ClassVar

import torch

from pelton.ops.interface import Embed, EmbedNeeds, EmbedTensors
from pelton_backends.native import library
from pelton_backends.native.library import DTYPES
from pelton_backends.native.linear import PANELS
from pelton_backends.native.seams import refusals

if TYPE_CHECKING:
    from torch import Tensor


class NativeEmbed:
    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: EmbedNeeds) -> list[str]:
        if needs.weight_format != "plain":
            return [f"weight format {needs.weight_format!r}, only 'plain'"]
        return refusals(needs)

    @staticmethod
    def bind(needs: EmbedNeeds, tensors: EmbedTensors) -> Embed:
        return _Embed(needs, tensors)


class _Embed:
    def __init__(self, needs: EmbedNeeds, tensors: EmbedTensors) -> None:
        self.dtype, self.hidden_size = getattr(torch, needs.dtype), needs.hidden_size
        # As the model's dtype holds it, like the reference.
        scale = 1.0 if needs.scale is None else torch.tensor(needs.scale).to(self.dtype).item()
        self.weight = tensors.weight  # the struct has its address
        self.run = library.kernels().embed
        self.op = library.Embed(self.weight.data_ptr(), needs.hidden_size, scale, DTYPES[needs.dtype], False)
        self.struct = byref(self.op)
        if tensors.linear is not None:
            tensors.linear.followers.setdefault(PANELS, []).append(self._follow)

    def __call__(self, input_ids: Tensor) -> Tensor:
        input_ids = input_ids.contiguous()
        output = torch.empty(input_ids.shape[0], self.hidden_size, dtype=self.dtype)
        self.run(self.struct, input_ids.data_ptr(), input_ids.shape[0], output.data_ptr())
        return output

    def _follow(self) -> None:
        self.op.is_packed = True
