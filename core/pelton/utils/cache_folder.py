"""Where Pelton keeps what it can make again: compiled kernels, tuned choices. One folder a user, a folder an owner in it."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from pelton.logging import get_logger

_private: list[Path] = []


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/pelton`, else `~/.cache/pelton`; not made, not checked."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if given.startswith("/") else Path.home() / ".cache") / "pelton"


@cache
def cache_folder(owner: str) -> Path:
    """Make the folder of `owner` in the user's cache. Where that is not writable (a read-only or missing home) make a private folder,
    which is removed when the process ends, and log that once. Owners name their files by content."""
    try:
        folder = user_cache() / owner
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        private = Path(tempfile.mkdtemp(prefix=f"pelton-{owner}-"))
        _private.append(private)
        get_logger(__name__).warning(
            "the cache folder cannot be written (%s): using %s, which is lost at the end. Set XDG_CACHE_HOME.",
            error,
            private,
        )
        return private
    return folder


def remove_at_end(folder: Path) -> None:
    """Remove it, too, when this process ends."""
    _private.append(folder)


@atexit.register
def remove_private_folders() -> None:
    """Remove what `cache_folder` made for this process alone; a process that ends by `os._exit` calls it before."""
    for private in _private:
        shutil.rmtree(private, ignore_errors=True)
