"""What pages of docs/ show, for the tests that run it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
CHOSEN = ("model", "device")
"""Settings that a test chooses itself."""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def commands(page: str) -> list[list[str]]:
    """The words behind `pelton` of each command of a page."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("pelton ")]


def command(page: str, *words: str) -> list[str]:
    """The one command of a page that begins with the first word and has the others."""
    [found] = [one for one in commands(page) if one[0] == words[0] and set(words) <= set(one)]
    return found


def settings(page: str, *words: str) -> dict[str, Any]:
    """The settings that a `pelton serve` of a page gives, as arguments of `LLM` or of a test's server; the model aside."""
    from pelton.config.engine import FIELD_HOME
    from pelton_plugins.flags import parse_flags
    from pelton_plugins.server.config import ServerConfig

    parsed = parse_flags(command(page, "serve", *words)[1:], [ServerConfig], environ={})
    found = {}
    for name in parsed.explicit - {*CHOSEN}:
        if name in FIELD_HOME:
            section, field = FIELD_HOME[name]
            found[name] = getattr(getattr(parsed.config, section), field)
        else:
            owner = parsed.config if hasattr(parsed.config, name) else parsed.structs["ServerConfig"]
            found[name] = getattr(owner, name)
    return found
