"""Help of a command line: its flags in groups, a struct each, with their docs and defaults."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

import msgspec

from pelton import env
from pelton_plugins.flags.field_docs import first_line
from pelton_plugins.flags.table import ENGINE, Flag, make_flags
from pelton_plugins.flags.values import alternatives, kind_metavar

_HELP_COLUMN = 34


def help_text(
    structs: Sequence[type[msgspec.Struct]] = (),
    *,
    positional: str | None = "model",
    program: str = "pelton",
    doc: str = "",
    only: str = "",
    engine: bool = True,
) -> str:
    """All flags with their help, or those that have the word `only` in name, section or help."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    flags = make_flags(structs, engine=engine)
    usage = f"usage: {program} " + (f"[{positional.upper()}] " if positional else "") + "[flags]"
    lines = [usage, "", *([doc, ""] if doc else [])]
    if only:
        lines = []
    groups: dict[tuple[str, str], list[Flag]] = {}
    for flag in sorted(flags.values(), key=lambda flag: flag.owner == ENGINE):  # the command's own flags first
        text = f"{flag.name} {flag.section or flag.owner} {flag.doc}".lower().replace("_", "-")
        if only.lower().replace("_", "-") in text:
            groups.setdefault((flag.owner, flag.section), []).append(flag)
    for (owner, section), members in groups.items():
        heading = section or (owner if engine else "flags")
        lines.append(f"{heading}: {first_line(members[0].struct)}")
        lines += [line for flag in members for line in _help_lines(flag, width, is_positional=flag.flat == positional)]
        lines.append("")
    if only and not groups:
        return f"No flag has {only!r} in its name, section or help. --help lists all flags."
    if not only and engine:
        lines += [
            *_wrapped("--config FILE", "Settings from a JSON, TOML or YAML file, by their names; a flag wins.", width),
            *_wrapped("--plugin-config.NAME.FIELD", "A setting of a plugin; --plugin-config takes a JSON object.", width),
            *_wrapped("--SECTION-config.FIELD", "A setting by its section, such as --attention-config.backend (-ac.backend), "
                      "--compilation-config (-cc); a section alone takes a JSON object.", width),
            *_wrapped("--help[=WORD]", "This text, or what of it has WORD in it.", width),
        ]  # fmt: skip
        lines += ["", "environment: " + "; ".join(f"{v.name} ({v.setting}: {v.doc})" for v in env.VARIABLES)]
    return "\n".join(lines).rstrip()


def _help_lines(flag: Flag, width: int, *, is_positional: bool) -> list[str]:
    shown = [name for name in flag.names if not (name.startswith("--no-") and flag.default is not True)]
    left = ", ".join(sorted(shown, key=lambda name: name.startswith("--")))
    if not flag.is_bool:
        left += " " + _metavar(flag)
    if is_positional:
        left = f"{flag.flat.upper()}, {left}"
    default = flag.default
    note = "" if default in (None, [], {}, "") else f" (default: {_shown(default)})"
    return _wrapped(left, (flag.doc + note).strip(), width)


def _metavar(flag: Flag) -> str:
    kinds = [kind for kind in alternatives(flag.hint) if kind is not type(None)]
    return "|".join(dict.fromkeys(kind_metavar(kind) for kind in kinds))


def _shown(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _wrapped(left: str, right: str, width: int) -> list[str]:
    indent = " " * _HELP_COLUMN
    text = textwrap.wrap(right, max(width - _HELP_COLUMN, 30)) or [""]
    if len(left) + 4 > _HELP_COLUMN:
        return [f"  {left}", *(f"{indent}{line}".rstrip() for line in text if line)]
    return [f"  {left}".ljust(_HELP_COLUMN) + text[0], *(indent + line for line in text[1:])]
