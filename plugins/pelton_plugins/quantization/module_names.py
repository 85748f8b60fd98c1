"""Names of modules in a checkpoint's configuration, and the matrices that they mean.

A checkpoint that reads images too calls its text `model.language_model.layers...` or `language_model.model.layers...`, where a model
here may say `model.layers...`: a module that is listed by one of these names is meant.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from pelton.errors import ConfigError

_TEXT, _MODEL, _PATTERN = "language_model.", "model.", "re:"
_OTHER_PARTS = ("visual", "vision_tower", "vision_model", "audio_tower", "projector")
"""Of a checkpoint that reads images or sound."""


def spellings(name: str) -> tuple[str, ...]:
    """Return the names that checkpoints have for the matrix `name`."""
    if any(f"{part}." in name for part in _OTHER_PARTS):
        return (name,)
    plain = name.replace(_TEXT, "", 1)
    inner = (f"{_MODEL}{_TEXT}{plain.removeprefix(_MODEL)}",) if plain.startswith(_MODEL) else ()
    return (plain, f"{_TEXT}{plain}", *inner)


def matches(pattern: str, name: str) -> bool:
    """Return whether a regular expression fits the beginning of the matrix's name. Raises `ConfigError` where it is none."""
    try:
        return any(re.match(pattern, spelling) for spelling in spellings(name))
    except re.error as error:
        raise ConfigError(
            f"config.json's quantization_config names modules by {pattern!r}, which is no regular expression: {error}."
        ) from None


def is_part_of(name: str, modules: Sequence[str]) -> bool:
    """Return whether the matrix is one of these modules, or inside one. A module may be named by its last parts, by a pattern with
    stars, or by a regular expression behind "re:"."""
    return any(_has(module, name) for module in modules)


def _has(module: str, name: str) -> bool:
    if module.startswith(_PATTERN):
        return matches(module.removeprefix(_PATTERN), name)
    if "*" in module:
        return any(fnmatchcase(spelling, module) for spelling in spellings(name))
    return any(f".{module.strip('.')}." in f".{spelling}." for spelling in spellings(name))
