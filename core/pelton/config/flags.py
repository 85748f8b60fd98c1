"""Command-line flags made from the settings structs.

    parsed = parse_flags(argv, structs=[ServerConfig], positional="model", program="pelton serve")
    parsed.config, parsed.structs["ServerConfig"], parsed.explicit

A field `max_num_seqs` is `--max-num-seqs` wherever it lives; a section is `--attention-config` with a JSON object or
a dot (`--attention-config.backend X`, `-ac.backend X`). A flag wins over an environment variable, which wins over
`--config FILE`. A setting given by two flags is an error: nobody has to know which one wins.
"""

from __future__ import annotations

import enum
import json
import os
import re
import shutil
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from pelton import env
from pelton.config.engine import (
    SECTIONS,
    EngineConfig,
    convert_section,
    convert_struct,
    did_you_mean,
    example_value,
    flat_name,
    struct_defaults,
)
from pelton.config.field_docs import field_docs, first_line
from pelton.errors import ConfigError

SHORT_FLAGS = {
    "-O": "--optimization-level",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "-ac": "--attention-config",
    "-cc": "--compilation-config",
}
ENGINE = "EngineConfig"
PLUGIN_CONFIG = "plugin_config"
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_HELP_COLUMN = 34


class Parsed(NamedTuple):
    """What a command line says."""

    config: EngineConfig
    structs: dict[str, Any]
    """Class name of each further struct to the struct."""
    explicit: set[str]
    """Flat names of the settings that were given, in whatever way."""


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
    def name(self) -> str:
        return "--" + self.flat.replace("_", "-")

    @property
    def names(self) -> list[str]:
        """All spellings, the long one first."""
        negative = ["--no-" + self.flat.replace("_", "-")] if self.is_bool else []
        return [self.name, *negative, *(short for short, long in SHORT_FLAGS.items() if long == self.name)]

    @property
    def is_bool(self) -> bool:
        return bool in _alternatives(self.hint)

    @property
    def is_list(self) -> bool:
        return any(get_origin(kind) is list for kind in _alternatives(self.hint))

    @property
    def is_mapping(self) -> bool:
        return any(get_origin(kind) is dict or kind is dict or _is_struct(kind) for kind in _alternatives(self.hint))

    @property
    def doc(self) -> str:
        return field_docs(self.struct).get(self.field, "")

    @property
    def default(self) -> Any:
        return struct_defaults(self.struct).get(self.field)

    def read(self, text: str, spelling: str) -> Any:
        """The value that `text` spells. Raises `ConfigError` naming the flag, the value and a right one."""
        for kind in _alternatives(self.hint):
            try:
                return _read(text, kind)
            except ValueError:
                continue
        example = example_value(self.struct, self.field)
        shown = json.dumps(example) if isinstance(example, (list, dict)) else str(example)
        expected = " or ".join(
            dict.fromkeys(_kind_name(kind) for kind in _alternatives(self.hint) if kind is not type(None))
        )
        raise ConfigError(f"{spelling} is {text!r}; expected {expected}, such as {shown}.")


def make_flags(structs: Sequence[type[msgspec.Struct]] = (), *, engine: bool = True) -> dict[str, Flag]:
    """Every flag by its long name, the engine's first."""
    flags: dict[str, Flag] = {}
    for owner, section, struct in _all_structs(structs, engine):
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


def parse_flags(
    argv: Sequence[str],
    structs: Sequence[type[msgspec.Struct]] = (),
    *,
    positional: str | None = "model",
    program: str = "pelton",
    doc: str = "",
    engine: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> Parsed:
    """Read a command line.

    structs: further settings structs, whose fields are flags too. positional: the field that arguments without a flag
    set; a list takes all of them. engine: False leaves out the engine's flags. `--help` prints and raises
    `SystemExit(0)`. Raises `ConfigError`.
    """
    parser = _Parser(structs, positional, engine)
    for token in argv:
        if token == "--":
            break
        if token in ("-h", "--help") or token.startswith("--help="):
            only = token.partition("=")[2]
            print(help_text(structs, positional=positional, program=program, doc=doc, only=only, engine=engine))
            raise SystemExit(0)
    parser.read_argv(argv)
    parser.add_environment(environ)
    return parser.build()


class _Parser:
    """Collects what was given, then builds the structs."""

    def __init__(self, structs: Sequence[type[msgspec.Struct]], positional: str | None, engine: bool) -> None:
        self.structs = structs
        self.engine = engine
        self.flags = make_flags(structs, engine=engine)
        self.by_flat = {flag.flat: flag for flag in self.flags.values()}
        self.spellings = {name: flag for flag in self.flags.values() for name in flag.names}
        self.section_flags = {f"--{name.replace('_', '-')}-config": name for name in SECTIONS if engine}
        for short, long in SHORT_FLAGS.items():
            if long in self.section_flags:
                self.section_flags[short] = self.section_flags[long]
        self.positional = self.by_flat[positional] if positional else None
        self.given: dict[tuple[str, str, str], tuple[Any, str]] = {}  # (owner, section, field) -> (value, spelling)
        self.plugin_config: dict[str, dict[str, Any]] = {}
        self.config_file: str | None = None

    # Reading the command line.

    def read_argv(self, argv: Sequence[str]) -> None:
        tokens = list(argv)
        free: list[str] = []
        while tokens:
            token = tokens.pop(0)
            if token == "--":
                free += tokens
                break
            if self._looks_like_flag(token):
                self._read_flag(token, tokens)
            else:
                free.append(token)
        self._set_positional(free)
        if self.config_file is not None:
            self._add_file(self.config_file)

    def _looks_like_flag(self, token: str) -> bool:
        return len(token) > 1 and token[0] == "-" and not re.fullmatch(r"-[\d.]+\w?", token)

    def _read_flag(self, token: str, rest: list[str]) -> None:
        spelling, equals, value = token.partition("=")
        value_or_none = value if equals else None
        base, dot, path = spelling.partition(".")
        if base.startswith("--"):
            base = base.replace("_", "-")
        elif re.fullmatch(r"-O\d+", base):
            base, value_or_none = "-O", base[2:]
        if base in ("--config", "--plugin-config") and not self.engine:
            base = ""
        if base == "--config":
            self.config_file = self._value(spelling, value_or_none, rest)
        elif base == "--plugin-config":
            self._read_plugin_config(spelling, path, value_or_none, rest)
        elif base in self.section_flags:
            self._read_section(spelling, self.section_flags[base], path.replace("-", "_"), value_or_none, rest)
        elif base in self.spellings:
            self._read_field(self.spellings[base], spelling, base, path if dot else "", value_or_none, rest)
        else:
            engine_only = ["--config", "--plugin-config"] if self.engine else []
            known = [*self.spellings, *self.section_flags, *engine_only, "--help"]
            raise ConfigError(f"Unknown flag {spelling}.{did_you_mean(base, known)} --help lists all flags.")

    def _read_field(self, flag: Flag, spelling: str, base: str, path: str, value: str | None, rest: list[str]) -> None:
        if path:
            if not flag.is_mapping:
                raise ConfigError(
                    f"{spelling}: {flag.name} takes one value, not fields of its own; leave out {path!r}."
                )
            self._set_path(flag, spelling, path, _read_any(self._value(spelling, value, rest)))
        elif flag.is_bool and (value is None or base.startswith("--no-")):
            if value is not None:
                raise ConfigError(
                    f"{spelling} takes no value (got {value!r}); use {flag.name}={value} or {spelling} alone."
                )
            self._set(flag, not base.startswith("--no-") or base == flag.name, spelling)
        elif flag.is_list and value is None:
            self._set(flag, self._read_list(flag, spelling, rest), spelling)
        else:
            self._set(flag, flag.read(self._value(spelling, value, rest), spelling), spelling)

    def _read_list(self, flag: Flag, spelling: str, rest: list[str]) -> Any:
        first = self._value(spelling, None, rest)
        if first.startswith("[") or first.lower() == "none":
            return flag.read(first, spelling)
        texts = [first]
        while rest and not self._looks_like_flag(rest[0]):
            texts.append(rest.pop(0))
        item = _list_item(flag.hint)
        try:
            return [_read(text, item) for text in texts]
        except ValueError:
            return flag.read(" ".join(texts), spelling)  # raises, with what would be right

    def _read_section(self, spelling: str, section: str, field: str, value: str | None, rest: list[str]) -> None:
        text = self._value(spelling, value, rest)
        if field:
            head, _, path = field.partition(".")
            flag = self._section_flag(section, head, spelling)
            if path:
                self._set_path(flag, spelling, path, _read_any(text))
            else:
                self._set(flag, flag.read(text, spelling), spelling)
            return
        for key, item in _json_object(text, spelling, example=self._section_example(section)).items():
            self._set(self._section_flag(section, key, spelling), item, spelling)

    def _section_flag(self, section: str, field: str, spelling: str) -> Flag:
        fields = SECTIONS[section].__struct_fields__
        if field not in fields:
            raise ConfigError(f"{spelling}: {section} has no setting {field!r}.{did_you_mean(field, fields)}")
        return self.by_flat[flat_name(section, field)]

    def _section_example(self, section: str) -> str:
        field = SECTIONS[section].__struct_fields__[0]
        return json.dumps({field: example_value(SECTIONS[section], field)})

    def _read_plugin_config(self, spelling: str, path: str, value: str | None, rest: list[str]) -> None:
        text = self._value(spelling, value, rest)
        if path:
            name, dot, field = path.partition(".")
            if not dot:
                found: Mapping[str, Any] = {name: _json_object(text, spelling, example='{"field": 1}')}
            else:
                found = {name: _nested(field, _read_any(text))}
        else:
            found = _json_object(text, spelling, example='{"plugin": {"field": 1}}')
        for name, fields in found.items():
            if not isinstance(fields, dict):
                raise ConfigError(f"{spelling}: settings of plugin {name!r} are {fields!r}; give an object.")
            _merge(self.plugin_config.setdefault(name, {}), fields, spelling)

    def _value(self, spelling: str, value: str | None, rest: list[str]) -> str:
        if value is not None:
            return value
        if not rest or rest[0].startswith("--") or (self._looks_like_flag(rest[0]) and self._is_known(rest[0])):
            raise ConfigError(f"{spelling} needs a value" + (f", and {rest[0]} is the next flag." if rest else "."))
        return rest.pop(0)

    def _is_known(self, token: str) -> bool:
        base = token.partition("=")[0].partition(".")[0]
        return base in self.spellings or base in self.section_flags or bool(re.fullmatch(r"-O\d", base))

    def _set_positional(self, free: list[str]) -> None:
        if not free:
            return
        flag = self.positional
        if flag is None:
            raise ConfigError(f"Unexpected argument {free[0]!r}; settings are given as flags.")
        if flag.is_list:
            self._set(flag, free, flag.name)
        elif len(free) > 1:
            raise ConfigError(f"Unexpected argument {free[1]!r}; {flag.flat} is {free[0]!r} already.")
        else:
            self._set(flag, flag.read(free[0], flag.flat.upper()), flag.flat.upper())

    # Collecting.

    def _set(self, flag: Flag, value: Any, spelling: str) -> None:
        key = (flag.owner, flag.section, flag.field)
        if key in self.given:
            other_value, other = self.given[key]
            what = f"{flag.section}.{flag.field}" if flag.section else flag.field
            raise ConfigError(f"{other} and {spelling} both set {what} ({other_value!r} and {value!r}); give it once.")
        self.given[key] = (value, spelling)

    def _set_path(self, flag: Flag, spelling: str, path: str, value: Any) -> None:
        key = (flag.owner, flag.section, flag.field)
        fields, first = self.given.get(key, ({}, spelling))
        if not isinstance(fields, dict):
            raise ConfigError(f"{first} and {spelling} both set {flag.flat}; give it once.")
        _merge(fields, _nested(path, value), spelling)
        self.given[key] = (fields, first)

    def _add_file(self, path: str) -> None:
        """Settings of a JSON or TOML file, for what no flag gave."""
        for name, value in _read_file(path).items():
            flat = name.replace("-", "_")
            section = flat.removesuffix("_config")
            if flat == PLUGIN_CONFIG and isinstance(value, dict):
                for plugin, fields in value.items():
                    self.plugin_config[plugin] = {**fields, **self.plugin_config.get(plugin, {})}
            elif flat.endswith("_config") and section in SECTIONS and isinstance(value, dict):
                for field, item in value.items():
                    self._set_default(self._section_flag(section, field, path), item, f"{path}: {name}.{field}")
            elif flat in self.by_flat:
                flag = self.by_flat[flat]
                is_one = flag.is_list and isinstance(value, str)
                self._set_default(flag, [value] if is_one else value, f"{path}: {name}")
            else:
                raise ConfigError(f"{path} has unknown setting {name!r}.{did_you_mean(flat, self.by_flat)}")

    def add_environment(self, environ: Mapping[str, str]) -> None:
        """Settings that variables spell, for what no flag gave."""
        for setting, (text, variable) in env.settings(environ).items():
            if setting in self.by_flat:
                flag = self.by_flat[setting]
                key = (flag.owner, flag.section, flag.field)
                if key in self.given and self.given[key][1].startswith("-"):
                    continue
                self.given[key] = ([text] if flag.is_list else flag.read(text, variable), variable)

    def _set_default(self, flag: Flag, value: Any, spelling: str) -> None:
        self.given.setdefault((flag.owner, flag.section, flag.field), (value, spelling))

    # Building.

    def build(self) -> Parsed:
        sections: dict[str, Any] = {}
        built: dict[str, Any] = {}
        for owner, section, struct in _all_structs(self.structs, self.engine):
            given = {key[2]: value for key, value in self.given.items() if key[:2] == (owner, section)}
            values = {field: value for field, (value, _) in given.items()}
            try:
                made = convert_section(section, values) if section else convert_struct(struct, values)
            except ConfigError as error:
                raise ConfigError(str(error) + _origin(str(error), given)) from None
            if section:
                sections[section] = made
            else:
                built[owner] = made
        explicit = {
            flat_name(section, field) if section else field for _, section, field in self.given
        } | ({PLUGIN_CONFIG} if self.plugin_config else set())  # fmt: skip
        return Parsed(EngineConfig(**sections, plugin_config=self.plugin_config), built, explicit)


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
            *_wrapped("--config FILE", "Settings from a JSON or TOML file, by their names; a flag wins.", width),
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
    kinds = [kind for kind in _alternatives(flag.hint) if kind is not type(None)]
    return "|".join(dict.fromkeys(_kind_metavar(kind) for kind in kinds))


def _kind_metavar(kind: Any) -> str:
    if get_origin(kind) is list:
        return f"{_kind_metavar((get_args(kind) or (str,))[0])} ..."
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "|".join(str(member.value) for member in kind)
    return {int: "INT", float: "NUMBER", str: "TEXT", bool: "BOOL"}.get(kind, "JSON")


def _shown(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _wrapped(left: str, right: str, width: int) -> list[str]:
    indent = " " * _HELP_COLUMN
    text = textwrap.wrap(right, max(width - _HELP_COLUMN, 30)) or [""]
    if len(left) + 4 > _HELP_COLUMN:
        return [f"  {left}", *(f"{indent}{line}".rstrip() for line in text if line)]
    return [f"  {left}".ljust(_HELP_COLUMN) + text[0], *(indent + line for line in text[1:])]


def _all_structs(
    structs: Sequence[type[msgspec.Struct]], engine: bool
) -> Iterator[tuple[str, str, type[msgspec.Struct]]]:
    """(owner, section, struct)"""
    if engine:
        yield from ((ENGINE, section, struct) for section, struct in SECTIONS.items())
    yield from ((struct.__name__, "", struct) for struct in structs)


def _alternatives(hint: Any) -> list[Any]:
    """The members of a union, text last since it takes everything."""
    if get_origin(hint) in (Union, types.UnionType):
        return sorted(get_args(hint), key=lambda kind: (kind is str, kind is not type(None)))
    return [hint]


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _list_item(hint: Any) -> Any:
    for kind in _alternatives(hint):
        if get_origin(kind) is list:
            return get_args(kind)[0]
    return str


def _read(text: str, kind: Any) -> Any:
    """Text as one type. Raises `ValueError`."""
    if kind is type(None):
        if text.lower() in ("none", "null"):
            return None
        raise ValueError(text)
    if kind is str:
        return text
    if kind is bool:
        return _read_bool(text)
    if kind is int:
        return _read_int(text)
    if kind is float:
        return float(text)
    if kind is Any:
        return _read_any(text)
    if get_origin(kind) is Literal:
        return _read_choice(text, {str(choice): choice for choice in get_args(kind)})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _read_choice(text, {str(member.value): member for member in kind})
    found = json.loads(text)
    wanted = list if get_origin(kind) is list else dict
    if not isinstance(found, wanted):
        raise ValueError(text)
    return found


def _read_bool(text: str) -> bool:
    if text.lower() in ("true", "1", "yes", "on"):
        return True
    if text.lower() in ("false", "0", "no", "off"):
        return False
    raise ValueError(text)


def _read_int(text: str) -> int:
    """A whole number; 8k is 8,000 and 8K is 8,192."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text)
    if match is None:
        return int(text)
    value = float(match[1]) * _SUFFIXES[match[2]]
    if value != int(value):
        raise ValueError(text)
    return int(value)


def _read_choice(text: str, choices: Mapping[str, Any]) -> Any:
    for name, value in choices.items():
        if name.lower() == text.lower():
            return value
    raise ValueError(text)


def _read_any(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _kind_name(kind: Any) -> str:
    if get_origin(kind) is list:
        return "a list"
    if get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        return "one of " + _kind_metavar(kind).replace("|", ", ")
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kind, "a JSON object")


def _json_object(text: str, spelling: str, *, example: str) -> dict[str, Any]:
    found = _read_any(text)
    if not isinstance(found, dict):
        raise ConfigError(f"{spelling} is {text!r}; expected a JSON object, such as '{example}'.")
    return found


def _nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def _merge(into: dict[str, Any], new: Mapping[str, Any], spelling: str) -> None:
    for key, value in new.items():
        if key not in into:
            into[key] = value
        elif isinstance(into[key], dict) and isinstance(value, dict):
            _merge(into[key], value, spelling)
        else:
            raise ConfigError(f"{spelling}: {key} is given twice ({into[key]!r} and {value!r}); give it once.")


def _origin(message: str, given: Mapping[str, tuple[Any, str]]) -> str:
    """Where the field that the message begins with was set, when that is not plain from its name."""
    field = message.split(" ", 1)[0].rpartition(".")[2]
    if field not in given:
        return ""
    return f" (Set by {given[field][1]}.)"


def _read_file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            text = file.read()
        if path.endswith(".toml"):
            import tomllib

            return tomllib.loads(text.decode())
        found = json.loads(text)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(
            f"--config {path} is no valid {'TOML' if path.endswith('.toml') else 'JSON'}: {error}."
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            f'--config {path} holds no JSON object; write settings by name, such as {{"max_num_seqs": 8}}.'
        )
    return found
