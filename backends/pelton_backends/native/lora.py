"""Adapters in C: a row's adapter is looked up as the step runs, so a recorded step serves any mix of them."""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import TYPE_CHECKING, ClassVar

import torch

from pelton.errors import EngineError
from pelton.lora.op import AdaptedNeeds, AdaptedTensors, LoraNeeds, LoraTensors
from pelton_backends.native import library
from pelton_backends.native.library import ACTIVATIONS, DTYPES, NO_ACTIVATION
from pelton_backends.native.linear import NativeAddNormLinear
from pelton_backends.native.linear_ops import HANDLES
from pelton_backends.reference.composed_lora import without_activation

if TYPE_CHECKING:
    from torch import Tensor


class NativeLora:
    handles = frozenset(["norm", "activation", "unit_offset"])
    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: LoraNeeds) -> list[str]:
        if needs.dtype not in DTYPES:
            return [f"dtype {needs.dtype}, only {', '.join(DTYPES)}"]
        if needs.activation is not None and needs.activation not in ACTIVATIONS:
            return [f"activation {needs.activation!r}, only {', '.join(ACTIVATIONS)}"]
        why = library.reason_against("lora", dtype=needs.dtype)
        return [why] if why else []

    @staticmethod
    def bind(needs: LoraNeeds, tensors: LoraTensors) -> NativeAdapter:
        return NativeAdapter(needs, tensors)


class NativeAdapter:
    """`Lora`."""

    def __init__(self, needs: LoraNeeds, tensors: LoraTensors) -> None:
        norm = needs.norm
        ends = (ctypes.c_int64 * len(needs.parts))(*(sum(needs.parts[: i + 1]) for i in range(len(needs.parts))))
        self.op = library.Lora(
            a=tensors.a.data_ptr(), b=tensors.b.data_ptr(), slots=tensors.rows.token_slots.data_ptr(),
            norm=None if tensors.norm is None else tensors.norm.data_ptr(), ends=ctypes.addressof(ends),
            slot_stride=tensors.a.stride(0), in_features=needs.in_features, rank=needs.rank,
            num_parts=len(needs.parts), eps=0.0 if norm is None else norm.eps,
            unit_offset=norm is not None and norm.unit_offset,
            activation=NO_ACTIVATION if needs.activation is None else ACTIVATIONS[needs.activation],
            dtype=DTYPES[needs.dtype],
        )  # fmt: skip
        assert tensors.b.stride(0) == tensors.a.stride(0), "a slot's matrices lie together"
        assert tensors.b.stride(2) == 1, "a column is a lane"
        self._kept = tensors, ends  # the struct has their addresses
        self._run, self._struct = library.kernels("lora", dtype=needs.dtype).lora, byref(self.op)
        self._width = None if needs.activation is None else sum(needs.parts) // 2

    def __call__(self, x: Tensor, output: Tensor) -> Tensor:
        x, output = x.contiguous(), output.contiguous()
        result = output if self._width is None else torch.empty(output.shape[0], self._width, dtype=output.dtype)
        if self._run(self._struct, x.data_ptr(), output.data_ptr(), result.data_ptr(), x.shape[0]):
            raise EngineError("An adapter's product found no memory. Give the process more memory.")
        return result


class NativeLoraAddNormGatedLinear:
    """The product of gate and up as the packed weight gives it: the adapter's kernel finds its columns where they are."""

    handles = HANDLES | {"norm", "activation"}
    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: AdaptedNeeds) -> list[str]:
        return NativeAddNormLinear.unsupported(needs.base) + NativeLora.unsupported(needs.adapter)

    @staticmethod
    def bind(needs: AdaptedNeeds, tensors: AdaptedTensors) -> _AdaptedGateUp:
        return _AdaptedGateUp(needs, tensors)


class _AdaptedGateUp:
    def __init__(self, needs: AdaptedNeeds, tensors: AdaptedTensors) -> None:
        self._product = NativeAddNormLinear(*without_activation(needs, tensors))
        self._adapter = NativeAdapter(needs.adapter, tensors.adapter)
        self.orders, self.pack = self._product.orders, self._product.pack

    def packed(self, order: str) -> None:
        """See `pelton.ops.interface.OpImplementation`."""
        self._product.packed(order)
        self._adapter.op.pair = self._product.take_mixed()

    def __call__(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        product, residual = self._product(hidden, residual)
        return self._adapter(residual, product), residual
