"""Products with plain weights in C: one row, or (bfloat16 on AVX512-BF16) any number; what is left goes to torch.

There a weight is brought into the kernels' order once it is loaded, in its own memory, unless another op reads it that does
not know this order. Elsewhere weights are read where they lie, [out, in].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pelton.ops import reference
from pelton_backends.native import library
from pelton_backends.native.seams import AddNormSeam, LinearSeam, LogitsSeam, Product, Seam, refusals

if TYPE_CHECKING:
    from torch import Tensor

PANELS = "pelton_native.panels"
"""The order of weights that csrc/linear_avx512.c reads."""


class _PlainProduct(Product):
    def __init__(self, needs: Any, tensors: Any) -> None:
        super().__init__(needs, tensors)
        self.weights = tensors.linear
        self.op.weight = self.weights.tensors["weight"].data_ptr()

    def weights_loaded(self) -> None:
        """From here on only the kernels can read the weight, where they have an order of their own for it."""
        followers = self.weights.followers.get(PANELS, [])
        if self.op.is_packed or len(followers) + 1 < self.weights.num_readers:
            return
        self.op.is_packed = not library.kernels().pack(self.struct, self.op.weight)
        if self.op.is_packed:
            for follow in followers:
                follow()


class _OneRowProduct(_PlainProduct):
    """More rows by torch: oneDNN and MKL are better than plain C."""

    def __init__(self, needs: Any, tensors: Any) -> None:
        super().__init__(needs, tensors)
        self.prepare = library.kernels().prepare

    def result(
        self,
        num_rows: int,
        hidden: Tensor,
        residual: int | None = None,
        residual_out: int | None = None,
        rows: int | None = None,
    ) -> Tensor:
        if num_rows == 1:
            return Product.result(self, 1, hidden, residual, residual_out, rows)
        x = hidden
        if self.op.norm:
            x = torch.empty(num_rows, hidden.shape[1], dtype=hidden.dtype)
            self.prepare(self.struct, hidden.data_ptr(), residual, residual_out, x.data_ptr(), rows, num_rows)
        product = reference.linear(x, self.weights)
        if activation := getattr(self.needs, "activation", None):
            product = reference.gated(product, activation)
        if soft_cap := self.op.soft_cap:
            product = soft_cap * torch.tanh(product.float() / soft_cap)
        return product.to(self.dtype)


class _Plain(Seam):
    @staticmethod
    def unsupported(needs: Any) -> list[str]:
        if needs.linear.weight_format != "plain":
            return [f"weight format {needs.linear.weight_format!r}, only 'plain'"]
        return refusals(needs)

    @staticmethod
    def product(needs: Any, tensors: Any) -> Product:
        is_even = tensors.linear.spec.in_features % 2 == 0
        has_rows = library.kernels().isa == "avx512_bf16" and needs.dtype == "bfloat16" and is_even
        return (_PlainProduct if has_rows else _OneRowProduct)(needs, tensors)


class NativeLinear(LinearSeam, _Plain):
    pass


class NativeAddNormLinear(AddNormSeam, _Plain):
    """Also `add_norm_gated_linear`."""


class NativeAddNormLogits(LogitsSeam, _Plain):
    pass
