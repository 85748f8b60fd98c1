"""Models named `skeleton://PATH`. A real source fetches what the name stands for, and returns where it put it."""

from __future__ import annotations

from pathlib import Path

from pelton.errors import ConfigError
from pelton.model.source import SourceRequest

SCHEME = "skeleton://"


def find(request: SourceRequest) -> str | None:
    """The local folder or file; None: the name is not of this source, and the next one is asked."""
    if not request.name.startswith(SCHEME):
        return None
    path = Path(request.name.removeprefix(SCHEME))
    if not path.exists():
        raise ConfigError(f"{request.name} is not there: {path} does not exist.")
    return str(path)
