"""`model_loader_extra_config`, read as the settings of the loader that `load_format` names."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pelton.config import EngineConfig
from pelton.errors import ConfigError

S = TypeVar("S", bound=msgspec.Struct)


def read_extra_config(config: EngineConfig, struct: type[S], example: str) -> S:
    """The settings as `struct`. Raises `ConfigError` naming the field, with `example`."""
    given = config.load.model_loader_extra_config
    try:
        return msgspec.convert(given, struct)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(
            f"model_loader_extra_config of load_format {config.load.load_format!r} is {given}: {error}. For example: {example}."
        ) from error
