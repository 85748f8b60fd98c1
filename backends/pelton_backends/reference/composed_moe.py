"""The norm before a layer of experts, and the layer, of the ops that are chosen for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pelton.ops.interface import AddNorm, AddNormNeeds, AddNormTensors
from pelton_backends.reference.ops import Bind, Composed

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.ops.moe import AddNormMoe, AddNormMoeNeeds, AddNormMoeTensors, Moe


class ComposedAddNormMoe(Composed):
    @staticmethod
    def compose(needs: AddNormMoeNeeds, tensors: AddNormMoeTensors, bind: Bind) -> AddNormMoe:
        norm = AddNormNeeds(dtype=needs.dtype, norm=needs.norm, post_norm=needs.post_norm, tp_size=needs.tp_size)
        add_norm: AddNorm = bind("add_norm", norm, AddNormTensors(tensors.norm, tensors.post_norm, tensors.reduce))
        moe: Moe = bind("moe", needs.moe, tensors.moe)

        def add_norm_moe(
            hidden: Tensor, residual: Tensor | None, slot_mapping: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            x, residual = add_norm(hidden, residual)
            return moe(x, slot_mapping), x, residual

        if hasattr(moe, "read_by"):
            add_norm_moe.read_by = moe.read_by  # type: ignore[attr-defined]
        return add_norm_moe
