"""Python's garbage collector in a process that serves requests: it should find nothing to do."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (700, 1000, 100)
"""New objects before a collection of the youngest, and collections of a generation before one of the next. With Python's 10 and
10 one of all objects, 10 to 60 ms, comes twice a second under load. The youngest stay as Python has them: with 10,000 and
50,000 objects all stages of `pelton bench host` take 1.5 and 1.7 times as long."""

_owners: set[int] = set()
_found = gc.get_threshold()  # before the first owner came


@contextmanager
def paused() -> Iterator[None]:
    """Around a start: what it imports and makes lives on, and to look at it again and again is a sixth of the time it takes."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


def tune(owner: object) -> None:
    """After the start of `owner`, an engine or its front end: what that made lives on and is not looked at again.

    Thresholds are raised only; a collector that someone has switched off stays off. What requests leave behind is freed by
    its reference counts (`OutputProcessor` leaves no cycles), so rare collections let nothing pile up.
    """
    global _found
    gc.collect()
    gc.freeze()
    if not _owners:
        _found = gc.get_threshold()
        if _found[0]:
            gc.set_threshold(*map(max, _found, THRESHOLDS))
    _owners.add(id(owner))


def untune(owner: object) -> None:
    """When it ends, tuned or not: in a user's process its memory has to come back, and the thresholds with the last."""
    gc.unfreeze()
    if id(owner) in _owners:
        _owners.remove(id(owner))
        if not _owners:
            gc.set_threshold(*_found)
