"""Products with plain weights in C, any number of rows.

A weight is brought into the kernels' order once it is loaded, in its own memory, unless another op reads it that does not know
the order, or its shape does not fit. Such a weight is read where it lies, [out, in].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pelton.errors import EngineError
from pelton_backends.native import library
from pelton_backends.native.library import ACTIVATIONS
from pelton_backends.native.linear_ops import HANDLES, AddNormLinearOp, FusedOp, LinearOp, LogitsOp, Product, refusals
from pelton_backends.native.reader import reader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

PANELS = "pelton_native.panels"
"""The order of weights that csrc/product.c reads."""
GATED_PANELS = "pelton_native.gated_panels"
"""The same for gate and up: a panel has rows of the one, and then those of the other that belong to them."""
_HALF = 16
"""Rows of the gate in a panel."""


class _PlainProduct(Product):
    def __init__(self, needs: Any, tensors: Any) -> None:
        super().__init__(needs, tensors)
        self.pack_panels = library.kernels(dtype=needs.dtype).pack
        self.op.weight = tensors.linear.tensors["weight"].data_ptr()
        self.is_gated = getattr(needs, "activation", None) is not None
        self.is_mixed = False  # the weight is in gated panels, and the product wants gate and up apart

    @property
    def orders(self) -> Sequence[str]:  # type: ignore[override]
        if self.is_gated:
            return (GATED_PANELS,)
        can_mix = (
            self.op.out_features % (2 * _HALF) == 0 and not self.op.bias
        )  # which would be added in the columns' own order
        return (PANELS, GATED_PANELS) if can_mix else (PANELS,)

    def pack(self, order: str) -> bool:
        """From here on only the kernels can read the weight, where its shape fits their order."""
        is_own = (order == GATED_PANELS) == self.is_gated
        return is_own and not self.op.is_packed and not self.pack_panels(self.struct, self.op.weight)

    def packed(self, order: str) -> None:
        self.op.is_packed = True
        self.is_mixed = order == GATED_PANELS and not self.is_gated

    def result(
        self,
        num_rows: int,
        hidden: Tensor,
        residual: int | None = None,
        residual_out: int | None = None,
        rows: int | None = None,
    ) -> Tensor:
        asked = reader.get() if self.op.is_logits else None
        if asked is not None and rows is not None and len(asked[1]) == num_rows:
            return self._allowed(*asked, hidden, residual, rows)
        found = super().result(num_rows, hidden, residual, residual_out, rows)
        if not self.is_mixed:
            return found
        return found.view(num_rows, -1, 2, _HALF).transpose(1, 2).reshape(num_rows, -1)

    def _allowed(self, sampler: Any, slots: Tensor, hidden: Tensor, residual: int | None, rows: int) -> Tensor:
        """Logits, as far as the sampler reads them."""
        output = torch.empty(len(slots), self.num_columns, dtype=self.dtype)
        failed = library.kernels(dtype=self.needs.dtype).allowed_logits(
            self.struct, sampler, slots.data_ptr(), hidden.data_ptr(), residual, rows, len(slots), output.data_ptr()
        )
        if failed:
            raise EngineError(f"Logits of {len(slots)} rows found no memory. Give the process more memory.")
        return output


class _Plain(FusedOp):
    handles = HANDLES

    @staticmethod
    def unsupported(needs: Any) -> list[str]:
        if needs.linear.weight_format != "plain":
            return [f"weight format {needs.linear.weight_format!r}, only 'plain'"]
        return refusals(needs)

    @staticmethod
    def product(needs: Any, tensors: Any) -> Product:
        return _PlainProduct(needs, tensors)


class NativeLinear(LinearOp, _Plain):
    def take_activation(self, name: str | None) -> bool:
        """From now on results have this activation behind them; False: there is none of this name."""
        if name in ACTIVATIONS:
            self._product.op.bare_activation = ACTIVATIONS[name] + 1
            library.kernels_for(self._product.op, dtype=self._product.needs.dtype)
        return name in ACTIVATIONS


class NativeAddNormLinear(AddNormLinearOp, _Plain):
    """Also `add_norm_gated_linear`."""

    def take_mixed(self) -> int:
        """From now on results are as a gated panel has them: so many columns of gate, as many of up, and so on; 0: gate and up apart,
        as the weight is not in such panels."""
        product = self._product
        assert isinstance(product, _PlainProduct)
        is_mixed, product.is_mixed = product.is_mixed, False
        return _HALF if is_mixed else 0


class NativeAddNormLogits(LogitsOp, _Plain):
    pass
