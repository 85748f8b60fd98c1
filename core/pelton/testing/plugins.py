"""Plugins for tests: just the modules that a test names, or one of Pelton's own implementations."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

from pelton import builtin, hookspecs
from pelton.entries import OpEntry
from pelton.plugins import PluginManager, Plugins, load_plugins, register


def references(device_type: str = "cpu") -> list[OpEntry]:
    """Return the torch references of core's fused ops: entries of `pelton_ops`."""
    return list(_references(device_type))


@cache
def _references(device_type: str) -> tuple[OpEntry, ...]:
    offered: list[OpEntry] = load_plugins(only=[]).entries("pelton_ops", device_type=device_type)
    return tuple(entry for entry in offered if entry.name == f"reference.{entry.op}")


class _References:
    """A plugin that offers the references alone."""

    PELTON_API = builtin.PELTON_API

    @staticmethod
    @hookspecs.hookimpl
    def pelton_ops(device_type: str) -> list[OpEntry]:
        return references(device_type)


def plugins_of(*modules: ModuleType | object) -> Plugins:
    """Core's own plugin, the torch references of its ops, and `modules`, checked as at start-up."""
    manager = PluginManager("pelton")
    manager.add_hookspecs(hookspecs)
    for index, module in enumerate((builtin, _References(), *modules)):
        register(manager, module, getattr(module, "__name__", f"test{index}"), "test")
    return Plugins(manager, [])


@cache
def built_in(hook: str, name: str = "default") -> Any:
    """Load what Pelton itself offers to `hook` by this name, as an engine does."""
    return load_plugins(only=[]).find(hook, name, setting=hook).resolve()
