"""The op `lora` in plain torch, on every device: each slot's matrices meet all rows, and the rows that use it take the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pelton.lora.op import Lora, LoraNeeds, LoraTensors
from pelton.ops.reference import ACTIVATIONS, rms_norm
from pelton_backends.reference.ops import gated, layer_norm

if TYPE_CHECKING:
    from torch import Tensor


class ReferenceLora:
    is_recordable = True
    handles = frozenset(["norm", "activation", "unit_offset", "is_centered"])

    @staticmethod
    def unsupported(needs: LoraNeeds) -> list[str]:
        known = needs.activation is None or needs.activation in ACTIVATIONS
        return [] if known else [f"activation {needs.activation!r}"]

    @staticmethod
    def bind(needs: LoraNeeds, tensors: LoraTensors) -> Lora:
        starts = [sum(needs.parts[:index]) for index in range(len(needs.parts))]

        def delta(x: Tensor, slot: int) -> Tensor:
            low = F.linear(x, tensors.a[slot].float())
            b = tensors.b[slot].float()
            return torch.cat(
                [
                    low[:, index * needs.rank : (index + 1) * needs.rank] @ b[:, start : start + size]
                    for index, (start, size) in enumerate(zip(starts, needs.parts, strict=True))
                ],
                dim=1,
            )

        def lora(x: Tensor, output: Tensor) -> Tensor:
            slots = tensors.rows.token_slots[: x.shape[0], None]
            if needs.norm is not None and tensors.norm is not None:
                x = (layer_norm if needs.norm.is_centered else rms_norm)(x, tensors.norm, needs.norm)
            x = x.float()
            for slot in range(needs.num_slots):
                added = (output.float() + delta(x, slot)).to(output.dtype)
                output = torch.where(slots == slot, added, output)
            return output if needs.activation is None else gated(output, needs.activation)

        return lora
