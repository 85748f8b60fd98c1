"""Loading and listing plugins.

Loading is strict: a plugin that fails to import, names an unknown hook, was made for another API
version, or is asked for and missing, raises one `PluginError` with one clear line. Hooks are called at
start-up; the step loop uses the plain objects that came of it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeVar

import pluggy

from pelton import hookspecs
from pelton.entries import Entry
from pelton.errors import ConfigError, PluginError

GROUP = "pelton"
DISTRIBUTION = "pelton"
ENV_FILTER = "PELTON_PLUGINS"

E = TypeVar("E", bound=Entry)


@dataclass(slots=True)
class LoadedPlugin:
    """One loaded plugin, for the listing and the digest."""

    name: str
    distribution: str
    version: str
    module: str
    hooks: list[str] = field(default_factory=list)

    @property
    def is_builtin(self) -> bool:
        return self.distribution == DISTRIBUTION


class Plugins:
    """The loaded plugins of this process; the caller of `load_plugins` owns it."""

    def __init__(self, manager: pluggy.PluginManager, loaded: list[LoadedPlugin]) -> None:
        self.manager = manager
        self.loaded = sorted(loaded, key=lambda p: (not p.is_builtin, p.name))

    def entries(self, hook: str, **arguments: Any) -> list[Any]:
        """All entries that plugins offer for `hook`, best first by (-priority, name).

        Two entries of one kind and name: the higher priority wins; a tie is a `PluginError` (nothing may rest on install order).
        """
        caller = getattr(self.manager.hook, hook)
        found: dict[str, Entry] = {}
        for result in caller(**arguments):
            for entry in result or ():
                other = found.get(entry.name)
                if other is not None and other.priority == entry.priority and other != entry:
                    raise PluginError(
                        f"{hook}: two plugins offer {entry.name!r} with priority {entry.priority} ({other.load} and "
                        f"{entry.load}). Leave one out with {ENV_FILTER}, or give one a higher priority."
                    )
                if other is None or entry.priority > other.priority:
                    found[entry.name] = entry
        return sorted(found.values(), key=lambda e: (-e.priority, e.name))

    def find(self, hook: str, name: str, *, setting: str, **arguments: Any) -> Any:
        """The entry called `name`. Raises `ConfigError` that lists the names there are."""
        entries = self.entries(hook, **arguments)
        for entry in entries:
            if entry.name == name:
                return entry
        known = ", ".join(e.name for e in entries) or "none"
        raise ConfigError(f"{setting} is {name!r}; there is {known}. Is its plugin installed, and in {ENV_FILTER}?")

    def digest(self) -> str:
        """Equal in two processes that loaded the same set: checked at the handshake."""
        text = "\n".join(f"{p.name} {p.distribution} {p.version} {p.module}" for p in self.loaded)
        return hashlib.sha256(text.encode()).hexdigest()


def load_plugins(*, only: Sequence[str] | None = None) -> Plugins:
    """Load all plugins of the entry-point group into a fresh manager.

    only: names of third-party plugins to load; from `PELTON_PLUGINS` (comma list; unset: all, empty: built-ins
    only) when None. Built-ins always load. Raises `PluginError`.
    """
    if only is None:
        text = os.environ.get(ENV_FILTER)
        only = None if text is None else [name.strip() for name in text.split(",") if name.strip()]
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    points = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name)
    missing = set(only or ()) - {point.name for point in points}
    if missing:
        raise PluginError(
            f"{ENV_FILTER} names {', '.join(sorted(missing))}, which no installed package offers. "
            f"Installed: {', '.join(point.name for point in points)}."
        )
    loaded: dict[str, LoadedPlugin] = {}
    for point in points:
        dist = point.dist
        owner, version = (dist.name, dist.version) if dist else ("?", "?")
        if owner != DISTRIBUTION and only is not None and point.name not in only:
            continue
        if point.name in loaded:
            if loaded[point.name].module == point.value and loaded[point.name].distribution == owner:
                continue  # the same distribution found twice on sys.path
            raise PluginError(
                f"Two distributions offer a plugin named {point.name!r}: {loaded[point.name].distribution} and {owner}. "
                "Uninstall one."
            )
        try:
            module = point.load()
        except Exception as error:
            raise PluginError(
                f"Plugin {point.name!r} of {owner} {version} fails to import {point.value}: "
                f"{type(error).__name__}: {error}. Mend or uninstall it, or leave it out with {ENV_FILTER}."
            ) from error
        register(manager, module, point.name, owner)
        hooks = sorted(caller.name for caller in manager.get_hookcallers(module) or ())
        loaded[point.name] = LoadedPlugin(point.name, owner, version, point.value, hooks)
    return Plugins(manager, list(loaded.values()))


def register(manager: pluggy.PluginManager, module: ModuleType | object, name: str, owner: str) -> None:
    """Check one plugin's API range and hook names, then register it."""
    wanted = getattr(module, "PELTON_API", None)
    if not isinstance(wanted, str) or not _api_matches(wanted):
        have = ".".join(map(str, hookspecs.API_VERSION))
        raise PluginError(
            f"Plugin {name!r} of {owner} was made for hook API {wanted!r}; this Pelton has {have}. "
            f'Set PELTON_API = ">={hookspecs.API_VERSION[0]},<{hookspecs.API_VERSION[0] + 1}" in a plugin that fits, '
            "or install a matching version."
        )
    try:
        manager.register(module, name=name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(f"Plugin {name!r} of {owner}: {error}. The hooks are listed in pelton.hookspecs.") from error


def _api_matches(spec: str) -> bool:
    """A comma list of comparisons with a version of one or two numbers, such as ">=1,<2"."""
    for clause in spec.split(","):
        match = re.fullmatch(r"\s*(>=|<=|==|<|>)\s*(\d+)(?:\.(\d+))?\s*", clause)
        if match is None:
            return False
        operator, version = match[1], (int(match[2]), int(match[3] or 0))
        have = hookspecs.API_VERSION
        ok = {
            ">=": have >= version, "<=": have <= version, "==": have == version, "<": have < version, ">": have > version,
        }[operator]  # fmt: skip
        if not ok:
            return False
    return True
