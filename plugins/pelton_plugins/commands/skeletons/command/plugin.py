"""A command of the pelton program: greets.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import CommandEntry

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_cli_commands() -> Sequence[CommandEntry]:
    return [CommandEntry(name="skeleton", load="pelton_skeleton.command:run", help="greet somebody")]
