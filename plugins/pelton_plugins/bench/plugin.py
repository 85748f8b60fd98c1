"""Offers the `bench` command."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import CommandEntry, Entry, LoaderEntry, SettingsEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_cli_commands() -> Sequence[CommandEntry]:
    return [
        CommandEntry(
            name="chaos",
            load="pelton_plugins.bench.soak.chaos:run",
            help="kill and stop the processes of a server while clients use it",
            doc="pelton chaos [--duration-s S] [--clients N]",
        ),
        CommandEntry(
            name="simulate",
            load="pelton_plugins.bench.simulator.command:run",
            help="what clients would see of many engines under a load, without a device",
            doc="pelton simulate --step-times FILE [--trace FILE] [-dp N] [--num-servers N]",
        ),
        CommandEntry(
            name="bench",
            load="pelton_plugins.bench.command:run",
            help="measure an engine or a server: latency, throughput, serve, stream, load, soak, table, busy, host, ...",
            doc="pelton bench latency|throughput|serve|stream|load|soak|table|cpu-table|busy|speculation|structured|host|chain|... [flags]",
        ),
    ]


@hookimpl
def pelton_model_loaders() -> Sequence[LoaderEntry]:
    return [
        LoaderEntry(
            name="cycle",
            load="pelton_plugins.bench.host.cycle_loader:CycleLoader",
            doc="random weights whose texts go round, or never repeat",
        )
    ]


@hookimpl
def pelton_executors() -> Sequence[Entry]:
    return [
        Entry(
            name="paced",
            load="pelton_plugins.bench.host.paced_executor:PacedExecutor",
            priority=-1,
            doc="no device: a token for every row at a set pace, for measurements",
        ),
        Entry(
            name="recorded",
            load="pelton_plugins.bench.recorded_executor:recorded",
            priority=-2,
            doc="the best executor, with its steps written to a file for the simulator",
        ),
    ]


@hookimpl
def pelton_settings() -> Sequence[SettingsEntry]:
    return [
        SettingsEntry(
            name="paced_executor",
            load="pelton_plugins.bench.host.paced_settings:PacedSettings",
            doc="pace of the executor without a device",
        ),
        SettingsEntry(
            name="recorded",
            load="pelton_plugins.bench.recorded_settings:RecordedSettings",
            doc="where the executor that records writes its steps",
        ),
    ]
