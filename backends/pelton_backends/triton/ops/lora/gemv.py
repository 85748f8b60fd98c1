"""Products of one to eight rows with adapters: `gemv.py`'s kernels add them before they round, and before the activation.

One row: the first programs of the product's own launch multiply with A, whose rows they take for rows of the weight. What they find
they leave in words of 8 bytes, half number, half the step it is of; the others, whose weights stream meanwhile, look for the words
of their step. Programs start in order, so those that others wait for run already.

More rows (of small matrices): `shrink` comes before each product.

B is fetched with the weights, by the slots as they are then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton

from pelton.lora.op import AdaptedNeeds, AdaptedTensors, LoraNeeds, LoraTensors
from pelton.ops.interface import AddNormGatedLinearNeeds
from pelton_backends.triton.ops.linear import gemv
from pelton_backends.triton.ops.lora.shrink import Low, Shrink, reasons_against

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

HANDLES = gemv.HANDLES | {"norm", "activation"}


def _refusals(needs: AdaptedNeeds) -> list[str]:
    reasons = gemv.refusals(needs.base) + reasons_against(needs.adapter)
    if getattr(needs.base, "post_norm", None) is not None:
        reasons.append("post_norm: A would meet rows that only the product norms")
    return reasons


def _token_range(needs: AdaptedNeeds) -> tuple[int, int | None]:
    return 1, gemv.most_rows(needs.base.linear, needs.base.dtype)


def can_read(tensors: LoraTensors) -> bool:
    """Return whether B's ranks lie beside each other."""
    return tensors.b.stride(1) == 1 and tensors.b.stride(2) % tensors.b.shape[1] == 0


class GemvAdapter:
    """Arguments by which a product's kernel knows its adapters."""

    def __init__(self, needs: LoraNeeds, tensors: LoraTensors) -> None:
        assert can_read(tensors), "B's ranks lie beside each other"
        self.shrink = Shrink(needs, tensors)
        self._slots, self._step = tensors.rows.token_slots, tensors.rows.step
        self._a, self._b = tensors.a, tensors.b
        self._strides = {"slot_stride": tensors.b.stride(0), "row_stride": tensors.b.stride(2)}
        self._words = torch.zeros(len(needs.parts) * needs.rank, dtype=torch.int64, device=tensors.a.device)
        first, second = (*needs.parts, 1 << 30, 1 << 30)[:2]
        self._constants = {
            "RANK": needs.rank, "SECOND": first, "THIRD": first + second, "NUM_PARTS": len(needs.parts),
        }  # fmt: skip

    def of_one(self) -> dict[str, Any]:
        """Keyword arguments of the call, for one row."""
        return {
            "slots": self._slots, "b": self._b, "low": self._words, "a": self._a, "a_stride": self._a.stride(0), "step": self._step,
            "low_rows": self._words.numel(), **self._strides, **self._constants,
        }  # fmt: skip

    def of_more(self, low: Low) -> dict[str, Any]:
        """Keyword arguments of the call, for A x of several rows."""
        return {
            "slots": self._slots, "b": self._b, "low": low.sums, "squares": low.squares, **self._strides,
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
            return call(x, **(adapter.of_one() if x.shape[0] == 1 else adapter.of_more(adapter.shrink(x))))

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
            if hidden.shape[0] == 1:
                return call(hidden, residual, **adapter.of_one())
            return call(hidden, residual, **adapter.of_more(adapter.shrink(hidden, residual, norm)))

        return lora_add_norm_linear
