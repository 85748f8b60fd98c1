"""Products with plain weights in C, any number of rows.

A weight is brought into the kernels' order once it is loaded, in its own memory, unless another op reads it that does not know
this order, or its shape does not fit. Such a weight is read where it lies, [out, in].
"""

from __future__ import annotations

from typing import Any

from pelton_backends.native import library
from pelton_backends.native.seams import AddNormSeam, LinearSeam, LogitsSeam, Product, Seam, refusals

PANELS = "pelton_native.panels"
"""The order of weights that csrc/product.c reads."""


class _PlainProduct(Product):
    def __init__(self, needs: Any, tensors: Any) -> None:
        super().__init__(needs, tensors)
        self.weights, self.pack = tensors.linear, library.kernels().pack
        self.op.weight = self.weights.tensors["weight"].data_ptr()

    def weights_loaded(self) -> None:
        """From here on only the kernels can read the weight, where its shape fits their order."""
        followers = self.weights.followers.get(PANELS, [])
        if self.op.is_packed or len(followers) + 1 < self.weights.num_readers:
            return
        self.op.is_packed = not self.pack(self.struct, self.op.weight)
        if self.op.is_packed:
            for follow in followers:
                follow()


class _Plain(Seam):
    @staticmethod
    def unsupported(needs: Any) -> list[str]:
        if needs.linear.weight_format != "plain":
            return [f"weight format {needs.linear.weight_format!r}, only 'plain'"]
        return refusals(needs)

    @staticmethod
    def product(needs: Any, tensors: Any) -> Product:
        return _PlainProduct(needs, tensors)


class NativeLinear(LinearSeam, _Plain):
    pass


class NativeAddNormLinear(AddNormSeam, _Plain):
    """Also `add_norm_gated_linear`."""


class NativeAddNormLogits(LogitsSeam, _Plain):
    pass
