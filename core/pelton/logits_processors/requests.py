"""Which logits processors a request asks for, and with what: found out and checked in the front end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pelton import limits
from pelton.config.engine import did_you_mean
from pelton.errors import NotSupportedError, PluginError, RequestError
from pelton.logits_processors.interface import LogitsProcessor
from pelton.messages.request import check_plain_data

if TYPE_CHECKING:
    from pelton.plugins import Plugins
    from pelton.sampling_params import SamplingParams

PARAM = "logits_processor_args"


def load_processors(plugins: Plugins) -> dict[str, type[LogitsProcessor]]:
    """Every logits processor that plugins offer, by name, in the order in which they apply."""
    found: dict[str, type[LogitsProcessor]] = {}
    for entry in plugins.entries("pelton_logits_processors"):
        target = entry.resolve()
        if not (isinstance(target, type) and issubclass(target, LogitsProcessor)):
            raise PluginError(f"{entry} is not a subclass of pelton.logits_processors.interface.LogitsProcessor.")
        found[entry.name] = target
    return found


def wanted_args(
    params: SamplingParams, offered: Mapping[str, type[LogitsProcessor]], running: frozenset[str] | None
) -> dict[str, Any] | None:
    """Return what the request gives each processor that it has, in their order; None where it has none.

    running: those that the engine's workers made; None: not known. Raises `RequestError`.
    """
    given = params.logits_processor_args or {}
    if params.logits_processor_args is not None:
        check_plain_data(PARAM, params.logits_processor_args, limits.MAX_EXTRA_ARGS_BYTES)
    for name in given:
        if name not in offered:
            known = ", ".join(offered) or "none"
            raise RequestError(
                f"{PARAM} names {name!r}, which no plugin here offers.{did_you_mean(name, offered)} There is: {known}.",
                param=PARAM,
            )
    extra = params.extra_args or {}
    found: dict[str, Any] = {}
    for name, processor in offered.items():
        if name in given or name in extra:
            found[name] = given[name] if name in given else extra[name]
            _check(processor, name, found[name], params)
        elif processor.applies_to_all:
            found[name] = None
        else:
            continue
        if running is not None and name not in running:
            raise NotSupportedError(f"This engine's workers run no logits processor {name!r}.", param=PARAM)
    return found or None


def _check(processor: type[LogitsProcessor], name: str, args: Any, params: SamplingParams) -> None:
    try:
        processor.check(args, params)
    except RequestError:
        raise
    except (ValueError, TypeError) as error:
        raise RequestError(f"{PARAM}.{name}: {error}", param=f"{PARAM}.{name}") from error
    except Exception as error:
        raise PluginError(
            f"Logits processor {name!r} fails to check its argument: {type(error).__name__}: {error}"
        ) from error
