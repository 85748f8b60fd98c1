"""Conformance of this package's op."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from pelton.testing.ops import OpCase, OpConformance

from pelton_skeleton.ops import SKELETON_SCALE, InPlaceScale, ScaleNeeds, ScaleTensors


class TestInPlaceScale(OpConformance):
    op = SKELETON_SCALE
    implementation = InPlaceScale

    def cases(self) -> Iterable[OpCase]:
        for count in (1, 3, 17):
            yield OpCase(
                name=f"{count} rows",
                needs=ScaleNeeds(dtype=self.dtype, scale=0.5),
                tensors=ScaleTensors(torch.device(self.device)),
                inputs=(torch.randn(count, 8, generator=torch.Generator().manual_seed(0)),),
            )
