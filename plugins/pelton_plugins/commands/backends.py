"""`pelton backends`: platforms, attention backends and ops for this machine and model, each with the winner and why.

The model is built on torch's meta device: the layers ask the same selectors as in a worker, and no weight is read.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import msgspec

from pelton.cli.table import format_table
from pelton.config import EngineConfig
from pelton.config.adjust import adjust_config, take_settings
from pelton.entries import BackendEntry
from pelton.errors import ConfigError
from pelton.platform.select import PlatformStatus, select_platform
from pelton.plugins import Plugins, load_plugins
from pelton_plugins.commands.platforms import describe_platforms
from pelton_plugins.flags import parse_flags

if TYPE_CHECKING:
    from pelton.model.build import BuildConfig
    from pelton.model.resolved import ResolvedModel
    from pelton.platform.interface import Platform

DOC = "Show platforms, attention backends and ops for this machine and MODEL, with the winners and the reasons."
WINNER = "<- chosen"


class BackendsArguments(msgspec.Struct, frozen=True, kw_only=True):
    """How to print it."""

    json: bool = False
    """Print JSON."""


def run(argv: list[str]) -> int:
    parsed = parse_flags(argv, [BackendsArguments], positional="model", program="pelton backends", doc=DOC)
    plugins = load_plugins()
    config, _ = adjust_config(parsed.config, plugins, parsed.explicit)
    report = describe(config, plugins, is_model_named="model" in parsed.explicit)
    if parsed.structs["BackendsArguments"].json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        print(as_text(report))
    return 1 if report["problem"] else 0


def describe(config: EngineConfig, plugins: Plugins, *, is_model_named: bool = True) -> dict[str, Any]:
    """All three tables as data. A model that was not named and is not there is left out, not an error."""
    from pelton.model.resolve import resolve_model

    platform = select_platform(config, plugins)
    choices = take_settings(config, plugins, platform.device_type)
    report: dict[str, Any] = {
        "platforms": [_platform_row(status, chosen) for status, chosen in describe_platforms(config, plugins)],
        "device": platform.describe(),
        "choices": choices,
        "device_type": platform.device_type,
        "model": None,
        "attention": [],
        "ops": [],
        "problem": None,
    }
    try:
        model = resolve_model(config, plugins)
    except ConfigError:
        if is_model_named:
            raise
        report["attention"] = [_unasked(plugins, platform)]
        return report
    report["model"] = {"name": model.name, "architecture": model.architecture, "dtype": model.dtype}
    build, report["problem"] = _ask_layers(config, model, plugins, platform)
    report["attention"] = _attention_tables(build)
    report["ops"] = [_op_row(choice) for choice in build.ops.choices]
    return report


def _platform_row(status: PlatformStatus, is_chosen: bool) -> dict[str, Any]:
    return {
        "name": status.name,
        "priority": status.entry.priority,
        "plugin": str(status.plugin),
        "reason": status.reason or "here",
        "is_chosen": is_chosen,
    }


def _ask_layers(
    config: EngineConfig, model: ResolvedModel, plugins: Plugins, platform: Platform
) -> tuple[BuildConfig, str | None]:
    """Build the model without weights; the error when something does not fit."""
    import torch

    from pelton.model.build import make_build_config
    from pelton.model.registry import build_model

    build = make_build_config(
        config,
        model,
        plugins,
        device=platform.device(0),
        device_type=platform.device_type,
        capability=platform.capability(),
        max_num_seqs=config.scheduler.max_num_seqs or platform.default_max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens or platform.default_max_num_batched_tokens,
    )
    build = replace(build, device=torch.device("meta"))
    try:
        build_model(build, model.architecture, plugins)
    except ConfigError as error:
        return build, str(error)
    return build, None


def _attention_tables(build: BuildConfig) -> list[dict[str, Any]]:
    """One table for each distinct need of the model's layers."""
    tables = []
    for selection in build.attention.selections():
        rows = [
            {
                "name": verdict.name,
                "priority": verdict.priority,
                "verdict": ", ".join(verdict.reasons) or "fits",
                "is_chosen": verdict.name in (selection.names or (selection.name,)),
            }
            for verdict in build.attention.verdicts(selection.needs)
        ]
        tables.append({"needs": _shown_needs(selection.needs), "reason": selection.reason, "rows": rows})
    return tables


def _unasked(plugins: Plugins, platform: Platform) -> dict[str, Any]:
    entries: list[BackendEntry] = plugins.entries("pelton_attention_backends", device_type=platform.device_type)
    rows = [
        {
            "name": entry.name,
            "priority": entry.priority,
            "verdict": "not asked: name a model",
            "is_chosen": False,
        }
        for entry in entries
    ]
    return {"needs": "", "reason": "", "rows": rows}


def _shown_needs(needs: Any) -> str:
    """The needs that differ from their defaults."""
    given = [
        (field.name, getattr(needs, field.name))
        for field in fields(needs)
        if getattr(needs, field.name) != field.default
    ]
    return ", ".join(f"{name}={_shown_value(value)}" for name, value in given)


def _shown_value(value: Any) -> str:
    """A matrix as in->out, a norm as its size."""
    if hasattr(value, "in_features"):
        form = "" if value.weight_format == "plain" else f" {value.weight_format}"
        return f"{value.in_features}->{value.out_features}{form}{' +bias' if value.has_bias else ''}"
    return str(value.size) if hasattr(value, "eps") else str(value)


def _op_row(choice: Any) -> dict[str, Any]:
    return {
        "op": choice.op,
        "chosen": " + ".join(choice.names),
        "needs": _shown_needs(choice.needs),
        "refused": "; ".join(f"{name}: {why}" for name, why in choice.refused),
    }


def as_text(report: dict[str, Any]) -> str:
    """The tables for people."""
    choices = [f"{name}: {value}" for name, value in report["choices"].items()]
    blocks = ["\n".join([f"device: {report['device']}", *choices])]
    rows: list[tuple[object, ...]] = [
        (row["name"], row["priority"], row["plugin"], row["reason"], WINNER if row["is_chosen"] else "")
        for row in report["platforms"]
    ]
    blocks.append(format_table(("platform", "priority", "plugin", "answer", ""), rows))
    if report["model"] is not None:
        model = report["model"]
        blocks.append(f"model: {model['name']} ({model['architecture']}, {model['dtype']})")
    for table in report["attention"]:
        title = f"attention for {table['needs']}\n" if table["needs"] else ""
        rows = [
            (row["name"], row["priority"], row["verdict"], f"{WINNER}: {table['reason']}" if row["is_chosen"] else "")
            for row in table["rows"]
        ]
        blocks.append(title + format_table(("attention backend", "priority", "verdict", ""), rows))
    if report["ops"]:
        rows = [(row["op"], row["chosen"], row["needs"], row["refused"]) for row in report["ops"]]
        blocks.append(format_table(("op", "chosen", "for", "refused"), rows))
    if report["problem"]:
        blocks.append(f"error: {report['problem']}")
    return "\n\n".join(blocks)
