"""Products with adapters, composed of the base op and `lora`: for every weight format, device and batch size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pelton.lora.op import AdaptedNeeds, AdaptedTensors
from pelton.ops.interface import (
    AddNormGatedLinearNeeds,
    AddNormGatedLinearTensors,
    AddNormLinearNeeds,
    AddNormLinearTensors,
)

if TYPE_CHECKING:
    from torch import Tensor

Bind = Callable[[str, Any, Any], Callable[..., Any]]


class _Composed:
    is_recordable = True

    @staticmethod
    def unsupported(needs: AdaptedNeeds) -> list[str]:
        return []


class ComposedLinear(_Composed):
    @staticmethod
    def compose(needs: AdaptedNeeds, tensors: AdaptedTensors, bind: Bind) -> Callable[..., Any]:
        linear = bind("linear", needs.base, tensors.base)
        adapter = bind("lora", needs.adapter, tensors.adapter)

        def lora_linear(x: Tensor) -> Tensor:
            added: Tensor = adapter(x, linear(x))
            return added

        return lora_linear


class ComposedAddNormLinear(_Composed):
    @staticmethod
    def compose(needs: AdaptedNeeds, tensors: AdaptedTensors, bind: Bind) -> Callable[..., Any]:
        add_norm_linear = bind("add_norm_linear", needs.base, tensors.base)
        adapter = bind("lora", needs.adapter, tensors.adapter)

        def lora_add_norm_linear(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            product, residual = add_norm_linear(hidden, residual)
            return adapter(residual, product), residual

        return lora_add_norm_linear


class ComposedAddNormGatedLinear(_Composed):
    """Adapters come in before the activation: `lora` applies it."""

    @staticmethod
    def compose(needs: AdaptedNeeds, tensors: AdaptedTensors, bind: Bind) -> Callable[..., Any]:
        base, parts = without_activation(needs, tensors)
        adapted = AdaptedNeeds(base=base, adapter=needs.adapter)
        return ComposedAddNormLinear.compose(adapted, AdaptedTensors(parts, tensors.adapter), bind)


def without_activation(needs: AdaptedNeeds, tensors: AdaptedTensors) -> tuple[AddNormLinearNeeds, AddNormLinearTensors]:
    """The bare product of gate and up."""
    base, found = needs.base, tensors.base
    assert isinstance(base, AddNormGatedLinearNeeds) and isinstance(found, AddNormGatedLinearTensors)
    bare = AddNormLinearNeeds(
        dtype=base.dtype, norm=base.norm, linear=base.linear, post_norm=base.post_norm, tp_size=base.tp_size
    )
    return bare, AddNormLinearTensors(found.norm, found.linear, found.post_norm, found.reduce)
