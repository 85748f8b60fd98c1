"""Device libraries that the installed torch was built with, read from its files: nothing imports torch."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path


def torch_built_with(library: str) -> str | None:
    """Return the version of `library` ("cuda", "hip") that torch was built with, such as "13.0"; None for a build without it."""
    if "torch" in sys.modules:
        version: str | None = getattr(sys.modules["torch"].version, library)
        return version
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    found = re.search(rf"^{library}\b[^=]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None
