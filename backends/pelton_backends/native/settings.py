"""The native plugin's settings: `plugin_config.native`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from pelton.errors import ConfigError
from pelton_backends.native import library
from pelton_backends.native.build import CannotBuildError
from pelton_backends.native.isa import sets_of_cpu

if TYPE_CHECKING:
    from pelton.config import EngineConfig


class NativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may be set."""

    isa: str | None = None
    """Instruction set that the kernels are compiled for; by default the best that CPU and compiler have."""


def take_settings(config: EngineConfig) -> Mapping[str, str]:
    """Put them to use in this process; returns what was chosen, by name."""
    try:
        own = msgspec.convert(config.plugin_config.get("native", {}), NativeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"plugin_config.native: {error}. It takes isa, the name of an instruction set.") from error
    try:
        library.use_isa(own.isa)
        chosen = library.isa_in_use().name
    except CannotBuildError as error:
        if own.isa is not None:
            raise ConfigError(
                f"plugin_config.native.isa is {own.isa!r}, and there are no kernels in C: {error}."
            ) from error
        return {}
    return {"instructions": f"{chosen} (this CPU has {', '.join(one.name for one in sets_of_cpu())})"}
