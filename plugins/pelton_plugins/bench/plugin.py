"""Offers the `bench` command."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import CommandEntry, LoaderEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_cli_commands() -> Sequence[CommandEntry]:
    return [
        CommandEntry(
            name="bench",
            load="pelton_plugins.bench.command:run",
            help="measure an engine or a server: latency, throughput, serve, load, soak, table, cpu-table, busy, speculation, host, chain",
            doc="pelton bench latency|throughput|serve|load|soak|table|cpu-table|busy|speculation|host|chain [flags]",
        )
    ]


@hookimpl
def pelton_model_loaders() -> Sequence[LoaderEntry]:
    return [
        LoaderEntry(
            name="cycle",
            load="pelton_plugins.bench.cycle_loader:CycleLoader",
            doc="random weights whose texts go round, or never repeat",
        )
    ]
