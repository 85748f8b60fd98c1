"""`pelton version`: the versions that a bug report begins with."""

from __future__ import annotations

import platform

from pelton import __version__, hookspecs
from pelton.errors import ConfigError


def run(argv: list[str]) -> int:
    if argv in (["--help"], ["-h"]):
        print("usage: pelton version\n\nPrint the versions of Pelton, its hook API and Python.")
        return 0
    if argv:
        raise ConfigError(f"pelton version takes no arguments; got {' '.join(argv)!r}.")
    api = ".".join(map(str, hookspecs.API_VERSION))
    print(f"pelton {__version__} (hook API {api}, Python {platform.python_version()})")
    return 0
