"""Products of one to eight rows with adapters: `gemv.py`'s kernels add them before they round, and before the activation.

`lora_shrink` comes before each product. A program fetches its rows of B with its weights, by the slots as they are then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton

from pelton.lora.op import AdaptedNeeds, AdaptedTensors, LoraNeeds, LoraTensors
from pelton.ops.interface import AddNormGatedLinearNeeds
from pelton_backends.triton.ops import gemv
from pelton_backends.triton.ops.lora_shrink import Low, Shrink, reasons_against

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

HANDLES = gemv.HANDLES | {"norm", "activation"}


def _refusals(needs: AdaptedNeeds) -> list[str]:
    reasons = gemv.refusals(needs.base) + reasons_against(needs.adapter)
    linear, dtype = needs.base.linear, needs.base.dtype
    if gemv.is_large(linear.out_features, linear.in_features, 4 if dtype == "float32" else 2):
        reasons.append("a large matrix: so many programs would each add up A x")
    if getattr(needs.base, "post_norm", None) is not None:
        reasons.append("post_norm: A would meet rows that only the product norms")
    return reasons


def _token_range(needs: AdaptedNeeds) -> tuple[int, int | None]:
    return 1, gemv.most_rows(needs.base.linear, needs.base.dtype)


def can_read(tensors: LoraTensors) -> bool:
    """Return whether B's ranks lie beside each other."""
    return tensors.b.stride(1) == 1 and tensors.b.stride(2) == tensors.b.shape[1]


class GemvAdapter:
    """The shares of A x, and what a product's kernel has to know of them."""

    def __init__(self, needs: LoraNeeds, tensors: LoraTensors) -> None:
        assert can_read(tensors), "B's ranks lie beside each other"
        self.shrink = Shrink(needs, tensors)
        self._slots, self._b, self._stride = tensors.rows.token_slots, tensors.b, tensors.b.stride(0)
        first, second = (*needs.parts, 1 << 30, 1 << 30)[:2]
        self._constants = {
            "RANK": needs.rank, "SECOND": first, "THIRD": first + second, "NUM_PARTS": len(needs.parts),
        }  # fmt: skip

    def options(self, low: Low) -> dict[str, Any]:
        """Keyword arguments of the kernel."""
        return {
            "slots": self._slots, "b": self._b, "low": low.sums, "squares": low.squares, "slot_stride": self._stride,
            "LOW_SPLITS": low.splits, "LOW_WIDTH": triton.next_power_of_2(low.splits), **self._constants,
        }  # fmt: skip


class LoraGemvLinear:
    handles = HANDLES
    unsupported = staticmethod(_refusals)
    token_range = staticmethod(_token_range)

    @staticmethod
    def bind(needs: AdaptedNeeds, tensors: AdaptedTensors) -> Callable[[Tensor], Tensor]:
        call, adapter = gemv.bind_linear(needs.base, tensors.base), GemvAdapter(needs.adapter, tensors.adapter)

        def lora_linear(x: Tensor) -> Tensor:
            x = gemv.inner_contiguous(x)
            return call(x, **adapter.options(adapter.shrink(x)))

        return lora_linear


class LoraGemvAddNormLinear:
    handles = HANDLES
    unsupported = staticmethod(_refusals)
    token_range = staticmethod(_token_range)

    @staticmethod
    def bind(needs: AdaptedNeeds, tensors: AdaptedTensors) -> Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]:
        is_gated = isinstance(needs.base, AddNormGatedLinearNeeds)
        call = (gemv.bind_add_norm_gated_linear if is_gated else gemv.bind_add_norm_linear)(needs.base, tensors.base)
        adapter, norm = GemvAdapter(needs.adapter, tensors.adapter), tensors.base.norm

        def lora_add_norm_linear(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            hidden = gemv.inner_contiguous(hidden)
            residual = None if residual is None else gemv.inner_contiguous(residual)
            return call(hidden, residual, **adapter.options(adapter.shrink(hidden, residual, norm)))

        return lora_add_norm_linear
