"""Plugins for tests: just the modules that a test names, or one of Pelton's own implementations."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import pluggy

from pelton import builtin, hookspecs
from pelton.plugins import Plugins, load_plugins, register


def plugins_of(*modules: ModuleType | object) -> Plugins:
    """Core's own plugin and `modules`, checked as at start-up."""
    manager = pluggy.PluginManager("pelton")
    manager.add_hookspecs(hookspecs)
    for index, module in enumerate((builtin, *modules)):
        register(manager, module, getattr(module, "__name__", f"test{index}"), "test")
    return Plugins(manager, [])


@cache
def built_in(hook: str, name: str = "default") -> Any:
    """Load what Pelton itself offers to `hook` by this name, as an engine does."""
    return load_plugins(only=[]).find(hook, name, setting=hook).resolve()
