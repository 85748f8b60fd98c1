"""The fused ops around a product in C, whatever form its weight has: what is left to each form is its own product.

An op's class is what `OpImplementation` asks for; an instance is the bound callable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from ctypes import byref
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from pelton.errors import EngineError
from pelton.ops.interface import AddNormLogitsNeeds
from pelton_backends.native import library
from pelton_backends.native.library import ACTIVATIONS, DTYPES, NO_ACTIVATION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


HANDLES = frozenset(["unit_offset", "has_bias", "post_norm", "soft_cap", "weight_format", "tp_size", "scale"])


def refusals(needs: Any, *groups: str) -> list[str]:
    """Reasons against an op that do not depend on the form of its weights. groups: of kernels that it calls, beside the base."""
    if needs.dtype not in DTYPES:
        return [f"dtype {needs.dtype}, only {', '.join(DTYPES)}"]
    activation = getattr(needs, "activation", "silu")
    if activation not in ACTIVATIONS:
        return [f"activation {activation!r}, only {', '.join(ACTIVATIONS)}"]
    why = library.reason_against(*groups, *library.groups_of_dtype(needs.dtype), dtype=needs.dtype)
    return [why] if why else []


class Product:
    """One matrix with what a fused op has around it: norms, bias, activation, soft cap."""

    def __init__(self, needs: Any, tensors: Any) -> None:
        """The arguments of any fused op."""
        self._rest = library.kernels(dtype=needs.dtype).rest
        spec, bias = tensors.linear.spec, tensors.linear.bias
        norm, post_norm = getattr(needs, "norm", None), getattr(needs, "post_norm", None)
        activation, is_logits = getattr(needs, "activation", None), isinstance(needs, AddNormLogitsNeeds)
        self.needs, self.tensors = needs, tensors  # the struct has their addresses
        self.num_columns = spec.out_features // (2 if activation else 1)
        self.dtype = torch.float32 if is_logits else getattr(torch, needs.dtype)
        self.op = library.Linear(
            bias=None if bias is None else bias.data_ptr(),
            in_features=spec.in_features, out_features=spec.out_features, output_stride=self.num_columns,
            soft_cap=getattr(needs, "soft_cap", None) or 0.0,
            activation=ACTIVATIONS[activation] if activation else NO_ACTIVATION,
            is_logits=is_logits, dtype=DTYPES[needs.dtype],
        )  # fmt: skip
        if norm:
            self.op.norm, self.op.eps, self.op.unit_offset = tensors.norm.data_ptr(), norm.eps, norm.unit_offset
        if post_norm:
            self.op.post_norm, self.op.post_eps = tensors.post_norm.data_ptr(), post_norm.eps
            self.op.post_unit_offset = post_norm.unit_offset
        self.struct = byref(self.op)
        self.run = library.kernels_for(self.op, dtype=needs.dtype).linear

    def __del__(self) -> None:
        """A thread that was held up may still read the weight, for a product that is done without it."""
        self._rest()

    orders: ClassVar[Sequence[str]] = ()

    def pack(self, order: str) -> bool:
        """As `OpImplementation` says; for products with `orders`."""
        raise NotImplementedError

    def packed(self, order: str) -> None:
        """As `pack`."""
        raise NotImplementedError

    def result(
        self,
        num_rows: int,
        hidden: Tensor,
        residual: int | None = None,
        residual_out: int | None = None,
        rows: int | None = None,
    ) -> Tensor:
        """Run for `rows`, or for all. Given by address: residual, rows, and where residual' goes, which may be hidden or residual."""
        output = torch.empty(num_rows, self.num_columns, dtype=self.dtype)
        failed = self.run(self.struct, hidden.data_ptr(), residual, residual_out, rows, num_rows, output.data_ptr())
        if failed:
            raise EngineError(
                f"A product of {num_rows} rows found no memory for its scratch space. Give the process more memory."
            )
        return output


class FusedOp(ABC):
    """Fused ops of one form of weights: a subclass says which products, and what they refuse."""

    is_recordable: ClassVar[bool] = True

    def __init__(self, needs: Any, tensors: Any) -> None:
        self._product = product = self.product(needs, tensors)
        self.result, self.orders, self.pack, self.packed = product.result, product.orders, product.pack, product.packed

    @staticmethod
    @abstractmethod
    def unsupported(needs: Any) -> list[str]: ...

    @staticmethod
    @abstractmethod
    def product(needs: Any, tensors: Any) -> Product: ...

    @classmethod
    def bind(cls, needs: Any, tensors: Any) -> Self:
        return cls(needs, tensors)


class LinearOp(FusedOp):
    @property
    def struct(self) -> library.Linear:
        """Return the struct for kernels that call the product themselves."""
        return self._product.op

    def __call__(self, x: Tensor) -> Tensor:
        return self.result(x.shape[0], x.contiguous())


class AddNormLinearOp(FusedOp):
    """With or without a gate."""

    def __init__(self, needs: Any, tensors: Any) -> None:
        super().__init__(needs, tensors)
        self.reduce = tensors.reduce

    def __call__(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(product, residual'): residual' takes the memory of `residual`, or of `hidden` before the first layer."""
        hidden = hidden.contiguous()
        if self.reduce is not None:
            hidden = self.reduce(hidden)
        if residual is None:
            return self.result(hidden.shape[0], hidden, None, hidden.data_ptr()), hidden
        residual = residual.contiguous()
        address = residual.data_ptr()
        return self.result(hidden.shape[0], hidden, address, address), residual


class LogitsOp(FusedOp):
    def __init__(self, needs: AddNormLogitsNeeds, tensors: Any) -> None:
        super().__init__(needs, tensors)
        self.vocab_size, self.reduce, self.gather = needs.vocab_size, tensors.reduce, tensors.gather

    def __call__(self, hidden: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
        if self.reduce is not None and self.gather is not None:
            residual = None if residual is None else residual[rows]
            address = None if residual is None else residual.data_ptr()
            mine = self.result(rows.shape[0], self.reduce(hidden[rows]), address)
            return self.gather(mine)[:, : self.vocab_size]
        hidden, rows = hidden.contiguous(), rows.contiguous()
        residual = None if residual is None else residual.contiguous()
        address = None if residual is None else residual.data_ptr()
        return self.result(rows.shape[0], hidden, address, None, rows.data_ptr())[:, : self.vocab_size]
