"""Command-line flags made from the settings structs.

    parsed = parse_flags(argv, structs=[ServerConfig], positional="model", program="pelton serve")
    parsed.config, parsed.structs["ServerConfig"], parsed.explicit

A field `max_num_seqs` is `--max-num-seqs` wherever it lives; a section is `--attention-config` with a JSON object or
a dot (`--attention-config.backend X`, `-ac.backend X`). A flag wins over an environment variable, which wins over
`--config FILE`. A setting given by two flags is an error: nobody has to know which one wins.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
)
from pelton.config.other_names import other_names, translated
from pelton.errors import ConfigError, PluginError
from pelton_plugins.flags.help import help_text
from pelton_plugins.flags.other_variables import unread
from pelton_plugins.flags.settings_file import read_settings_file
from pelton_plugins.flags.table import SHORT_FLAGS, Flag, all_structs, make_flags
from pelton_plugins.flags.values import alternatives, list_item, read_any, read_as

PLUGIN_CONFIG = "plugin_config"


class Parsed(NamedTuple):
    """A parsed command line."""

    config: EngineConfig
    structs: dict[str, Any]
    """Class name of each further struct to the struct."""
    explicit: set[str]
    """Flat names of the settings that were given, in whatever way."""


def parse_flags(
    argv: Sequence[str],
    structs: Sequence[type[msgspec.Struct]] = (),
    *,
    positional: str | None = "model",
    program: str | None = None,
    doc: str = "",
    engine: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> Parsed:
    """Read a command line.

    structs: further settings structs, whose fields are flags too. positional: the field that arguments without a flag
    set; a list takes all of them. program: as usage shows it; the command that runs when None. engine: False leaves out the
    engine's flags. `--help` prints and raises `SystemExit(0)`. Raises `ConfigError`.
    """
    parser = _Parser(structs, positional, engine)
    for token in argv:
        if token == "--":
            break
        if token in ("-h", "--help") or token.startswith("--help="):
            only = token.partition("=")[2]
            print(
                help_text(
                    structs,
                    positional=parser.positional.flat if parser.positional else None,
                    program=program or env.PROGRAM.get(),
                    doc=doc,
                    only=only,
                    engine=engine,
                )
            )
            raise SystemExit(0)
    parser.read_argv(argv)
    parser.add_environment(environ)
    parsed = parser.build()
    for line in unread(environ, parser.by_flat, {*parsed.explicit, *parsed.config.plugin_config}):
        print(f"warning: {line}", file=sys.stderr)
    return parsed


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
        self.positional = self._field_of(positional)
        self.given: dict[tuple[str, str, str], tuple[Any, str]] = {}  # (owner, section, field) -> (value, spelling)
        self.plugin_config: dict[str, dict[str, Any]] = {}
        self.config_file: str | None = None

    def _field_of(self, positional: str | None) -> Flag | None:
        """The engine's `model` is meant unless a command says otherwise: one without the engine's flags may have none."""
        if positional is None or (positional == "model" and positional not in self.by_flat):
            return None
        if positional not in self.by_flat:
            raise PluginError(
                f"parse_flags has positional={positional!r}; fields are {', '.join(sorted(self.by_flat)) or 'none'}."
            )
        return self.by_flat[positional]

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
            self._read_other(spelling, base, dot + path, value_or_none, rest)

    def _read_other(self, spelling: str, base: str, path: str, value: str | None, rest: list[str]) -> None:
        """A flag of vLLM's that has another name here, or that asks for nothing."""
        is_no, name = base.startswith("--no-"), base.removeprefix("--").replace("-", "_")
        names = other_names() if self.engine else {}
        is_no = is_no and name not in names
        other = names.get(name.removeprefix("no_") if is_no else name)
        here = other.here.removeprefix("!").replace("_", "-") if other is not None else ""
        if other is None or (here and f"--{here}" not in self.spellings.keys() | self.section_flags.keys()):
            engine_only = ["--config", "--plugin-config"] if self.engine else []
            known = [*self.spellings, *self.section_flags, *engine_only, "--help"]
            raise ConfigError(f"Unknown flag {spelling}.{did_you_mean(base, known)} --help lists all flags.")
        if here:
            negative = "no-" if is_no != other.here.startswith("!") else ""
            self._read_flag(f"--{negative}{here}{path}" + (f"={value}" if value is not None else ""), rest)
        elif value is None and (other.is_switch or is_no):
            other.check(spelling, not is_no)
        else:
            other.check(spelling, read_any(self._value(spelling, value, rest)))

    def _read_field(self, flag: Flag, spelling: str, base: str, path: str, value: str | None, rest: list[str]) -> None:
        if path:
            if not flag.is_mapping:
                raise ConfigError(
                    f"{spelling}: {flag.name} takes one value, not fields of its own; leave out {path!r}."
                )
            self._set_path(flag, spelling, path, read_any(self._value(spelling, value, rest)))
        elif flag.is_bool and value is None and rest and rest[0] in flag.choices:
            self._set(flag, flag.read(rest.pop(0), spelling), spelling)
        elif flag.is_bool and (value is None or base.startswith("--no-")):
            if value is not None:
                raise ConfigError(
                    f"{spelling} takes no value (got {value!r}); use {flag.name}={value} or {spelling} alone."
                )
            self._set(flag, not base.startswith("--no-") or base == flag.name, spelling)
        else:
            self._set(flag, self._read_value(flag, spelling, value, rest), spelling)

    def _read_value(self, flag: Flag, spelling: str, value: str | None, rest: list[str]) -> Any:
        """One value, or the items of a list: `1 2`, `=1` or `[1, 2]`."""
        first = self._value(spelling, value, rest)
        is_unset = first.lower() in ("none", "null") and type(None) in alternatives(flag.hint)
        if not flag.is_list or first.startswith("[") or is_unset:
            return flag.read(first, spelling)
        texts = [first]
        while value is None and rest and not self._looks_like_flag(rest[0]):
            texts.append(rest.pop(0))
        item = list_item(flag.hint)
        try:
            return [read_as(text, item) for text in texts]
        except ValueError:
            return flag.read(" ".join(texts), spelling)  # raises, with what would be right

    def _read_section(self, spelling: str, section: str, field: str, value: str | None, rest: list[str]) -> None:
        fields = SECTIONS[section].__struct_fields__
        head, _, path = field.partition(".")
        if field and (head in fields or f"{section}.{head}" not in other_names()):
            flag = self._section_flag(section, head, spelling)
            if path:
                self._set_path(flag, spelling, path, read_any(self._value(spelling, value, rest)))
            else:
                self._set(flag, self._read_value(flag, spelling, value, rest), spelling)
            return
        text = self._value(spelling, value, rest)
        if field:
            given = {head: read_any(text)}
        else:
            given = _json_object(text, spelling, example=self._section_example(section))
        for key, item in translated(given, fields, f"{section}."):
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
                found = {name: _nested(field, read_any(text))}
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
        if flag.key in self.given:
            other_value, other = self.given[flag.key]
            what = f"{flag.section}.{flag.field}" if flag.section else flag.field
            if flag.is_list:  # its values may be keys
                raise ConfigError(
                    f"{other} and {spelling} both set {what}; give all values behind one, as {spelling} A B."
                )
            raise ConfigError(f"{other} and {spelling} both set {what} ({other_value!r} and {value!r}); give it once.")
        self.given[flag.key] = (value, spelling)

    def _set_path(self, flag: Flag, spelling: str, path: str, value: Any) -> None:
        fields, first = self.given.get(flag.key, ({}, spelling))
        if not isinstance(fields, dict):
            raise ConfigError(f"{first} and {spelling} both set {flag.flat}; give it once.")
        _merge(fields, _nested(path, value), spelling)
        self.given[flag.key] = (fields, first)

    def _add_file(self, path: str) -> None:
        """Settings of a JSON, TOML or YAML file, for what no flag gave."""
        given = {name.replace("-", "_"): value for name, value in read_settings_file(path).items()}
        known = self.by_flat.keys() | {PLUGIN_CONFIG} | {f"{section}_config" for section in SECTIONS}
        for flat, value in translated(given, known):
            section = flat.removesuffix("_config")
            if flat == PLUGIN_CONFIG and isinstance(value, dict):
                for plugin, fields in value.items():
                    self.plugin_config[plugin] = {**fields, **self.plugin_config.get(plugin, {})}
            elif flat.endswith("_config") and section in SECTIONS and isinstance(value, dict):
                for field, item in translated(value, SECTIONS[section].__struct_fields__, f"{section}."):
                    self._set_default(self._section_flag(section, field, path), item, f"{path}: {flat}.{field}")
            elif flat in self.by_flat:
                flag = self.by_flat[flat]
                is_one = flag.is_list and isinstance(value, str)
                self._set_default(flag, [value] if is_one else value, f"{path}: {flat}")
            else:
                raise ConfigError(f"{path} has unknown setting {flat!r}.{did_you_mean(flat, self.by_flat)}")

    def add_environment(self, environ: Mapping[str, str]) -> None:
        """Settings that variables spell, for what no flag gave."""
        for setting, (text, variable) in env.settings(environ).items():
            if setting in self.by_flat:
                flag = self.by_flat[setting]
                if flag.key in self.given and self.given[flag.key][1].startswith("-"):
                    continue
                self.given[flag.key] = ([text] if flag.is_list else flag.read(text, variable), variable)

    def _set_default(self, flag: Flag, value: Any, spelling: str) -> None:
        self.given.setdefault(flag.key, (value, spelling))

    # Building.

    def build(self) -> Parsed:
        sections: dict[str, Any] = {}
        built: dict[str, Any] = {}
        for owner, section, struct in all_structs(self.structs, self.engine):
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


def _json_object(text: str, spelling: str, *, example: str) -> dict[str, Any]:
    found = read_any(text)
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
