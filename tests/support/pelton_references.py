"""What transformers answers, kept in pytest's cache folder for as long as all that it depends on stays the same.

That is every file of the checkpoint, the question, this project's way to ask it, and the versions of torch and transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

folder: Path | None = None
"""Set at the start of a session; None: nothing is kept."""


def cached(checkpoint: str, question: Any, compute: Callable[[], Any]) -> Any:
    """What `compute` returns, JSON's types only."""
    if folder is None:
        return compute()
    place = folder / f"{_key(checkpoint, question)}.json"
    try:
        return json.loads(place.read_bytes())
    except FileNotFoundError:
        pass
    answer = compute()
    private = place.with_suffix(f".{os.getpid()}")  # another process may make it at the same time
    private.write_text(json.dumps(answer))
    private.replace(place)
    return answer


def _key(checkpoint: str, question: Any) -> str:
    digest = hashlib.sha256(json.dumps([question, version("torch"), version("transformers")]).encode())
    for path in sorted(Path(checkpoint).rglob("*")):
        if path.is_file():
            digest.update(b"\0" + path.relative_to(checkpoint).as_posix().encode() + b"\0" + path.read_bytes())
    digest.update((Path(__file__).parent / "pelton_e2e.py").read_bytes())
    return digest.hexdigest()
