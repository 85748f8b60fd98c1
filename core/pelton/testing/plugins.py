"""A `Plugins` of just the modules a test names, without looking at what is installed."""

from __future__ import annotations

from types import ModuleType

import pluggy

from pelton import builtin, hookspecs
from pelton.plugins import Plugins, register


def plugins_of(*modules: ModuleType | object) -> Plugins:
    """Core's own plugin and `modules`, checked as at start-up."""
    manager = pluggy.PluginManager("pelton")
    manager.add_hookspecs(hookspecs)
    for index, module in enumerate((builtin, *modules)):
        register(manager, module, getattr(module, "__name__", f"test{index}"), "test")
    return Plugins(manager, [])
