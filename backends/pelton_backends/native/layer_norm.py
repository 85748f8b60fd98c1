"""Layer norms in C, in float32; RMS norms are done by the products that read them."""

from __future__ import annotations

from ctypes import byref
from typing import TYPE_CHECKING, ClassVar

import torch

from pelton_backends.native import library

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.ops.interface import AddNorm, AddNormNeeds, AddNormTensors


class NativeAddNorm:
    """Sum and layer norm; bound once a layer."""

    handles = frozenset(["is_centered"])
    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: AddNormNeeds) -> list[str]:
        if not needs.norm.is_centered:
            return ["an RMS norm, only layer norms"]
        if needs.dtype != "float32":
            return [f"dtype {needs.dtype}, only float32"]
        why = library.reason_against("encoder", dtype="float32")
        return [why] if why else []

    @staticmethod
    def bind(needs: AddNormNeeds, tensors: AddNormTensors) -> AddNorm:
        return LayerNorm(needs, tensors)


class LayerNorm:
    def __init__(self, needs: AddNormNeeds, tensors: AddNormTensors) -> None:
        weight, size = tensors.norm, needs.norm.size
        self.weight = weight  # the struct has its address
        bias = weight[1].data_ptr() if weight.dim() == 2 else None
        self.op = library.LayerNorm(weight.data_ptr(), bias, size, needs.norm.eps)
        self.struct, self.run = byref(self.op), library.kernels("encoder").layer_norm

    def __call__(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm, residual'), which takes the memory of `residual`, or of `hidden` without one."""
        hidden, output = hidden.contiguous(), torch.empty(hidden.shape, dtype=torch.float32)
        address = None
        if residual is not None:
            residual = residual.contiguous()
            address = residual.data_ptr()
        self.run(self.struct, hidden.data_ptr(), address, hidden.shape[0], output.data_ptr())
        return output, hidden if residual is None else residual
