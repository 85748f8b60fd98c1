"""Attention within each row of a step, both ways, through torch's scaled_dot_product_attention.

On a CPU rows are put together by length: rows of about one length are one call, padded and masked where they differ. On other
devices, where reading lengths would wait, all rows are padded to the longest that the host knows of.
Shapes: R rows of a group, L its longest, N heads, D head_dim.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F

from pelton.attention.encoder import EncoderBackend
from pelton.attention.interface import AttentionNeeds, GraphSupport
from pelton.attention.metadata import BatchDescriptor, CommonMetadata
from pelton_backends.sdpa.backend import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.encoder import EncoderParams

PADDING_SHARE = 0.15
"""Most of a call's places that padding may take, so that rows of several lengths are one call."""


@dataclass(slots=True)
class Rows:
    """Rows that one call attends in."""

    num_rows: int
    longest: int
    first: int | None  # where they lie behind each other with one length: their first token
    places: Tensor | None = None  # [R L] int64, the token of each place; padding repeats a row's last one
    lens: Tensor | None = None  # [R] int64, where they differ
    targets: Tensor | None = None  # [tokens] int64, of the R L places those that are not padding
    tokens: Tensor | None = None  # [tokens] int64, their tokens of the step
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)  # by window

    def mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """[R or 1, 1, L, L] bool, True attends; None: everything does."""
        if window not in self.masks:
            self.masks[window] = self._mask(window, device)
        return self.masks[window]

    def _mask(self, window: int | None, device: torch.device) -> Tensor | None:
        place = torch.arange(self.longest, device=device)
        mask: Tensor | None = None
        if self.lens is not None:
            mask = (place < self.lens.unsqueeze(-1))[:, None, None, :]
        if window is not None and window < self.longest - 1:
            near = ((place.unsqueeze(-1) - place).abs() <= window)[None, None]
            # A place of padding sees itself: softmax over nothing would be NaN.
            mask = near if mask is None else (near & mask) | torch.eye(self.longest, dtype=torch.bool, device=device)
        return mask


class SDPAEncoderBackend(EncoderBackend):
    """Float32, bfloat16 and float16, any head size, windows."""

    name: ClassVar[str] = "sdpa_encoder"
    handles: ClassVar[frozenset[str]] = frozenset({"attention_type", "sliding_window"})
    graph_support: ClassVar[GraphSupport] = GraphSupport.NEVER

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        reasons = []
        if needs.attention_type != "encoder":
            reasons.append(f"attention type {needs.attention_type}, only encoder")
        if needs.dtype not in DTYPES:
            reasons.append(f"dtype {needs.dtype}, only {', '.join(DTYPES)}")
        return reasons

    @classmethod
    def builder_needs(cls, needs: AttentionNeeds) -> object:
        """Layers with and without a window share a step's plan."""
        return None

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> list[Rows]:
        if self.device.type == "cpu":
            return plan_rows(common.query_start_loc.tolist())
        return [padded_rows(common.query_start_loc.long(), common.num_actual_tokens, common.max_query_len)]

    def attend(
        self, layer: EncoderParams, query: Tensor, key: Tensor, value: Tensor, metadata: list[Rows], output: Tensor
    ) -> Tensor:
        for rows in metadata:
            q, k, v = (_take(x, rows) for x in (query, key, value))
            mask = rows.mask(layer.sliding_window, query.device)
            found = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=layer.scale, enable_gqa=layer.num_heads != layer.num_kv_heads
            ).transpose(1, 2)
            if rows.first is not None:
                output[rows.first : rows.first + rows.num_rows * rows.longest].view(found.shape).copy_(found)
            else:
                flat = found.reshape(-1, *output.shape[1:])
                output[rows.tokens] = flat if rows.targets is None else flat[rows.targets]
        return output


def _take(x: Tensor, rows: Rows) -> Tensor:
    """[T, N, D] -> [R, N, L, D]"""
    if rows.first is not None:
        part = x[rows.first : rows.first + rows.num_rows * rows.longest]
    else:
        part = x[rows.places]
    return part.unflatten(0, (rows.num_rows, rows.longest)).transpose(1, 2)


def plan_rows(starts: list[int]) -> list[Rows]:
    """Put rows of about one length together, the longest first. starts [R + 1]."""
    lens = [end - start for start, end in itertools.pairwise(starts)]
    order = sorted((row for row, length in enumerate(lens) if length), key=lambda row: (-lens[row], row))
    groups: list[list[int]] = []
    num_tokens = 0
    for row in order:
        if groups:
            places = (len(groups[-1]) + 1) * lens[groups[-1][0]]
            if num_tokens + lens[row] >= places * (1 - PADDING_SHARE):
                groups[-1].append(row)
                num_tokens += lens[row]
                continue
        groups.append([row])
        num_tokens = lens[row]
    return [_rows(group, starts, lens) for group in groups]


def _rows(group: list[int], starts: list[int], lens: list[int]) -> Rows:
    longest, count = lens[group[0]], len(group)
    is_even = lens[group[-1]] == longest
    if is_even and starts[group[-1]] - starts[group[0]] == (count - 1) * longest:
        return Rows(count, longest, starts[group[0]])
    place, own = torch.arange(longest), torch.tensor([lens[row] for row in group])
    first = torch.tensor([starts[row] for row in group]).unsqueeze(-1)
    places = (first + place.minimum(own.unsqueeze(-1) - 1)).flatten()
    if is_even:
        return Rows(count, longest, None, places, tokens=places)
    targets = (place < own.unsqueeze(-1)).flatten().nonzero().squeeze(-1)
    return Rows(count, longest, None, places, own, targets, places[targets])


def padded_rows(starts: Tensor, num_tokens: int, longest: int) -> Rows:
    """All rows as one call, by device ops alone. starts [R + 1] int64 on the device."""
    count, lens = len(starts) - 1, starts.diff()
    place = torch.arange(longest, device=starts.device)
    # Rows of padding have no token: they read the first one, and nothing reads them.
    places = (starts[:-1, None] + place.minimum((lens - 1).clamp(min=0).unsqueeze(-1))).clamp(
        max=max(num_tokens - 1, 0)
    )
    token = torch.arange(num_tokens, device=starts.device)
    row = torch.searchsorted(starts[1:], token, right=True)
    return Rows(count, longest, None, places.flatten(), lens.clamp(min=1), row * longest + token - starts[row], token)
