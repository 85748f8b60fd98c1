"""Entries, which hooks return: a name, a priority, and where to load the thing from when it is used.

`load` is "module:attribute"; nothing is imported until the entry wins. Entries are compared by
(-priority, name): install order decides nothing. Bands: 100 vendor-tuned, 50 portable, 10 reference.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pelton.errors import PluginError
from pelton.logging import to_stderr

GENERATE, POOL = "generate", "pool"
"""Of `ModelEntry.kind`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An offer of a plugin."""

    name: str
    load: str  # "module:attribute"
    priority: int = 50
    doc: str = ""  # one line, shown by `pelton plugins`
    aliases: tuple[str, ...] = ()  # what else settings may call it; another's `name` comes first
    plugin: str = field(default="", compare=False)  # who offers it; filled in by the loader, as the next
    hook: str = field(default="", compare=False)

    def __str__(self) -> str:
        """Return for errors what it is (its hook where the class does not say), where it is loaded from and whose it is."""
        kind = type(self).__name__.removesuffix("Entry") or self.hook or "Entry"
        return f"{kind} {self.name!r} ({self.load}{f' of {self.plugin}' if self.plugin else ''})"

    def resolve(self) -> Any:
        """Import the module and return the attribute. Raises `PluginError` naming the entry and what failed."""
        module_name, colon, attribute = self.load.partition(":")
        if not (module_name and colon and attribute):
            raise PluginError(f"{self}: load is {self.load!r}; write 'module:attribute'.")
        try:
            with to_stderr():
                target: Any = importlib.import_module(module_name)
            for part in attribute.split("."):
                target = getattr(target, part)
        except (ImportError, AttributeError, SystemExit) as error:
            raise PluginError(
                f"{self} cannot be loaded: {type(error).__name__}: {error}. "
                "Install what it needs, or leave its plugin out with PELTON_PLUGINS."
            ) from error
        return target


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformEntry(Entry):
    """`probe` returns None when the device is here, else the reason it is not. It must be fast and import nothing heavy
    unless the device's driver files are there."""

    probe: Callable[[], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendEntry(Entry):
    """An attention backend: `load` gives an `AttentionBackend` class."""

    device_types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpEntry(Entry):
    """A fused op's implementation: `load` gives a `pelton.ops.interface.OpImplementation`."""

    op: str = ""
    seam: str = ""  # the old name of `op`, kept for plugins
    device_types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        name = self.op or self.seam
        if not name:
            raise PluginError(f"OpEntry {self.name!r} does not say which op it is for. Give it `op`.")
        object.__setattr__(self, "op", name)
        object.__setattr__(self, "seam", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry(Entry):
    """`load` gives a model class with the signature `Model(*, config, prefix="")`. An architecture of "*" stands for all that no
    other entry names."""

    architectures: tuple[str, ...]
    kind: str = GENERATE
    """What the model does: "generate" tokens, or "pool" (vectors or scores; see `pelton.model.interface.PoolingModel`). One that
    generates also pools, where it is asked to."""
    attends_both_ways: bool = False
    """Of a model that pools: each token attends to the later ones too, so that a prompt is computed in one step."""
    implementation: str = "pelton"
    """What the setting `model_impl` calls it, where it names one kind of models: "transformers" for its modules."""
    reserved_positions: int = 0
    """Positions that config.json counts and no token has: 2 of the RoBERTa family."""
    config_defaults: tuple[tuple[str, Any], ...] = ()
    """Fields that config.json may leave out, and their values."""

    @property
    def description(self) -> str:
        """Say for people whose modules run."""
        kind = "model" if self.implementation == "pelton" else f"modules of {self.implementation}, by"
        return f"{kind} {self.name!r} of {self.plugin}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorEntry(Entry):
    """`load` gives a `pelton.executor.interface.Executor` class."""

    runs_several: bool = False
    """It spreads one model over several ranks. Where no executor is named, sizes of parallel groups above 1 choose among those."""
    imports: tuple[str, ...] = ()
    """Modules that take long to import and that it needs in any case. An engine's process imports them while its model is found."""
    ahead: str = ""
    """"module:attribute" of what takes (config, plugins) and starts what the executor needs in any case, while the model is found. It
    returns at once what the executor gets as `ExecutorContext.ahead`; its `close` ends what no executor has taken. Empty: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderEntry(Entry):
    """`load` gives a `pelton.model.loading.WeightLoader` class; `name` is what --load-format takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEntry(Entry):
    """A CLI command: `load` gives `run(argv: list[str]) -> int`; help is shown without importing it."""

    help: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsEntry(Entry):
    """Settings of a plugin: `load` gives a frozen `msgspec.Struct`, whose fields are `plugin_config.<name>.<field>`. Each field
    has a default, and a line of text below it for `pelton plugins`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatLoggerEntry(Entry):
    """`load` gives a `StatLogger` class. With `replaces_defaults` the built-in ones are left out."""

    replaces_defaults: bool = False
    is_default: bool = False
