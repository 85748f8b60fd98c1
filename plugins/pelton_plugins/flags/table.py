"""The flags that settings structs have: one a field, and what each is called.

A field `max_num_seqs` is `--max-num-seqs` wherever it lives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from pelton.config.engine import SECTIONS, example_value, flat_name, struct_defaults
from pelton.errors import ConfigError
from pelton_plugins.flags.field_docs import field_docs
from pelton_plugins.flags.values import alternatives, kind_name, read_as

SHORT_FLAGS = {
    "-O": "--optimization-level",
    "-tp": "--tensor-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-dcp": "--decode-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "-ac": "--attention-config",
    "-cc": "--compilation-config",
}
ENGINE = "EngineConfig"


@dataclass(frozen=True, slots=True)
class Flag:
    """One field of one struct, as a flag."""

    owner: str
    """EngineConfig, or the class name of a further struct."""
    section: str
    """Section of `EngineConfig`; empty for a further struct."""
    field: str
    flat: str
    """Flat name of the setting."""
    struct: type[msgspec.Struct]
    hint: Any

    @property
    def key(self) -> tuple[str, str, str]:
        """Which field of which struct it sets."""
        return self.owner, self.section, self.field

    @property
    def name(self) -> str:
        return "--" + self.flat.replace("_", "-")

    @property
    def names(self) -> list[str]:
        """All spellings, the long one first."""
        negative = ["--no-" + self.flat.replace("_", "-")] if self.is_bool else []
        return [self.name, *negative, *(short for short, long in SHORT_FLAGS.items() if long == self.name)]

    @property
    def is_bool(self) -> bool:
        return bool in alternatives(self.hint)

    @property
    def choices(self) -> tuple[Any, ...]:
        """Names that it may be, beside a bool or another value."""
        return tuple(
            choice for kind in alternatives(self.hint) if get_origin(kind) is Literal for choice in get_args(kind)
        )

    @property
    def is_list(self) -> bool:
        return any(get_origin(kind) is list for kind in alternatives(self.hint))

    @property
    def is_mapping(self) -> bool:
        return any(get_origin(kind) is dict or kind is dict or _is_struct(kind) for kind in alternatives(self.hint))

    @property
    def doc(self) -> str:
        return field_docs(self.struct).get(self.field, "")

    @property
    def default(self) -> Any:
        return struct_defaults(self.struct).get(self.field)

    def read(self, text: str, spelling: str) -> Any:
        """The value that `text` spells. Raises `ConfigError` naming the flag, the value and a right one."""
        for kind in alternatives(self.hint):
            try:
                return read_as(text, kind)
            except ValueError:
                continue
        example = example_value(self.struct, self.field)
        shown = json.dumps(example) if isinstance(example, (list, dict)) else str(example)
        expected = " or ".join(
            dict.fromkeys(kind_name(kind) for kind in alternatives(self.hint) if kind is not type(None))
        )
        raise ConfigError(f"{spelling} is {text!r}; expected {expected}, such as {shown}.")


def make_flags(structs: Sequence[type[msgspec.Struct]] = (), *, engine: bool = True) -> dict[str, Flag]:
    """Every flag by its long name, the engine's first."""
    flags: dict[str, Flag] = {}
    for owner, section, struct in all_structs(structs, engine):
        hints = get_type_hints(struct)
        for field in struct.__struct_fields__:
            flat = flat_name(section, field) if section else field
            flag = Flag(owner, section, field, flat, struct, hints[field])
            if flag.name in flags:
                raise ConfigError(
                    f"{struct.__name__}.{field} and {flags[flag.name].struct.__name__} both make {flag.name}."
                )
            flags[flag.name] = flag
    return flags


def all_structs(
    structs: Sequence[type[msgspec.Struct]], engine: bool
) -> Iterator[tuple[str, str, type[msgspec.Struct]]]:
    """(owner, section, struct)"""
    if engine:
        yield from ((ENGINE, section, struct) for section, struct in SECTIONS.items())
    yield from ((struct.__name__, "", struct) for struct in structs)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
