"""Products with plain weights in C, any number of rows.

A weight is brought into the kernels' order once it is loaded, in its own memory, unless another op reads it that does not know
the order, or its shape does not fit. Such a weight is read where it lies, [out, in].
"""

from __future__ import annotations

from typing import Any

from pelton_backends.native import library
from pelton_backends.native.linear_ops import HANDLES, AddNormLinearOp, FusedOp, LinearOp, LogitsOp, Product, refusals

PANELS = "pelton_native.panels"
"""The order of weights that csrc/product.c reads."""


class _PlainProduct(Product):
    orders = (PANELS,)

    def __init__(self, needs: Any, tensors: Any) -> None:
        super().__init__(needs, tensors)
        self.pack_panels = library.kernels().pack
        self.op.weight = tensors.linear.tensors["weight"].data_ptr()

    def pack(self, order: str) -> bool:
        """From here on only the kernels can read the weight, where its shape fits their order."""
        return not self.op.is_packed and not self.pack_panels(self.struct, self.op.weight)

    def packed(self, order: str) -> None:
        self.op.is_packed = True


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
    pass


class NativeAddNormLinear(AddNormLinearOp, _Plain):
    """Also `add_norm_gated_linear`."""


class NativeAddNormLogits(LogitsOp, _Plain):
    pass
