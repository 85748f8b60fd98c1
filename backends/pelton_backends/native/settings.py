"""Put the native plugin's settings, `plugin_config.native`, to use in a worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pelton.config.plugin_settings import read_settings
from pelton.errors import ConfigError
from pelton_backends.native import library
from pelton_backends.native.build import CannotBuildError
from pelton_backends.native.config import NativeConfig
from pelton_backends.native.isa import sets_of_cpu

if TYPE_CHECKING:
    from pelton.config import EngineConfig


def take_settings(config: EngineConfig) -> Mapping[str, str]:
    """Put them to use in this process; returns what was chosen, by name."""
    own = read_settings(config, "native", NativeConfig)
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
