"""Offers the model, its op, its kind of KV cache, and its settings. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry, ModelEntry, OpEntry, SettingsEntry

PELTON_API = ">=1,<2"


@hookimpl
def pelton_settings() -> Sequence[SettingsEntry]:
    return [SettingsEntry(name="window_model", load="pelton_window_model.settings:WindowModelSettings")]


@hookimpl
def pelton_models() -> Sequence[ModelEntry]:
    return [
        ModelEntry(
            name="window",
            load="pelton_window_model.model:WindowForCausalLM",
            architectures=("WindowForCausalLM",),
            doc="a small decoder with a sliding window on every layer",
        )
    ]


@hookimpl
def pelton_fused_ops() -> Sequence[Entry]:
    return [Entry(name="branch_scale", load="pelton_window_model.ops:BRANCH_SCALE", doc="a sub-layer's output, scaled")]


@hookimpl
def pelton_ops(device_type: str) -> Sequence[OpEntry]:
    if device_type != "cpu":
        return []
    return [
        OpEntry(
            name="in_place.branch_scale",
            op="branch_scale",
            load="pelton_window_model.ops:InPlaceBranchScale",
            device_types=("cpu",),
        )
    ]


@hookimpl
def pelton_kv_cache_specs() -> Sequence[Entry]:
    return [
        Entry(
            name="batched_window",
            load="pelton_window_model.cache:KIND",
            doc="a sliding window whose blocks are given back several at a time",
        )
    ]
