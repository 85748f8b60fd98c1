"""Names of modules in a checkpoint's configuration, and the matrices that they mean.

A checkpoint that reads images too calls its text `model.language_model.layers...` or `language_model.model.layers...`, where a model
here may say `model.layers...`: a module that is listed by one of these names is meant.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

_TEXT, _MODEL, _PATTERN = "language_model.", "model.", "re:"


def spellings(name: str) -> tuple[str, ...]:
    """Return the names that checkpoints have for the matrix `name`."""
    plain = name.replace(_TEXT, "", 1)
    inner = (f"{_MODEL}{_TEXT}{plain.removeprefix(_MODEL)}",) if plain.startswith(_MODEL) else ()
    return (plain, f"{_TEXT}{plain}", *inner)


def matches(pattern: str, name: str) -> bool:
    """Return whether a regular expression fits the beginning of the matrix's name."""
    return any(re.match(pattern, spelling) for spelling in spellings(name))


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
