"""Old public places of modules and names: plugins still find them there, with a warning, for one minor version.

A module is the same object under both names. It is imported by its old name once in a process, and warned of once.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = {
    "pelton.attention.layer": "pelton.layers.attention",
    "pelton.attention.mla": "pelton.layers.latent_attention",
    "pelton.cache_folder": "pelton.utils.cache_folder",
    "pelton.engine.messages": "pelton.messages.outputs",
    "pelton.graphs.tape": "pelton.graphs.call_graph",
    "pelton.garbage": "pelton.utils.garbage",
    "pelton.large_pages": "pelton.utils.large_pages",
    "pelton.ops.reference_step": "pelton.worker.reference_step",
    "pelton.quantization.blocks": "pelton.ops.packed_blocks",
    "pelton.request": "pelton.messages.request",
    "pelton.scheduler.output": "pelton.messages.step",
    "pelton.worker.staging": "pelton.utils.staging",
}
NAMES = {
    "pelton.graphs.call_graph": {
        "Tape": "pelton.graphs.call_graph:CallGraph",
        "TapeRecorder": "pelton.graphs.call_graph:CallGraphRecorder",
    },
    "pelton.layers.linear": {
        "PlainWeights": "pelton.quantization.plain:PlainWeights",
        "QuantizationMethod": "pelton.quantization.interface:QuantizationMethod",
        "make_bias": "pelton.quantization.plain:make_bias",
    },
    "pelton.tokenizer": {"load_tokenizer": "pelton.model.resolve:load_tokenizer"},
}
"""Names that are others now, or elsewhere, by the module that had them: it has `names_of` as its `__getattr__`."""


class _OldModules(MetaPathFinder, Loader):
    """Finds a module of `MODULES` by its old name, after all other finders have failed to."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        _warn(old, MODULES[old])
        sys.modules[old] = importlib.import_module(MODULES[old])


def install() -> None:
    """Let old modules be found in this process."""
    if not any(isinstance(finder, _OldModules) for finder in sys.meta_path):
        sys.meta_path.append(_OldModules())


def names_of(module: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module of `NAMES`."""

    def get(name: str) -> Any:
        found = NAMES[module].get(name)
        if found is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(f"{module}.{name}", found.replace(":", "."))
        home, _, new = found.partition(":")
        return getattr(importlib.import_module(home), new)

    return get


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is {new} now; import it from there.", DeprecationWarning, stacklevel=3)
