"""`meet`: processes that may start, end and start again at any time agree on a place where all of them are at once."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from pathlib import Path

from pelton.errors import EngineError

_LOOK_S = 0.01
GIVEN_UP = ".given-up"
"""Behind the folder's name: a file that the engines' client makes where one of them did not start."""


def meet(folder: Path, rank: int, size: int, timeout_s: float) -> str:
    """Return the path of a file that the present process of each rank alone is told, for a communicator's store.

    Each process puts down a name of its own, reads those of all ranks, and puts down what they are together. All are here once each has
    put down the same. One that has ended has read the names of its own time, which are not those of now. Raises `EngineError` that names
    who does not come.
    """
    name, together = os.urandom(16).hex(), ""
    deadline = time.monotonic() + timeout_s
    while True:
        if _read(folder / f"name-{rank}") != name:  # one that ended has taken the folder with it
            folder.mkdir(mode=0o700, exist_ok=True)
            _check_owner(folder)
            _put(folder / f"name-{rank}", name)
            together = ""
        names = [_read(folder / f"name-{other}") for other in range(size)]
        if all(names):
            found = hashlib.sha256(" ".join(names).encode()).hexdigest()[:32]
            if found != together:
                together = found
                _put(folder / f"together-{rank}", together)
            if all(_read(folder / f"together-{other}") == together for other in range(size)):
                return str(folder / together)
        if Path(f"{folder}{GIVEN_UP}").exists():
            raise EngineError("Another engine of those that share experts did not start. Its log says why.")
        if time.monotonic() > deadline:
            missing = [
                other for other in range(size) if _read(folder / f"together-{other}") != together or not together
            ]
            raise EngineError(
                f"Ranks {missing} of the {size} that share experts did not come within {timeout_s:g} s. Their logs say why."
            )
        time.sleep(_LOOK_S)


def _check_owner(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise EngineError(f"{folder} belongs to somebody else. Set TMPDIR to a folder that is yours alone.")


def _put(path: Path, text: str) -> None:
    """All at once, for those who read."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
