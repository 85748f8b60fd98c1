"""Offers the model, its kind of KV cache, and its settings. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry, ModelEntry, SettingsEntry

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
def pelton_kv_cache_specs() -> Sequence[Entry]:
    return [
        Entry(
            name="batched_window",
            load="pelton_window_model.cache:KIND",
            doc="a sliding window whose blocks are given back several at a time",
        )
    ]
