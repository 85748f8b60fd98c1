"""Products of many rows with adapters on Hopper (`hopper_many_kernel.py`), where the base product is one of `hopper_matmul`.

Elsewhere composed, of the base product and `lora`, with the rows normed once for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pelton.lora.op import AdaptedNeeds, AdaptedTensors
from pelton_backends.triton.launch import Launcher
from pelton_backends.triton.ops.linear import large_batch
from pelton_backends.triton.ops.linear.hopper_matmul import (
    COLUMNS,
    ROWS,
    STEP,
    WARP_GROUPS,
    halved_tiles,
    num_tiles,
)
from pelton_backends.triton.ops.linear.large_batch import MIN_ROWS, add_norm
from pelton_backends.triton.ops.lora.gemv import can_read
from pelton_backends.triton.ops.lora.hopper_many_kernel import adapted_matmul_kernel
from pelton_backends.triton.ops.lora.linear import RowsTimesA, TritonLora
from pelton_backends.triton.ops.lora.shrink import reasons_against
from pelton_backends.triton.runtime import num_sms

if TYPE_CHECKING:
    from torch import Tensor

HANDLES = large_batch.HANDLES | {"norm", "activation"}
_MIN_COLUMNS = 1024  # of a row: tiles have more steps than are fetched ahead


def _refusals(needs: AdaptedNeeds) -> list[str]:
    return large_batch.refusals(needs.base) + reasons_against(needs.adapter)


def _token_range(needs: AdaptedNeeds) -> tuple[int, int | None]:
    return MIN_ROWS, None


class _Product:
    """A product of normed rows with adapters, and what it is composed of where the kernel does not take them."""

    def __init__(self, needs: AdaptedNeeds, tensors: AdaptedTensors) -> None:
        weights, adapter = tensors.base.linear, needs.adapter
        self._weight, self._parts, self._rank = weights.tensors["weight"], adapter.parts, adapter.rank
        self._activation = getattr(needs.base, "activation", None)
        own = replace(tensors.adapter, norm=None)
        self._rows, self._b = own.rows, own.b
        self._shrink = RowsTimesA(replace(adapter, norm=None, activation=None), own)
        self._linear = large_batch.product_of(weights)
        self._lora = TritonLora.bind(replace(adapter, norm=None), own)
        self._takes = large_batch.is_for_tiles(weights, self._activation)
        columns = COLUMNS if self._activation is None else COLUMNS // 2
        self._is_ours = (
            can_read(tensors.adapter)
            and self._weight.shape[1] >= _MIN_COLUMNS
            and all(size % columns == 0 for size in self._parts[: -1 if self._activation is None else None])
        )

    def __call__(self, x: Tensor) -> Tensor:
        if not (self._is_ours and self._takes(x)):
            return self._lora(x, self._linear(x))
        num_rows, in_features = x.shape
        weight, activation, rows, programs = self._weight, self._activation, self._rows, num_sms(x.device)
        size = weight.shape[0] if activation is None else weight.shape[0] // 2
        columns = COLUMNS if activation is None else COLUMNS // 2
        low = self._shrink(x)
        out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
        tiles = num_tiles(num_rows, weight.shape[0], activation)
        halved = halved_tiles(tiles, in_features, programs)
        parts = torch.empty((halved, WARP_GROUPS, ROWS, COLUMNS), dtype=torch.float32, device=x.device)
        arrived = torch.zeros((halved, WARP_GROUPS), dtype=torch.int32, device=x.device)
        tile = gl.NVMMASharedLayout(128, 16, rank=2)
        b = self._b.transpose(1, 2)
        narrow = gl.NVMMASharedLayout(2 * self._rank, 16, rank=3)
        first, second = (*self._parts, 1 << 30, 1 << 30)[:2]
        _launch(
            (x.dtype, x.device, activation, self._parts, self._rank),
            (min(tiles + halved, programs),),
            (
                TensorDescriptor.from_tensor(x, [ROWS, STEP], tile),
                TensorDescriptor.from_tensor(weight, [columns, STEP], tile),
                TensorDescriptor(b, [*b.shape], [b.stride(0), b.stride(1), 1], [1, columns, self._rank], narrow),
                TensorDescriptor.from_tensor(out, [ROWS, COLUMNS // 2], tile),
                parts, arrived, low.sums, rows.token_slots, rows.span_slots, rows.num_span_slots, num_rows, size, in_features,
                halved, rows.num_slots,
            ),
            {
                "ACTIVATION": activation, "RANK": self._rank, "NUM_PARTS": len(self._parts), "SECOND": first,
                "THIRD": first + second,
            },
            num_warps=4,
        )  # fmt: skip
        return out


_launch = Launcher(adapted_matmul_kernel)


class LoraManyLinear:
    handles = HANDLES
    unsupported = staticmethod(_refusals)
    token_range = staticmethod(_token_range)

    @staticmethod
    def bind(needs: AdaptedNeeds, tensors: AdaptedTensors) -> Callable[[Tensor], Tensor]:
        return _Product(needs, tensors)


class LoraManyAddNormLinear:
    handles = HANDLES
    unsupported = staticmethod(_refusals)
    token_range = staticmethod(_token_range)

    @staticmethod
    def bind(needs: AdaptedNeeds, tensors: AdaptedTensors) -> Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]:
        base, parts, product = needs.base, tensors.base, _Product(needs, tensors)

        def lora_add_norm_linear(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            residual, rows = add_norm(hidden, residual, parts.norm, base.norm, parts.post_norm, base.post_norm)
            return product(rows), residual

        return lora_add_norm_linear
