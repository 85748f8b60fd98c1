"""Hook functions of data parallelism."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry, SettingsEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"
_PACKAGE = "pelton_plugins.data_parallel"


@hookimpl
def pelton_engine_clients() -> Sequence[Entry]:
    return [
        Entry(name="load", load=f"{_PACKAGE}.client:SeveralEngines", priority=10, doc="least of 4 x waiting + running"),
        Entry(
            name="prefix",
            load=f"{_PACKAGE}.prefix_router:ByPrefix",
            priority=10,
            doc="who has computed the prompt's beginning, unless it has much more to do",
        ),
    ]


@hookimpl
def pelton_settings() -> Sequence[SettingsEntry]:
    return [
        SettingsEntry(
            name="data_parallel", load=f"{_PACKAGE}.settings:PrefixSettings", doc="routing by prefix"
        )
    ]  # fmt: skip
