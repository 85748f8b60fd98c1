"""Loading and listing plugins.

Loading is strict: a plugin that fails to import, names an unknown hook, was made for another API version, or is asked for and missing,
raises one `PluginError` with one clear line. Hooks are called at start-up; the step loop uses the plain objects that came of it.
"""

from __future__ import annotations

import difflib
import errno
import functools
import hashlib
import importlib.metadata
import inspect
import operator
import re
import reprlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import pluggy

from pelton import env, hookspecs
from pelton.entries import Entry
from pelton.errors import ConfigError, PeltonError, PluginError
from pelton.logging import get_logger, to_stderr

GROUP = "pelton"
DISTRIBUTION = "pelton"
ENV_FILTER = env.PLUGINS.name
HOOK_PREFIX = "pelton_"
IS_INSTALLED = f"Is its plugin installed, and in {ENV_FILTER}?"
FIX_IT = f"Fix the plugin, or leave it out with {ENV_FILTER}."
SLOW_LOAD_S, HANGING_LOAD_S = 0.5, 5.0

T = TypeVar("T")
_FIELDS: dict[str, Any] = {"name": (str, "text"), "load": (str, "text"), "priority": (int, "a whole number")}
_FIELDS |= dict.fromkeys(("aliases", "architectures", "device_types"), ((tuple, list), "a tuple of texts"))
_PLAIN = {name: kind for kind in (str, int, bool) for name in (kind.__name__, f"ClassVar[{kind.__name__}]")}


@dataclass(slots=True)
class LoadedPlugin:
    """One loaded plugin, for the listing and the digest."""

    name: str
    distribution: str
    version: str
    module: str
    hooks: list[str] = field(default_factory=list)
    load_s: float = 0.0
    """Seconds that its import took."""

    @property
    def is_builtin(self) -> bool:
        return self.distribution == DISTRIBUTION

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"


@dataclass(frozen=True, slots=True)
class Offer:
    """An entry, the plugin that offers it, and the plugin whose entry of the same name takes its place, if any."""

    hook: str
    entry: Any
    plugin: LoadedPlugin
    replaced_by: LoadedPlugin | None = None


class PluginManager(pluggy.PluginManager):
    """Looks for hooks among a module's functions: pluggy's own look at one name, made for any object, takes ten times as long."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        if not isinstance(plugin, ModuleType):
            return super().parse_hookimpl_opts(plugin, name)
        function = vars(plugin).get(name)
        return getattr(function, f"{GROUP}_impl", None) if isinstance(function, FunctionType) else None


class Plugins:
    """The loaded plugins of this process; the caller of `load_plugins` owns it."""

    def __init__(
        self, manager: pluggy.PluginManager, loaded: list[LoadedPlugin], left_out: Sequence[LoadedPlugin] = ()
    ) -> None:
        self.manager = manager
        self.loaded = sorted(loaded, key=lambda p: (not p.is_builtin, p.name))
        self.left_out = sorted(left_out, key=lambda p: p.name)
        """Installed, but not named in PELTON_PLUGINS."""
        self._said: set[tuple[str, str]] = set()
        self._traces = env.traces_plugins()
        # Top-level packages: of built-in plugins, of the others, and of what these offer.
        self._packages = {plugin.module.partition(".")[0]: plugin for plugin in self.loaded}

    def call_each(self, hook: str, **arguments: Any) -> Iterator[tuple[str, Any]]:
        """(plugin name, what its implementation returned), by plugin name. Raises `PluginError` naming who failed."""
        caller = getattr(self.manager.hook, hook)
        for implementation in sorted(caller.get_hookimpls(), key=lambda i: i.plugin_name):
            try:
                with to_stderr():
                    result = implementation.function(*[arguments[name] for name in implementation.argnames])
            except ConfigError:
                raise  # the operator's, not the plugin's
            except (Exception, SystemExit) as error:
                raise PluginError(
                    f"Plugin {implementation.plugin_name!r} fails in {hook}: {type(error).__name__}: {error}. {FIX_IT}"
                ) from error
            if self._traces:
                _trace(hook, arguments, implementation.plugin_name, result)
            yield implementation.plugin_name, result

    def offers(self, hook: str, **arguments: Any) -> list[Offer]:
        """All entries that plugins offer for `hook`, best first by (-priority, name), replaced ones too.

        Two entries of one kind and name: the higher priority wins, which is logged once; a tie is a `PluginError`
        (nothing may rest on install order).
        """
        by_name = {plugin.name: plugin for plugin in self.loaded}
        offers: dict[str, list[Offer]] = {}
        for plugin_name, result in self.call_each(hook, **arguments):
            plugin = by_name.get(plugin_name) or LoadedPlugin(plugin_name, "?", "?", "?")
            for entry in self._checked(hook, plugin, result):
                self._packages.setdefault(re.split("[.:]", entry.load)[0], plugin)
                entry = replace(entry, plugin=str(plugin), hook=hook)
                offers.setdefault(entry.name, []).append(Offer(hook, entry, plugin))
        found: list[Offer] = []
        for name, rivals in offers.items():
            rivals.sort(key=lambda offer: (-offer.entry.priority, offer.plugin.name))
            winner = rivals[0]
            found.append(winner)
            for loser in rivals[1:]:
                if loser.entry == winner.entry:
                    continue
                if loser.entry.priority == winner.entry.priority:
                    raise PluginError(
                        f"{hook}: {winner.plugin} and {loser.plugin} both offer {name!r} with priority "
                        f"{winner.entry.priority} ({winner.entry.load} and {loser.entry.load}). "
                        f"Leave one out with {ENV_FILTER}, or give one a higher priority."
                    )
                found.append(Offer(hook, loser.entry, loser.plugin, replaced_by=winner.plugin))
                if (hook, name) not in self._said:
                    self._said.add((hook, name))
                    get_logger(__name__).info(
                        "%s: %r of %s (priority %d) replaces that of %s (priority %d)", hook, name, winner.plugin,
                        winner.entry.priority, loser.plugin, loser.entry.priority,
                    )  # fmt: skip
        return sorted(found, key=lambda o: (-o.entry.priority, o.entry.name, o.plugin.name))

    def entries(self, hook: str, **arguments: Any) -> list[Any]:
        """The entries of `offers` that are not replaced."""
        return [offer.entry for offer in self.offers(hook, **arguments) if offer.replaced_by is None]

    def find(self, hook: str, name: str, *, setting: str, advice: str = IS_INSTALLED, **arguments: Any) -> Any:
        """The entry called `name`, or else the one with that alias. Raises `ConfigError` that lists the names there are, and `advice`."""
        entries = self.entries(hook, **arguments)
        for entry in entries:
            if entry.name == name:
                return entry
        for entry in entries:
            if name in entry.aliases:
                return entry
        known = ", ".join(e.name for e in entries) or "none"
        raise ConfigError(f"{setting} is {name!r}; available: {known}. {advice}")

    def check_config_names(self, names: Iterable[str]) -> None:
        """Raises `ConfigError` when `plugin_config` has a name that no loaded plugin and no entry has."""
        known = {name for name, _ in self.manager.list_name_plugin()}
        if known.issuperset(names):
            return
        known |= self._entry_names()
        for name in names:
            if name not in known:
                close = difflib.get_close_matches(name, sorted(known), n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ConfigError(
                    f"plugin_config has {name!r}, and no loaded plugin is called that.{hint} {IS_INSTALLED}"
                )

    def _entry_names(self) -> set[str]:
        hooks = hookspecs.hooks().values()
        names = {entry.name for hook in hooks if hook.arguments == () for entry in self.entries(hook.name)}
        device_types = [entry.name for entry in self.entries("pelton_platforms")]
        for hook in hooks:
            if hook.arguments == ("device_type",):
                for device_type in device_types:
                    names |= {entry.name for entry in self.entries(hook.name, device_type=device_type)}
        return names

    def digest(self) -> str:
        """Equal in two processes that loaded the same set: checked at the handshake."""
        text = "\n".join(f"{p.name} {p.distribution} {p.version} {p.module}" for p in self.loaded)
        return hashlib.sha256(text.encode()).hexdigest()

    def _checked(self, hook: str, plugin: LoadedPlugin, result: Any) -> Sequence[Entry]:
        wanted = hookspecs.entry_type(hook)
        if not isinstance(result, Sequence) or not all(isinstance(entry, Entry) for entry in result):
            said = "nothing" if result is None else repr(result)
            raise PluginError(
                f"Plugin {plugin} returns {said} from {hook}; return a list of entries (pelton.entries), which may be empty."
            )
        for entry in result:
            for name, (kind, said) in _FIELDS.items():
                if not isinstance(value := getattr(entry, name, ()), kind) or value == "":
                    raise PluginError(f"Plugin {plugin}: {name} of an entry of {hook} is {value!r}; give {said}.")
            if not isinstance(entry, wanted):
                raise PluginError(
                    f"Plugin {plugin} offers {entry.name!r} from {hook}, of class {type(entry).__name__}; the class has to be "
                    f"{wanted.__name__} (pelton.entries)."
                )
        return result

    def culprit(self, error: BaseException) -> tuple[LoadedPlugin, str] | None:
        """The third-party plugin whose code raised, and where: the innermost frame of the error, or of a cause of it, that is in
        a package of one, or in a method of an object of one. None when none is."""
        chain = [error]
        for current in chain:
            for frame, line in reversed(list(traceback.walk_tb(current.__traceback__))):
                module = str(frame.f_globals.get("__name__", ""))
                for owner in (module, type(frame.f_locals.get("self")).__module__):
                    plugin = self._packages.get(owner.partition(".")[0])
                    if plugin is not None and not plugin.is_builtin:
                        return plugin, f"{module}:{frame.f_code.co_qualname}, line {line}"
            cause = current.__cause__ or current.__context__
            chain += [cause] if cause is not None and cause not in chain else []
        return None

    @contextmanager
    def blaming(self, while_doing: str) -> Iterator[None]:
        """Around a part of the start: what third-party code raises becomes one line that names its plugin, not its caller. Others pass."""
        try:
            yield
        except Exception as caught:
            error = (isinstance(caught, PluginError) and caught.__cause__) or caught
            found = None if _is_told(error) else self.culprit(error)
            if found is None or (error is not caught and found[0].module.partition(".")[0] in str(caught)):
                raise
            plugin, where = found
            get_logger(__name__).debug("Plugin %s failed %s.", plugin, while_doing, exc_info=error)
            raise PluginError(
                f"Plugin {plugin} fails {while_doing}: {type(error).__name__}: {error} (in {where}). {FIX_IT}"
            ) from error


def _trace(hook: str, arguments: Mapping[str, Any], plugin_name: str, result: Any) -> None:
    """Print what one implementation of a hook gave: names of entries, a short form of anything else."""
    shown = {
        name: repr(value) if isinstance(value, (str, int)) else f"<{type(value).__name__}>"
        for name, value in arguments.items()
    }
    call = ", ".join(f"{name}={value}" for name, value in shown.items())
    if isinstance(result, Sequence) and all(isinstance(entry, Entry) for entry in result):
        gave = ", ".join(f"{entry.name} (priority {entry.priority}, {entry.load})" for entry in result) or "nothing"
    else:
        gave = reprlib.repr(result)
    print(f"plugin trace: {hook}({call}): {plugin_name} gives {gave}", file=sys.stderr, flush=True)


def calling(entry: Entry) -> AbstractContextManager[None]:
    """Around a call into what `entry` loads: what it raises becomes one line that names the entry and its plugin."""
    return blamed(str(entry).partition(" (")[0], str(entry).partition(" (")[2][:-1], FIX_IT)


def make(entry: Entry, wanted: type[T], *arguments: Any, **options: Any) -> T:
    """Load `entry` and call it. Raises `PluginError` naming it where that fails, or what it gives is not what `wanted` says."""
    with calling(entry):
        made = entry.resolve()(*arguments, **options)
    if not isinstance(made, wanted):
        raise PluginError(
            f"{entry} makes {'nothing' if made is None else f'a {type(made).__name__}'}; it has to make a "
            f"{wanted.__module__}.{wanted.__qualname__}. {FIX_IT}"
        )
    for name, kind in vars(wanted).get("__annotations__", {}).items():
        if kind in _PLAIN and not isinstance(value := getattr(made, name, None), _PLAIN[kind]):
            raise PluginError(f"{entry} makes a {type(made).__name__} whose {name} is {value!r}. {FIX_IT}")
    return made


def _is_told(error: BaseException) -> bool:
    """Return whether an error needs no plugin's name: Pelton's own say who has to act; full memory and a reader that left are nobody's."""
    torch = sys.modules.get("torch")  # not imported here: front ends do without
    return isinstance(error, (PeltonError, MemoryError, BrokenPipeError)) or bool(
        torch and isinstance(error, torch.OutOfMemoryError)
    )


@contextmanager
def blamed(what: str, load: str, advice: str) -> Iterator[None]:
    """Around a call into a plugin: what it raises becomes one line that says `what` ("Model 'x'") failed and where it is.

    Pelton's own errors say who has to act already, and full memory is nobody's mistake: both stay what they are.
    """
    try:
        yield
    except Exception as error:
        if _is_told(error):
            raise
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            raise ConfigError(f"{what} finds no memory ({error}). Free some, or raise the process's limit.") from error
        raise PluginError(f"{what} ({load}) fails: {type(error).__name__}: {error}. {advice}") from error


def load_plugins(*, only: Sequence[str] | None = None) -> Plugins:
    """Load all plugins of the entry-point group into a fresh manager.

    only: names of third-party plugins to load; from `PELTON_PLUGINS` (comma list; unset: all, empty: built-ins
    only) when None. Built-ins always load. Raises `PluginError`.
    """
    if only is None:
        only = env.plugin_names()
    manager = PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    points = _entry_points()
    missing = set(only or ()) - points.keys()
    if missing:
        name = min(missing)
        close = difflib.get_close_matches(name, points, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise PluginError(
            f"{ENV_FILTER} names {', '.join(map(repr, sorted(missing)))}, which no installed package offers.{hint} "
            f"Installed: {', '.join(points)}."
        )
    loaded: list[LoadedPlugin] = []
    left_out: list[LoadedPlugin] = []
    for name, point in points.items():
        plugin = LoadedPlugin(name, *_distribution(point.dist), point.value)
        if not plugin.is_builtin and only is not None and name not in only:
            left_out.append(plugin)
            continue
        began = time.perf_counter()
        try:
            with to_stderr(), _telling_of_a_hang(plugin):
                module = point.load()
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"Plugin {name!r} of {plugin.distribution} {plugin.version} fails to import {point.value}: "
                f"{type(error).__name__}: {error}. Fix or uninstall it, or leave it out with {ENV_FILTER}."
            ) from error
        plugin.load_s = time.perf_counter() - began
        if plugin.load_s > SLOW_LOAD_S and not plugin.is_builtin:
            get_logger(__name__).warning(
                "Plugin %s takes %.1f s to import, in every process; put what is heavy behind its entries' load.", plugin,
                plugin.load_s,
            )  # fmt: skip
        plugin.hooks = register(manager, module, name, plugin.distribution)
        loaded.append(plugin)
    return Plugins(manager, loaded, left_out)


@contextmanager
def _telling_of_a_hang(plugin: LoadedPlugin) -> Iterator[None]:
    """Around an import: say which one it is when it does not come to its end."""
    if plugin.is_builtin:
        yield
        return
    message = "Plugin %s is being imported (%s), for more than %.1f s by now. If it never ends, leave it out with %s."
    arguments = (message, plugin, plugin.module, HANGING_LOAD_S, ENV_FILTER)
    timer = threading.Timer(HANGING_LOAD_S, get_logger(__name__).warning, arguments)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def register(manager: pluggy.PluginManager, module: ModuleType | object, name: str, owner: str) -> list[str]:
    """Check one plugin's API range and hooks, then register it. Returns the names of its hooks."""
    wanted = getattr(module, "PELTON_API", None)
    if not isinstance(wanted, str) or not _api_matches(wanted):
        have = ".".join(map(str, hookspecs.API_VERSION))
        made_for = (
            "does not say what hook API it was made for" if wanted is None else f"was made for hook API {wanted!r}"
        )
        raise PluginError(
            f"Plugin {name!r} of {owner} {made_for}; this Pelton has {have}. "
            f'Set PELTON_API = ">={hookspecs.API_VERSION[0]},<{hookspecs.API_VERSION[0] + 1}" in a plugin that fits, '
            "or install a matching version."
        )
    problems: list[str] = []
    names = [hook for hook in dir(module) if _is_hook(manager, module, hook, problems)]
    if not names and not problems:
        problems.append("it implements no hook")
    if problems:
        raise PluginError(f"Plugin {name!r} of {owner}: {'; '.join(problems)}. The hooks are listed in docs/hooks.md.")
    for hook in names:
        gone = hookspecs.hooks()[hook].deprecated
        if gone is not None:
            get_logger(__name__).warning(
                "Plugin %r of %s implements %s, which is deprecated: %s", name, owner, hook, gone
            )
    try:
        manager.register(module, name=name)
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        raise PluginError(f"Plugin {name!r} of {owner}: {' '.join(str(error).split())}.") from error
    return names


def _is_hook(manager: pluggy.PluginManager, module: Any, attribute: str, problems: list[str]) -> bool:
    """Return whether the attribute implements a hook; what is wrong with it goes into `problems`."""
    options = manager.parse_hookimpl_opts(module, attribute)
    if options is None and not attribute.startswith(HOOK_PREFIX):
        return False  # most of them
    target = getattr(module, attribute)
    if options is None:
        is_own = getattr(target, "__module__", None) == getattr(module, "__name__", None)
        if inspect.isroutine(target) and is_own:
            problems.append(f"function {attribute} lacks @pelton.hookimpl")
        return False
    known = hookspecs.hooks()
    hook = options.get("specname") or attribute
    if hook not in known:
        close = difflib.get_close_matches(hook, known, n=1)
        problems.append(f"unknown hook {hook!r}" + (f" (near to {close[0]!r})" if close else ""))
    elif hook != attribute:
        problems.append(f"{attribute} implements {hook} under another name; call the function {hook}")
    elif options.get("wrapper") or options.get("hookwrapper"):
        problems.append(f"{hook} is a wrapper, which would change what other plugins return; return entries")
    elif inspect.iscoroutinefunction(target):
        problems.append(f"{hook} is a coroutine function; return entries from a plain one")
    else:
        allowed = ", ".join(known[hook].arguments) or "no argument"
        for name, parameter in _parameters(target).items():
            if name not in known[hook].arguments:
                problems.append(f"{hook} has argument {name!r}; it may take {allowed}")
            elif parameter.default is not parameter.empty:
                problems.append(f"{hook} gives {name!r} a default, and would never be told its value; leave it out")
    return True


@functools.lru_cache(maxsize=1024)
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return those of a function, each asked for once a process."""
    return inspect.signature(function).parameters


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    """The group's entry points by name, in the order of names."""
    points: dict[str, importlib.metadata.EntryPoint] = {}
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name):
        other = points.setdefault(point.name, point)
        owner, other_owner = (_distribution(p.dist)[0] for p in (point, other))
        # The same distribution found twice on sys.path is not a conflict.
        if (point.value, owner) != (other.value, other_owner):
            raise PluginError(
                f"Two distributions offer a plugin named {point.name!r}: {other_owner} and {owner}. Uninstall one."
            )
    return points


@functools.lru_cache(maxsize=64)
def _distribution(dist: importlib.metadata.Distribution | None) -> tuple[str, str]:
    """Return its name and version, each of which parses all of its metadata."""
    return (dist.name, dist.version) if dist else ("?", "?")


def _api_matches(spec: str) -> bool:
    """A comma list of comparisons with a version of one or two numbers, such as ">=1,<2"."""
    comparisons = {">=": operator.ge, "<=": operator.le, "==": operator.eq, "<": operator.lt, ">": operator.gt}
    for clause in spec.split(","):
        match = re.fullmatch(r"\s*(>=|<=|==|<|>)\s*(\d+)(?:\.(\d+))?\s*", clause)
        if match is None:
            return False
        if not comparisons[match[1]](hookspecs.API_VERSION, (int(match[2]), int(match[3] or 0))):
            return False
    return True
