"""Make the worker of a platform's device: the platform's own, or the best that plugins offer for its type of device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pelton.errors import ConfigError
from pelton.plugins import blamed, calling
from pelton.worker.interface import Worker, WorkerContext

if TYPE_CHECKING:
    from pelton.platform.interface import Platform
    from pelton.plugins import Plugins

HOOK = "pelton_workers"
ADVICE = "Choose another with --device, or fix its plugin or its device's set-up."


def worker_class(platform: Platform, plugins: Plugins) -> type[Worker]:
    """Return what `platform` names, else the first entry of `pelton_workers`. Raises `ConfigError` when there is none."""
    with blamed(*describe_platform(platform), ADVICE):
        own = platform.worker_class()
    if own is not None:
        return own
    entries = plugins.entries(HOOK, device_type=platform.device_type)
    if not entries:
        raise ConfigError(
            f"No plugin offers a worker for device type {platform.device_type!r}, and platform {platform.name!r} names none. "
            "Return one from its worker_class."
        )
    with calling(entries[0]):
        found: type[Worker] = entries[0].resolve()
    return found


def start_worker(context: WorkerContext) -> Worker:
    """Make the worker, select its device and load the weights."""
    made_by = worker_class(context.platform, context.plugins)
    with blamed(*describe_platform(context.platform), ADVICE):
        worker = made_by(context)
        worker.init_device()
    worker.load_model()
    return worker


def describe_platform(platform: Platform) -> tuple[str, str]:
    """Return for errors which platform it is, and where it is from."""
    made_by = type(platform)
    return f"Platform {platform.name!r}", f"{made_by.__module__}:{made_by.__qualname__}"
