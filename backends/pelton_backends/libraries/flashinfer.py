"""Attention of the package flashinfer over paged caches: Ye et al., FlashInfer (arXiv:2501.01005).

Its wrappers plan a step from lengths on the host, once for all layers with the same constants.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pelton.attention.interface import AttentionBackend, AttentionNeeds, AttentionParams, BoundAttention, GraphSupport
from pelton.attention.metadata import BatchDescriptor, CommonMetadata
from pelton_backends.libraries.needs import refused

if TYPE_CHECKING:
    from torch import Tensor

HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 * 2**20


@cache
def find_library() -> Any:
    """The module, or why it is not there."""
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        return f"the package flashinfer is not here ({error}); pip install flashinfer-python"


@cache
def workspace(device: torch.device) -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@dataclass(slots=True)
class FlashInferMetadata:
    """One step of one group; planned once for each set of constants."""

    common: CommonMetadata
    plans: dict[tuple[Any, ...], Any] = field(default_factory=dict)


class FlashInferBackend(AttentionBackend):
    """Handles bfloat16 and float16, heads of 64, 128 and 256 numbers, windows and soft caps."""

    name: ClassVar[str] = "flashinfer"
    handles: ClassVar[frozenset[str]] = frozenset({"sliding_window", "logit_soft_cap"})
    graph_support: ClassVar[GraphSupport] = GraphSupport.NEVER
    needs_zeroed_blocks = True  # its kernels multiply masked values by 0

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        found = find_library()
        reasons = [found] if isinstance(found, str) else []
        return reasons + refused(needs, HEAD_DIMS, ", ".join(map(str, HEAD_DIMS)), capability, (7, 5))

    @classmethod
    def builder_needs(cls, needs: AttentionNeeds) -> object:
        return needs.block_size

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> FlashInferMetadata:
        return FlashInferMetadata(common)

    def bind(self, layer: AttentionParams) -> BoundAttention:
        return FlashInferAttention(layer)


class FlashInferAttention(BoundAttention):
    """A layer's call of the library."""

    layer: AttentionParams

    def __call__(self, query: Tensor, metadata: FlashInferMetadata, output: Tensor) -> None:
        layer = self.layer
        key = (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.scale, layer.sliding_window, layer.soft_cap)
        wrapper = metadata.plans.get(key)
        if wrapper is None:
            wrapper = metadata.plans[key] = plan(metadata.common, layer, query.dtype)
        num_tokens = metadata.common.num_actual_tokens
        found = wrapper.run(query[:num_tokens].contiguous(), (layer.k_cache, layer.v_cache))
        output[:num_tokens] = found


def plan(common: CommonMetadata, layer: AttentionParams, dtype: torch.dtype) -> Any:
    """A wrapper that has planned this step."""
    device, size = common.seq_lens.device, layer.k_cache.shape[1]
    rows = common.num_reqs
    lengths = common.seq_lens[:rows].cpu()
    counts = (lengths + size - 1) // size
    indptr = torch.zeros(rows + 1, dtype=torch.int32)
    indptr[1:] = counts.cumsum(0)
    table = common.block_table[:rows].cpu()
    indices = torch.cat([table[row, : int(counts[row])] for row in range(rows)]).to(torch.int32).to(device)
    last = torch.where(lengths > 0, (lengths - 1) % size + 1, 0).to(torch.int32)
    wrapper = find_library().BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD")
    wrapper.plan(
        common.query_start_loc[: rows + 1].cpu(), indptr, indices, last, layer.num_heads, layer.num_kv_heads, layer.head_dim, size,
        causal=common.causal, sm_scale=layer.scale, logits_soft_cap=layer.soft_cap,
        window_left=-1 if layer.sliding_window is None else layer.sliding_window - 1, q_data_type=dtype,
    )  # fmt: skip
    return wrapper
