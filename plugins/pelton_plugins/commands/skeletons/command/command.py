"""`pelton skeleton NAME --times 2`."""

from __future__ import annotations

import msgspec
from pelton_plugins.flags import parse_flags


class SkeletonArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of the command."""

    name: str = "world"
    """Name to greet."""
    times: int = 1
    """How often."""


def run(argv: list[str]) -> int:
    parsed = parse_flags(
        argv, [SkeletonArguments], positional="name", program="pelton skeleton", doc="Greet somebody.", engine=False,
        environ={},
    )  # fmt: skip
    arguments: SkeletonArguments = parsed.structs["SkeletonArguments"]
    for _ in range(arguments.times):
        print(f"Hello, {arguments.name}.")
    return 0
