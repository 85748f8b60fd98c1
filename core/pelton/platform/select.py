"""Choose the platform: the device that this process computes on.

Entries are asked by (-priority, name); a probe that answers "not here" is a reason in the report, never an error.
Front ends call this too, so nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pelton import moved
from pelton.config import EngineConfig
from pelton.errors import ConfigError, PluginError
from pelton.platform.interface import Platform
from pelton.plugins import make

if TYPE_CHECKING:
    from pelton.entries import PlatformEntry
    from pelton.plugins import LoadedPlugin, Plugins
else:
    __getattr__ = moved.names_of(__name__)

HOOK = "pelton_platforms"


@dataclass(frozen=True, slots=True)
class PlatformStatus:
    """One platform that a plugin offers: for the choice, and for `pelton backends`."""

    entry: PlatformEntry
    plugin: LoadedPlugin
    reason: str | None
    """Why it is not here; None when it is."""

    @property
    def name(self) -> str:
        return self.entry.name

    def __str__(self) -> str:
        return f"{self.name}: {self.reason or 'here'}"


def platform_statuses(plugins: Plugins) -> list[PlatformStatus]:
    """Every platform on offer, best first, asked whether its device is here."""
    offers = [offer for offer in plugins.offers(HOOK) if offer.replaced_by is None]
    return [PlatformStatus(offer.entry, offer.plugin, _probe(offer.entry, offer.plugin)) for offer in offers]


def choose_platform(statuses: list[PlatformStatus], device: str | None) -> PlatformStatus:
    """The platform called `device`, or the best that is here. Raises `ConfigError` with every platform's reason."""
    if device is not None:
        return _named(statuses, device)
    here = [status for status in statuses if status.reason is None]
    strangers = [status for status in here if not status.plugin.is_builtin]
    if len(strangers) > 1:
        names = ", ".join(f"{status.name} of {status.plugin}" for status in strangers)
        raise ConfigError(
            f"More than one plugin brings a platform whose device is here: {names}. "
            f"Choose with --device {strangers[0].name}, or leave one out with PELTON_PLUGINS."
        )
    if here:
        return here[0]
    tried = "; ".join(map(str, statuses)) or "no plugin offers one"
    raise ConfigError(f"No supported device was found. Tried: {tried}.")


def select_platform(config: EngineConfig, plugins: Plugins) -> Platform:
    """The platform object of the device that `parallel.device` names, or of the best device that is here."""
    status = choose_platform(platform_statuses(plugins), config.parallel.device)
    return make(status.entry, Platform)  # type: ignore[type-abstract]


def _named(statuses: list[PlatformStatus], device: str) -> PlatformStatus:
    for status in statuses:
        if status.name == device:
            if status.reason is not None:
                raise ConfigError(
                    f"device is {device!r}, and it cannot be used here: {status.reason}. "
                    "Leave device unset to take the best one that is here."
                )
            return status
    known = ", ".join(status.name for status in statuses) or "none"
    raise ConfigError(f"device is {device!r}; available: {known}. Is its plugin installed, and in PELTON_PLUGINS?")


def _probe(entry: PlatformEntry, plugin: LoadedPlugin) -> str | None:
    try:
        return entry.probe()
    except Exception as error:
        raise PluginError(
            f"Platform {entry.name!r} of {plugin} fails in its probe: {type(error).__name__}: {error}. "
            "A probe says why its device is not here; it does not raise. `pelton plugins --check` looks at every plugin by itself."
        ) from error
