"""What plugins print while they are loaded goes to stderr, so that what a command prints stays readable."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()
_depth = 0
_stdout: Any = None


@contextmanager
def to_stderr() -> Iterator[None]:
    """Send `print` to stderr; any number of threads, the last of which puts stdout back."""
    global _depth, _stdout
    with _lock:
        if not _depth:
            _stdout, sys.stdout = sys.stdout, sys.stderr
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if not _depth:
                sys.stdout = _stdout
