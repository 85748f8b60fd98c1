"""One product with adapters, for tests of implementations of the op `lora`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pelton.lora.op import LoraNeeds, LoraTensors
from pelton.ops.interface import NormSpec
from pelton_backends.reference.lora import ReferenceLora
from pelton_platforms.device.adapter_rows import AdapterRows

NUM_SLOTS = 3


@dataclass
class LoraCase:
    needs: LoraNeeds
    tensors: LoraTensors
    x: Tensor
    output: Tensor

    def run(self, implementation: Any) -> Tensor:
        return implementation.bind(self.needs, self.tensors)(self.x.clone(), self.output.clone())


def make_lora_case(
    slots: list[int], in_features: int, parts: tuple[int, ...], *, dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu", rank: int = 16, norm: bool = False, unit_offset: bool = False,
    activation: str | None = None, has_tiles: bool = False, num_slots: int = NUM_SLOTS,
) -> LoraCase:  # fmt: skip
    generator = torch.Generator().manual_seed(len(slots) + in_features)

    def numbers(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    device, columns, count = torch.device(device), sum(parts), len(slots)
    rows = AdapterRows(max_num_tokens=count + 5, num_slots=num_slots, device=device, has_tiles=has_tiles)
    rows.is_used = True
    rows.place(torch.tensor(slots, dtype=torch.int64, device=device))
    a_size, gap = len(parts) * rank * in_features, 64
    flat = numbers(num_slots, a_size + rank * columns + gap, scale=0.3)
    stride = flat.stride(0)
    tensors = LoraTensors(
        a=flat.as_strided((num_slots, len(parts) * rank, in_features), (stride, in_features, 1)),
        b=flat.as_strided((num_slots, rank, columns), (stride, columns, 1), a_size),
        rows=rows,
        norm=numbers(in_features) if norm else None,
    )
    needs = LoraNeeds(
        dtype=str(dtype).removeprefix("torch."), in_features=in_features, parts=parts, rank=rank, num_slots=num_slots,
        norm=NormSpec(size=in_features, eps=1e-6, unit_offset=unit_offset) if norm else None, activation=activation,
    )  # fmt: skip
    return LoraCase(needs, tensors, numbers(count, in_features), numbers(count, columns))


TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Of the largest number: A x is rounded once more than in the reference."""


def check_lora(case: LoraCase, implementation: Any, slots: list[int]) -> None:
    """Close to the reference; rows without an adapter as they are without one, to the bit."""
    assert implementation.unsupported(case.needs) == []
    expected, found = case.run(ReferenceLora), case.run(implementation)
    assert found.shape == expected.shape
    scale = float(expected.float().abs().max())
    torch.testing.assert_close(
        found.float() / scale, expected.float() / scale, rtol=0.0, atol=TOLERANCE[case.output.dtype]
    )
    bare = [index for index, slot in enumerate(slots) if slot < 0]
    if case.needs.activation is None:
        assert torch.equal(found[bare], case.output[bare])


SHAPES = [
    ([0], 64, (48,), {}),
    ([-1, 2, 0, -1, 2, 2], 96, (64, 16, 16), {"norm": True}),
    ([1] * 20 + [0] * 3 + [-1] * 4, 100, (40, 40), {"norm": True, "unit_offset": True, "activation": "silu"}),
    ([-1, -1, 1], 257, (130, 130), {"activation": "gelu_tanh"}),
    ([2, 0, -1], 300, (77,), {"rank": 64}),
    ([1, -1, 0, 1], 3, (9,), {}),
]
