"""Short convolutions between two gates, in torch, for CPU: the layers of LFM2 whose only state is their last inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pelton.attention.interface import BoundAttention
from pelton_backends.sdpa.state_rows import ConvolutionParams, StateMetadata, StateRows, convolve

if TYPE_CHECKING:
    from torch import Tensor


class ShortConv(BoundAttention):
    """A layer's convolution. Its query is [T, 3 E]: two gates and x; its output [T, E]."""

    layer: ConvolutionParams

    def __call__(self, query: Tensor, metadata: StateMetadata, output: Tensor) -> None:
        before, behind, x = query.chunk(3, dim=-1)
        output.copy_(behind * convolve(self.layer, before * x, metadata))


class ShortConvBackend(StateRows):
    name: ClassVar[str] = "short_conv"
    attention_type: ClassVar[str] = "short_conv"
    computes: ClassVar[type[BoundAttention]] = ShortConv
