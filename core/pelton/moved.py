"""Old public places of modules and names: plugins still find them there, with a warning, for one minor version.

A module is the same object under both names. It is imported by its old name once in a process, and warned of once. The table is
read when somebody asks for a name that is not there: of other trees it has only the names, which nothing here imports before.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


@cache
def _table() -> dict[str, Any]:
    import tomllib  # hardly any process needs it

    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


@cache
def modules() -> dict[str, str]:
    """Return the modules that have moved: old name to new."""
    kept = {
        f"{old}.{name}": f"{new}.{name}"
        for old, folders in _table()["folders"].items()
        for new, known in folders.items()
        for name in known
    }
    return {**kept, **_table()["modules"]}


@cache
def names() -> dict[str, dict[str, str]]:
    """Return the names that have moved, by the module that had them: it has `names_of` as its `__getattr__`. Modules of other trees
    hold theirs themselves."""
    return {
        old: {name: f"{new}.{name}" for new, known in homes.items() for name in known}
        for old, homes in _table()["names"].items()
    }


class _OldModules(MetaPathFinder, Loader):
    """Finds a module of `modules` by its old name, after all other finders have failed to."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_old = fullname.startswith("pelton.") and fullname in modules()
        return ModuleSpec(fullname, self) if is_old else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        _warn(old, modules()[old])
        sys.modules[old] = importlib.import_module(modules()[old])


def install() -> None:
    """Let old modules be found in this process."""
    if not any(isinstance(finder, _OldModules) for finder in sys.meta_path):
        sys.meta_path.append(_OldModules())


def names_of(module: str, known: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module that had the `known` names, by default those of the table."""

    def get(name: str) -> Any:
        found = None
        if not name.startswith("__"):  # an import asks for __path__
            found = (names()[module] if known is None else known).get(name)
        if found is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(f"{module}.{name}", found)
        home, _, new = found.rpartition(".")
        return getattr(importlib.import_module(home), new)

    return get


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is {new} now; import it from there.", DeprecationWarning, stacklevel=3)
