"""Tiny checkpoints: one that is asked for again is a copy of the files, a tenth of the time that transformers takes.

They are kept in pytest's cache folder, also from run to run, for as long as what makes them stays the same: the arguments,
pelton/testing/models.py, and the versions of torch, transformers and tokenizers. Those of a test's own classes are kept for a session.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pelton.testing import models

folder: Path | None = None
"""Of this session; None: nothing is kept."""
_folder_of_all: Path | None = None
"""Of all sessions; None: those of this one alone are kept."""
_MOST_BYTES = 4 << 20  # of one that is kept

Maker = Callable[..., Path]


def keep_in(own: Path, cache: Path | None) -> None:
    """Keep them there from now on: this session's own ones, and those that others find too. What other versions left is removed."""
    global folder, _folder_of_all
    folder = own
    if cache is None:
        return
    versions = (version(name).encode() for name in ("torch", "transformers", "tokenizers"))
    name = hashlib.sha256(b"\0".join([Path(models.__file__).read_bytes(), *versions])).hexdigest()[:16]
    for other in cache.iterdir():
        if other.name != name:
            shutil.rmtree(other, ignore_errors=True)
    _folder_of_all = cache / name
    _folder_of_all.mkdir(exist_ok=True)


def forget() -> None:
    global folder, _folder_of_all
    folder = _folder_of_all = None


def kept(make: Maker) -> Maker:
    """What they are made of decides, and nothing else does: the seed is one of the arguments."""

    @functools.wraps(make)
    def copied(path: str | Path, *given: Any, **named: Any) -> Path:
        path, place = Path(path), _place(make, given, named)
        if place is not None and place.exists():
            shutil.copytree(place, path, dirs_exist_ok=True)
            return path
        is_own = place is not None and not (
            path.exists() and any(path.iterdir())
        )  # what is there belongs to someone else
        make(path, *given, **named)
        if is_own:
            _keep(path, place)
        return path

    return copied


def _place(make: Maker, given: Any, named: Any) -> Path | None:
    """Where one is kept, or would be. Classes of a test's own may be other ones by the next run."""
    words = repr((make.__name__, given, sorted(named.items())))
    classes = [one for one in [*given, *named.values()] if inspect.isclass(one)]
    of_all = all(one.__module__.startswith("transformers.") for one in classes) and " at 0x" not in words
    where = _folder_of_all if of_all and _folder_of_all else folder
    return None if where is None else where / hashlib.sha256(words.encode()).hexdigest()[:32]


def _keep(path: Path, place: Path) -> None:
    if sum(file.stat().st_size for file in path.rglob("*")) <= _MOST_BYTES:
        private = place.with_suffix(f".{os.getpid()}")  # another worker may make it at the same time
        shutil.copytree(path, private)
        try:
            private.rename(place)
        except OSError:  # it did
            shutil.rmtree(private)


def keep() -> None:
    """Before a test's file imports the functions."""
    models.make_tiny_checkpoint = kept(models.make_tiny_checkpoint)
    models.make_tiny_encoder = kept(models.make_tiny_encoder)
