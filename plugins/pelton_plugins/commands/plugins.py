"""`pelton plugins`: what is loaded, from which distribution, what it offers, and what became of each offer.

`--check` loads every installed plugin by itself and says what is wrong with each; it works when a start does not. `new` and
`check` are for authors: `plugin_author.py`.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import msgspec
import pluggy

from pelton import hookspecs
from pelton.cli.table import format_table
from pelton.config import EngineConfig
from pelton.config.engine import did_you_mean, struct_defaults
from pelton.config.plugin_settings import settings_struct
from pelton.entries import Entry, PlatformEntry, SettingsEntry
from pelton.errors import ConfigError, PluginError
from pelton.metrics.manager import chosen_entries
from pelton.model.registry import find_model
from pelton.plugins import GROUP, Offer, Plugins, load_plugins, register
from pelton_plugins.commands import plugin_author
from pelton_plugins.commands.platforms import describe_platforms
from pelton_plugins.flags import parse_flags
from pelton_plugins.flags.field_docs import field_docs

DEVICE_TYPES = ("cpu", "cuda", "rocm")
"""Asked for besides those of the platforms that are here."""

SHOWN_NOT_HERE = 3


class PluginsArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments: what to show."""

    check: bool = False
    """Load each installed plugin by itself, resolve what it offers, and say what is wrong."""
    json: bool = False
    """Print JSON."""


DOC = """List the loaded plugins and what they offer; `list` may be left out.

For authors of plugins:
  pelton plugins new KIND NAME [--folder DIR]   write a package that works, with its test
  pelton plugins check PACKAGE                  put an installed package through the conformance suites"""


def run(argv: list[str]) -> int:
    if argv[:1] in (["new"], ["check"]):
        return plugin_author.run(argv)
    if argv[:1] == ["list"]:
        argv = argv[1:]
    elif argv and not argv[0].startswith("-"):
        hint = did_you_mean(argv[0], ("list", "new", "check"))
        raise ConfigError(
            f"pelton plugins has no {argv[0]!r}.{hint} Write pelton plugins [list], new KIND NAME or check PACKAGE."
        )
    parsed = parse_flags(
        argv, [PluginsArguments], positional=None, program="pelton plugins", doc=DOC, engine=False, environ={}
    )
    arguments: PluginsArguments = parsed.structs["PluginsArguments"]
    if arguments.check:
        return check(as_json=arguments.json)
    listing = describe(load_plugins())
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(listing), indent=2).decode())
    else:
        print(_as_text(listing))
    return 0


def describe(plugins: Plugins) -> list[dict[str, Any]]:
    """One record a plugin, with its offers and what became of each; plugins that were left out come last."""
    offers = all_offers(plugins)
    chosen = default_choices(plugins)
    records = []
    for plugin in plugins.loaded:
        mine = [(offer, where) for offer, where in offers if offer.plugin.name == plugin.name]
        records.append(
            {
                "name": plugin.name,
                "distribution": plugin.distribution,
                "version": plugin.version,
                "module": plugin.module,
                "loaded": True,
                "hooks": plugin.hooks,
                "entries": [_entry_record(offer, where, chosen) for offer, where in mine],
            }
        )
    records += [
        {
            "name": plugin.name,
            "distribution": plugin.distribution,
            "version": plugin.version,
            "module": plugin.module,
            "loaded": False,
            "hooks": [],
            "entries": [],
        }
        for plugin in plugins.left_out
    ]
    return records


def all_offers(plugins: Plugins) -> list[tuple[Offer, str]]:
    """Every offer of every hook that returns entries, with the device types it was offered for ("" where none is asked)."""
    found: list[tuple[Offer, str]] = []
    for hook in hookspecs.hooks().values():
        if hook.arguments == ():
            found += [(offer, "") for offer in plugins.offers(hook.name)]
        elif hook.arguments == ("device_type",):
            where: dict[tuple[str, str], tuple[Offer, list[str]]] = {}
            for device_type in device_types(plugins):
                for offer in plugins.offers(hook.name, device_type=device_type):
                    entry_types = getattr(offer.entry, "device_types", ())
                    if not entry_types or device_type in entry_types:
                        where.setdefault((offer.plugin.name, offer.entry.name), (offer, []))[1].append(device_type)
            found += [(offer, ", ".join(types)) for offer, types in where.values()]
    return found


def device_types(plugins: Plugins) -> list[str]:
    """Device types to ask backends for, without loading a platform."""
    names = [entry.name for entry in plugins.entries("pelton_platforms")]
    return list(dict.fromkeys([*DEVICE_TYPES, *names]))


def default_choices(plugins: Plugins) -> dict[str, set[str]]:
    """Hook to the names that an engine takes when no setting names another. Hooks whose entries are picked by what a
    model or a request names (models, loaders, commands, ...) are not in it."""
    config = EngineConfig()
    best = ("pelton_executors", "pelton_kv_cache_managers", "pelton_structured_output_backends")
    choices = {hook: {entry.name for entry in plugins.entries(hook)[:1]} for hook in best}
    choices["pelton_schedulers"] = {config.scheduler.scheduler}
    choices["pelton_scheduling_policies"] = {config.scheduler.scheduling_policy}
    choices["pelton_stat_loggers"] = {entry.name for entry in chosen_entries(plugins)}
    choices["pelton_platforms"] = {
        status.name for status, is_chosen in describe_platforms(config, plugins) if is_chosen
    }
    return choices


def _entry_record(offer: Offer, where: str, chosen: dict[str, set[str]]) -> dict[str, Any]:
    entry = offer.entry
    record = {
        "hook": offer.hook,
        "name": entry.name,
        "priority": entry.priority,
        "load": entry.load,
        "device_types": where,
        "doc": entry.doc or getattr(entry, "help", ""),
        "status": _status(offer, chosen),
    }
    if isinstance(entry, SettingsEntry):
        struct = settings_struct(entry)
        docs, defaults = field_docs(struct), struct_defaults(struct)
        record["settings"] = {
            f"plugin_config.{entry.name}.{field}": {
                "default": msgspec.to_builtins(defaults[field]),
                "doc": docs.get(field, ""),
            }
            for field in struct.__struct_fields__
        }
    return record


def _status(offer: Offer, chosen: dict[str, set[str]]) -> str:
    if offer.replaced_by is not None:
        return f"replaced by {offer.replaced_by}"
    if offer.entry.name in chosen.get(offer.hook, ()):
        return "chosen"
    if isinstance(offer.entry, PlatformEntry):
        reason = offer.entry.probe()
        return "here, for --device " + offer.entry.name if reason is None else f"not here: {reason}"
    return "offered"


def _as_text(listing: list[dict[str, Any]]) -> str:
    blocks = []
    for record in listing:
        origin = f"{record['distribution']} {record['version']}"
        if not record["loaded"]:
            blocks.append(
                f"{record['name']}  ({origin}, {record['module']}): left out, PELTON_PLUGINS does not name it"
            )
            continue
        rows = [
            (
                entry["hook"].removeprefix("pelton_"),
                entry["name"],
                entry["priority"],
                entry["status"] + (f" for {entry['device_types']}" if entry["device_types"] else ""),
                entry["doc"],
            )
            for entry in record["entries"]
        ]
        table = (
            format_table(("kind", "name", "priority", "status", "about"), rows, indent="  ") if rows else "  no entries"
        )
        settings = {name: of for entry in record["entries"] for name, of in entry.get("settings", {}).items()}
        lines = [f"  --{_as_flag(name)} (default {of['default']!r})  {of['doc']}" for name, of in settings.items()]
        blocks.append("\n".join([f"{record['name']}  ({origin}, {record['module']})", table, *lines]))
    return "\n\n".join(blocks)


def _as_flag(name: str) -> str:
    return name.replace("plugin_config", "plugin-config", 1)


def check(*, as_json: bool = False) -> int:
    """Load each plugin into a manager of its own, call its hooks and resolve its entries; 1 when something is wrong.

    What is for a device that is not here may need what only such a machine has: it is listed, not loaded.
    """
    results: list[dict[str, Any]] = []
    alone: list[tuple[dict[str, Any], Plugins]] = []
    here: set[str] = set()
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name):
        owner = f"{point.dist.name} {point.dist.version}" if point.dist else "?"
        result: dict[str, Any] = {"name": point.name, "distribution": owner, "problems": [], "not_here": []}
        results.append(result)
        manager = pluggy.PluginManager(GROUP)
        manager.add_hookspecs(hookspecs)
        try:
            register(manager, point.load(), point.name, owner)
            plugins = Plugins(manager, [])
            for entry in plugins.entries("pelton_platforms"):
                here |= _check_platform(entry, result)
        except Exception as error:
            result["problems"].append(_told(error))
        else:
            alone.append((result, plugins))
    for result, plugins in alone:
        _check_entries(plugins, here, result)
    try:
        _check_together(load_plugins())
    except PluginError as error:
        if not any(result["problems"] for result in results):
            results.append({"name": "all together", "distribution": "", "problems": [str(error)], "not_here": []})
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(results), indent=2).decode())
    else:
        for result in results:
            print(f"{'ok  ' if not result['problems'] else 'FAIL'} {result['name']} ({result['distribution']})")
            for problem in result["problems"]:
                print(f"       {problem}")
            if result["not_here"]:
                print(f"       not here, so not loaded: {_shortened(result['not_here'])}")
    return 1 if any(result["problems"] for result in results) else 0


def _check_together(plugins: Plugins) -> None:
    """Raise `PluginError` where two of them offer one name, or models for one architecture, with one priority."""
    all_offers(plugins)
    models = plugins.entries("pelton_models")
    for architecture in dict.fromkeys(name for model in models for name in model.architectures):
        find_model(models, architecture)


def _shortened(names: list[str]) -> str:
    rest = len(names) - SHOWN_NOT_HERE
    return ", ".join(names[:SHOWN_NOT_HERE]) + (f" and {rest} more" if rest > 0 else "")


def _check_platform(entry: PlatformEntry, result: dict[str, Any]) -> set[str]:
    """The device types that the platform brings: none when its device is not here. Problems go into `result`."""
    try:
        reason = entry.probe()
    except Exception as error:
        result["problems"].append(f"Platform {entry.name!r} fails in its probe: {_told(error)}")
        return set()
    if reason is not None:
        result["not_here"].append(f"{entry.name} ({reason})")
        return set()
    try:
        return {entry.name, entry.resolve().device_type}
    except Exception as error:
        result["problems"].append(_told_of(entry, error))
        return {entry.name}


def _check_entries(plugins: Plugins, here: set[str], result: dict[str, Any]) -> None:
    """Resolve all but platforms. here: device types of this machine. Problems go into `result`."""
    try:
        offers = all_offers(plugins)
    except Exception as error:
        result["problems"].append(_told(error))
        return
    for offer, where in offers:
        if isinstance(offer.entry, PlatformEntry):
            continue
        if where and here.isdisjoint(where.split(", ")):
            result["not_here"].append(f"{offer.entry.name} (for {where})")
            continue
        try:
            offer.entry.resolve()
        except Exception as error:
            result["problems"].append(_told_of(offer.entry, error))


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"


def _told_of(entry: Entry, error: Exception) -> str:
    is_told = isinstance(error, PluginError)
    return str(error) if is_told else f"{type(entry).__name__} {entry.name!r} ({entry.load}) fails: {_told(error)}"
