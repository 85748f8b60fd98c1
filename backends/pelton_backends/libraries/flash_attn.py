"""Attention of the packages flash_attn and flash_attn_4 (FlashAttention 2, 3 and 4) over paged caches.

FlashAttention 3, whose module is `flash_attn_interface`, is taken where it is installed, then 4 (`flash_attn.cute`, which compiles its
kernels when they are first called): their pages may have any size. Version 2 reads pages of multiples of 256 tokens. The setting
`attention.flash_attn_version` names one. Dao, FlashAttention-2 (arXiv:2307.08691); Shah et al., FlashAttention-3 (arXiv:2407.08608).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pelton.attention.interface import AttentionBackend, AttentionNeeds, AttentionParams, BoundAttention, GraphSupport
from pelton.attention.metadata import BatchDescriptor, CommonMetadata
from pelton.config import EngineConfig
from pelton_backends.libraries.needs import refused

if TYPE_CHECKING:
    from torch import Tensor

PAGE = 256  # tokens, of version 2
MODULES = {3: "flash_attn_interface", 4: "flash_attn.cute", 2: "flash_attn"}
CALLS = {3: "flash_attn_with_kvcache", 4: "flash_attn_varlen_func", 2: "flash_attn_varlen_func"}


@cache
def find_library(wanted: int | None = None) -> tuple[int, Any] | str:
    """(version, module) of the first that is there, or why there is none. wanted: the only version to look for."""
    if wanted is not None and wanted not in MODULES:
        return f"flash_attn_version is {wanted}; there is {', '.join(map(str, sorted(MODULES)))}"
    for version, name in MODULES.items():
        if wanted not in (None, version):
            continue
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            why = str(error)
            continue
        if hasattr(module, CALLS[version]):  # with version 4 alone `flash_attn` is a folder without anything
            return version, module
        why = f"{name} has no {CALLS[version]}"
    which = "" if wanted is None else f" in version {wanted}"
    return f"the package flash_attn is not here{which} ({why}); pip install flash-attn or flash-attn-4"


@dataclass(slots=True)
class FlashMetadata:
    common: CommonMetadata
    key_start_loc: Tensor  # [R + 1] int32


class FlashAttentionBackend(AttentionBackend):
    """Handles bfloat16 and float16, heads of up to 256 numbers, windows and soft caps."""

    name: ClassVar[str] = "flash_attn"
    handles: ClassVar[frozenset[str]] = frozenset({"sliding_window", "logit_soft_cap"})
    graph_support: ClassVar[GraphSupport] = GraphSupport.NEVER
    needs_zeroed_blocks = True  # its kernels multiply masked values by 0
    version: ClassVar[int | None] = None  # the one that the settings name

    @classmethod
    def configured(cls, config: EngineConfig) -> type[AttentionBackend]:
        version = config.attention.flash_attn_version
        return cls if version is None else type(cls.__name__, (cls,), {"version": version})

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        found, reasons = find_library(cls.version), []
        if isinstance(found, str):
            reasons.append(found)
        elif found[0] == 2 and needs.block_size % PAGE:
            reasons.append(f"block size {needs.block_size}, only multiples of {PAGE} with FlashAttention 2")
        return reasons + refused(needs, range(8, 257, 8), "multiples of 8 to 256", capability, (8, 0))

    @classmethod
    def builder_needs(cls, needs: AttentionNeeds) -> object:
        return needs.block_size

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> FlashMetadata:
        starts = torch.zeros(common.num_reqs + 1, dtype=torch.int32, device=common.seq_lens.device)
        torch.cumsum(common.seq_lens[: common.num_reqs], 0, dtype=torch.int32, out=starts[1:])
        return FlashMetadata(common, starts)

    def bind(self, layer: AttentionParams) -> BoundAttention:
        found = find_library(self.version)
        assert not isinstance(found, str), "refused without the package"
        return FlashAttention(layer, *found)


class FlashAttention(BoundAttention):
    """A layer's call of the library."""

    layer: AttentionParams

    def __init__(self, layer: AttentionParams, version: int, module: Any) -> None:
        super().__init__(layer)
        self._version, self._module = version, module
        window = -1 if layer.sliding_window is None else layer.sliding_window - 1
        self._constants: dict[str, Any] = {
            "softmax_scale": layer.scale,
            "softcap": layer.soft_cap or 0.0,
            "window": window,
        }

    def __call__(self, query: Tensor, metadata: FlashMetadata, output: Tensor) -> None:
        common, layer, constants = metadata.common, self.layer, dict(self._constants)
        num_tokens, rows, causal = common.num_actual_tokens, common.num_reqs, common.causal
        window = constants.pop("window")
        constants |= {"causal": causal, "window_size": (window, 0 if causal else window)}
        own, table = query[:num_tokens].contiguous(), common.block_table[:rows]
        if self._version == 3:
            found = self._module.flash_attn_with_kvcache(
                own, layer.k_cache, layer.v_cache, cache_seqlens=common.seq_lens[:rows], page_table=table,
                cu_seqlens_q=common.query_start_loc[: rows + 1], max_seqlen_q=common.max_query_len, **constants,
            )  # fmt: skip
        elif self._version == 4:
            constants["window_size"] = tuple(None if side < 0 else side for side in constants["window_size"])
            found = self._module.flash_attn_varlen_func(
                own, layer.k_cache, layer.v_cache, cu_seqlens_q=common.query_start_loc[: rows + 1],
                seqused_k=common.seq_lens[:rows], max_seqlen_q=common.max_query_len, max_seqlen_k=common.max_seq_len,
                page_table=table, **constants,
            )  # fmt: skip
            found = found[0] if isinstance(found, tuple) else found  # the logarithms of sums beside it
        else:
            found = self._module.flash_attn_varlen_func(
                own, layer.k_cache, layer.v_cache, cu_seqlens_q=common.query_start_loc[: rows + 1],
                cu_seqlens_k=metadata.key_start_loc, max_seqlen_q=common.max_query_len, max_seqlen_k=common.max_seq_len,
                block_table=table, **constants,
            )  # fmt: skip
        output[:num_tokens] = found
