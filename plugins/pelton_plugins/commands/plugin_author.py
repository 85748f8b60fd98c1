"""`pelton plugins new` and `pelton plugins check`: begin a plugin package, and test an installed one.

A skeleton is a folder of `skeletons/`: a package that works, whose parts are called `skeleton`. `new` copies it under another name.
"""

from __future__ import annotations

import importlib.metadata
import keyword
import re
import sys
from collections import Counter
from pathlib import Path

import msgspec

from pelton.cli.table import format_table
from pelton.config.engine import did_you_mean
from pelton.errors import ConfigError
from pelton.plugins import DISTRIBUTION, GROUP
from pelton_plugins.flags import parse_flags

SKELETONS = Path(__file__).parent / "skeletons"
PLACEHOLDER = "skeleton"
OUR_PACKAGES = frozenset({"pelton_plugins", "pelton_backends", "pelton_platforms"})

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{distribution}"
version = "0.1.0"
description = "{description}"
requires-python = ">=3.11"
dependencies = ["pelton"]

[project.optional-dependencies]
test = ["pytest>=8"]

[project.entry-points.pelton]
{name} = "{package}.plugin"

[tool.hatch.build.targets.wheel]
packages = ["{package}"]
"""

README = """\
# {distribution}

{description}.

    pip install -e .[test]
    pelton plugins check {distribution}     # the conformance suites, a line each
    pytest tests                            # the same, as tests of this package

`{package}/plugin.py` says what the package offers. The suites, and the data they run with, are in `{package}/conformance.py`.
"""

TEST = '''\
"""Pelton's conformance suites over what this package offers."""

from {package}.conformance import *  # noqa: F403
'''


class NewArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments: where to write."""

    arguments: list[str] = []
    """KIND and NAME."""
    folder: str | None = None
    """Folder that the package is written into; by default one with the package's name."""


class CheckArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments: what to check."""

    arguments: list[str] = []
    """PACKAGE: a distribution, a plugin or an import package."""


def run(argv: list[str]) -> int:
    return (_new if argv[0] == "new" else _check)(argv[1:])


def kinds() -> dict[str, str]:
    """Kind to the first line of its skeleton's docstring."""
    found = {}
    for folder in sorted(path for path in SKELETONS.iterdir() if (path / "plugin.py").is_file()):
        found[folder.name.replace("_", "-")] = (folder / "plugin.py").read_text().partition('"""')[2].partition("\n")[0]
    return found


def _new(argv: list[str]) -> int:
    rows = [(kind, about.strip('." ').replace(PLACEHOLDER, "it")) for kind, about in kinds().items()]
    doc = "Write a plugin package that works, with a test that runs the conformance suites.\n\nKinds:\n" + format_table(
        ("KIND", "the skeleton"), rows, indent="  "
    )
    parsed = parse_flags(
        argv, [NewArguments], positional="arguments", program="pelton plugins new KIND NAME", doc=doc, engine=False,
        environ={},
    )  # fmt: skip
    arguments: NewArguments = parsed.structs["NewArguments"]
    if len(arguments.arguments) != 2:
        raise ConfigError(f"Give a kind and a name: pelton plugins new KIND NAME. Kinds: {', '.join(kinds())}.")
    kind, name = arguments.arguments
    folder = write_skeleton(kind, name, arguments.folder)
    distribution = "pelton-" + _snake(name).replace("_", "-")
    print(f"Wrote {folder}: pip install -e {folder}, then pelton plugins check {distribution}")
    return 0


def write_skeleton(kind: str, name: str, folder: str | None = None) -> Path:
    """Write the package; returns its folder. Raises `ConfigError`."""
    kind = kind.replace("_", "-")
    if kind not in kinds():
        raise ConfigError(f"There is no kind {kind!r}.{did_you_mean(kind, kinds())} Kinds: {', '.join(kinds())}.")
    snake = _snake(name)
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", snake) or keyword.iskeyword(snake):
        raise ConfigError(
            f"The name {name!r} cannot be a package's; use lower-case letters, digits and -, such as my-{kind}."
        )
    package, distribution = f"pelton_{snake}", "pelton-" + snake.replace("_", "-")
    if package in OUR_PACKAGES or snake in _names_of_ours():
        raise ConfigError(f"The name {name!r} is one of Pelton's own; use another, such as my-{kind}.")
    target = Path(folder if folder is not None else distribution)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already, and not empty; give another --folder.")
    facts = {"package": package, "distribution": distribution, "name": snake, "description": f"A Pelton plugin: {kind}"}
    files = {
        "pyproject.toml": PYPROJECT.format(**facts),
        "README.md": README.format(**facts),
        "tests/test_conformance.py": TEST.format(**facts),
        f"{package}/__init__.py": f'"""{facts["description"]}."""\n',
    }
    for file in sorted((SKELETONS / kind.replace("-", "_")).glob("*.py")):
        files[f"{package}/{file.name}"] = renamed(file.read_text(), snake)
    try:
        for path, text in files.items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_text(text)
    except OSError as error:
        raise ConfigError(f"The package cannot be written to {target}: {error}. Give another --folder.") from error
    return target


def _names_of_ours() -> set[str]:
    """Names of built-in plugins, of which there cannot be a second one."""
    points = importlib.metadata.entry_points(group=GROUP)
    return {point.name for point in points if point.dist is not None and point.dist.name == DISTRIBUTION}


def _snake(name: str) -> str:
    return name.removeprefix("pelton-").removeprefix("pelton_").replace("-", "_")


def renamed(text: str, snake: str) -> str:
    """A skeleton's text under the name of a package."""
    camel = "".join(part.capitalize() for part in snake.split("_"))
    text = text.replace(PLACEHOLDER.capitalize(), camel).replace(PLACEHOLDER.upper(), snake.upper())
    return text.replace(PLACEHOLDER, snake)


def _check(argv: list[str]) -> int:
    doc = "Put what an installed package offers through the conformance suites, and print a line for each check."
    parsed = parse_flags(
        argv, [CheckArguments], positional="arguments", program="pelton plugins check PACKAGE", doc=doc, engine=False,
        environ={},
    )  # fmt: skip
    names: list[str] = parsed.structs["CheckArguments"].arguments
    if len(names) != 1:
        raise ConfigError("Name one installed package: pelton plugins check PACKAGE.")
    from pelton.testing.check import FAILED, OK, SKIPPED, check_package

    counts: Counter[str] = Counter()
    for result in check_package(names[0]):
        counts[result.status] += 1
        print(result, flush=True)
    print(f"{counts[OK]} passed, {counts[FAILED]} failed, {counts[SKIPPED]} skipped", file=sys.stderr)
    return 1 if counts[FAILED] else 0
