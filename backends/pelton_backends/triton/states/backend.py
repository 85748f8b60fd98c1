"""The Triton backends of layers with states: rows of one token take one step, those with more go through their chunks.

As in `triton/backend.py` a captured step whose rows may be anything launches both over all rows, and each leaves out on the device what
is the other's. Nothing is kept from step to step but the states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pelton.attention.interface import AttentionBackend, AttentionNeeds, BoundAttention, GraphSupport
from pelton_backends.triton.runtime import has_pdl
from pelton_backends.triton.states.delta_rule import DeltaRule, KeyDeltaRule
from pelton_backends.triton.states.gated_conv import GatedConv
from pelton_backends.triton.states.lightning import Lightning
from pelton_backends.triton.states.rg_lru import RgLru
from pelton_backends.triton.states.selective_scan import SelectiveScan
from pelton_backends.triton.states.state_space import StateSpace

if TYPE_CHECKING:
    from collections.abc import Hashable

    from pelton.attention.metadata import BatchDescriptor, CommonMetadata

DTYPES = ("float16", "bfloat16", "float32")


@dataclass(slots=True)
class StateMetadata:
    """One step of one group."""

    common: CommonMetadata
    single_rows: int  # rows of one token: 0 .. single_rows - 1
    first_scanned_row: int  # rows of several: from here on
    is_mixed: bool  # rows of unknown kinds: kernels of both have all rows and look at each one's number of tokens

    @property
    def is_scanned(self) -> bool:
        """Some row may have several tokens."""
        return self.first_scanned_row < self.common.num_reqs


class Computes(Protocol):
    """Makes what computes a layer."""

    def __call__(self, layer: Any, *, pdl: bool) -> BoundAttention: ...


class TritonStates(AttentionBackend):
    """Any sizes. A subclass names the kind of its layers and what computes them."""

    attention_type: ClassVar[str]
    computes: ClassVar[Computes]
    handles: ClassVar[frozenset[str]] = frozenset({"attention_type"})
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        reasons = []
        if needs.attention_type != cls.attention_type:
            reasons.append(f"attention type {needs.attention_type}, only {cls.attention_type}")
        if needs.dtype not in DTYPES:
            reasons.append(f"dtype {needs.dtype}, only {', '.join(DTYPES)}")
        if capability is not None and capability < (8, 0):
            reasons.append(f"compute capability {capability[0]}.{capability[1]}, only 8.0 and later")
        return reasons

    @classmethod
    def builder_needs(cls, needs: AttentionNeeds) -> Hashable:
        return None  # steps are described by what they have in common

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> StateMetadata:
        rows = common.num_reqs
        if key is None:
            singles = rows if common.max_query_len <= 1 else common.num_decode_rows
            return StateMetadata(common, single_rows=singles, first_scanned_row=singles, is_mixed=False)
        if key.is_prompt:
            return StateMetadata(common, single_rows=0, first_scanned_row=0, is_mixed=False)
        is_mixed = key.uniform_query_len != 1
        return StateMetadata(common, single_rows=rows, first_scanned_row=0 if is_mixed else rows, is_mixed=is_mixed)

    def bind(self, layer: Any) -> BoundAttention:
        return type(self).computes(layer, pdl=has_pdl(self.device))


class TritonStateSpaceBackend(TritonStates):
    name: ClassVar[str] = "triton_state"
    attention_type: ClassVar[str] = "state"
    computes: ClassVar[Computes] = StateSpace


class TritonDeltaRuleBackend(TritonStates):
    name: ClassVar[str] = "triton_delta_rule"
    attention_type: ClassVar[str] = "delta_rule"
    computes: ClassVar[Computes] = DeltaRule


class TritonKeyDeltaRuleBackend(TritonStates):
    name: ClassVar[str] = "triton_key_delta_rule"
    attention_type: ClassVar[str] = "key_delta_rule"
    computes: ClassVar[Computes] = KeyDeltaRule


class TritonSelectiveScanBackend(TritonStates):
    name: ClassVar[str] = "triton_selective_scan"
    attention_type: ClassVar[str] = "selective_scan"
    computes: ClassVar[Computes] = SelectiveScan


class TritonLightningBackend(TritonStates):
    name: ClassVar[str] = "triton_lightning"
    attention_type: ClassVar[str] = "lightning"
    computes: ClassVar[Computes] = Lightning


class TritonRgLruBackend(TritonStates):
    name: ClassVar[str] = "triton_rg_lru"
    attention_type: ClassVar[str] = "rg_lru"
    computes: ClassVar[Computes] = RgLru


class TritonShortConvBackend(TritonStates):
    name: ClassVar[str] = "triton_short_conv"
    attention_type: ClassVar[str] = "short_conv"
    computes: ClassVar[Computes] = GatedConv
