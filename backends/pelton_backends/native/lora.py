"""Adapters in C: a row's adapter is looked up as the step runs, so a recorded step serves any mix of them."""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import TYPE_CHECKING, ClassVar

import torch

from pelton.errors import EngineError
from pelton.lora.op import Lora, LoraNeeds, LoraTensors
from pelton_backends.native import library
from pelton_backends.native.library import ACTIVATIONS, DTYPES, NO_ACTIVATION

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
        why = library.reason_against()
        return [why] if why else []

    @staticmethod
    def bind(needs: LoraNeeds, tensors: LoraTensors) -> Lora:
        columns, norm = sum(needs.parts), needs.norm
        ends = (ctypes.c_int64 * len(needs.parts))(*(sum(needs.parts[: i + 1]) for i in range(len(needs.parts))))
        op = library.Lora(
            a=tensors.a.data_ptr(), b=tensors.b.data_ptr(), slots=tensors.rows.token_slots.data_ptr(),
            norm=None if tensors.norm is None else tensors.norm.data_ptr(), ends=ctypes.addressof(ends),
            slot_stride=tensors.a.stride(0), in_features=needs.in_features, rank=needs.rank,
            num_parts=len(needs.parts), eps=0.0 if norm is None else norm.eps,
            unit_offset=norm is not None and norm.unit_offset,
            activation=NO_ACTIVATION if needs.activation is None else ACTIVATIONS[needs.activation],
            dtype=DTYPES[needs.dtype],
        )  # fmt: skip
        assert tensors.b.stride(0) == tensors.a.stride(0), "a slot's matrices lie together"
        kept, run = (tensors, ends), library.kernels().lora  # the struct has their addresses
        width = None if needs.activation is None else columns // 2

        def lora(x: Tensor, output: Tensor) -> Tensor:
            assert kept[0] is tensors
            x, output = x.contiguous(), output.contiguous()
            result = output if width is None else torch.empty(output.shape[0], width, dtype=output.dtype)
            if run(byref(op), x.data_ptr(), output.data_ptr(), result.data_ptr(), x.shape[0]):
                raise EngineError("An adapter's product found no memory. Give the process more memory.")
            return result

        return lora
