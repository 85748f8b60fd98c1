"""`pelton bench cpu-table`: the demo model on CPU cores, row by row beside other engines, which may run in the same run.

One run for each instruction set that is asked for: `auto` is what Pelton takes by itself; with the others the other
sets are switched off for every engine that can do without them.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.model.resolve import DUMMY_FORMAT, locate, resolve_model
from pelton.plugins import load_plugins
from pelton_plugins.bench.bounds import check_at_least
from pelton_plugins.bench.cpu.engines import (
    PELTON,
    Engine,
    bound_to,
    find_peer,
    kept_to,
    usable_cores,
)
from pelton_plugins.bench.cpu.peers import RECORDED, ROWS
from pelton_plugins.bench.cpu.render import render
from pelton_plugins.bench.cpu.run import CANNOT_RUN, FIRST_START, SAMPLING, Run
from pelton_plugins.bench.cpu.sets import AUTO, BYTES, ENVIRON, ModelWork, work_of
from pelton_plugins.bench.record import flat_settings, versions, write_json
from pelton_plugins.bench.table.command import merge, read_results
from pelton_plugins.flags import parse_flags

DEMO = "smollm2"
NAMES = (*(row.name for row in ROWS), SAMPLING)
FURTHER = (FIRST_START, SAMPLING)
DEFAULT_ROWS = tuple(name for name in NAMES if name not in FURTHER)
SETS = (AUTO, *ENVIRON)
DOC = f"""Measure the rows that Pelton is compared by on CPU cores, and print them beside other engines' recorded figures.
Rows: {", ".join(NAMES)}. The model is the demo model unless --model says otherwise.

  pelton bench cpu-table --results cpu.json                      all rows but {" and ".join(FURTHER)}
  pelton bench cpu-table --rows latency,ttft --peer vllm=ENV/bin/python --peer-model vllm=FOLDER
  pelton bench cpu-table --isa auto,avx2 --variants float32,gguf --peer llama.cpp:gguf=ENV/bin/python \\
    --peer llama.cpp:gguf@avx2=ENV2/bin/python                   instruction sets, and dtypes or packed weights beside
  pelton bench cpu-table --show --results cpu.json               print what was gathered

--peer and --peer-model may be given several times. Peers: {", ".join(RECORDED)}. A :LABEL tells two of a kind apart, and when it
is a variant's name they are compared; @SET is a build for one instruction set, of engines that have no switch for it."""


class CpuTableArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments: what to measure, which engines beside Pelton, and where results gather."""

    rows: list[str] = msgspec.field(default_factory=lambda: list(DEFAULT_ROWS))
    """Rows to measure, also as one comma list."""
    isa: list[str] = msgspec.field(default_factory=lambda: [AUTO])
    """Instruction sets to run everything with, one after the other, also as one comma list; auto is Pelton's own choice."""
    variants: list[str] = msgspec.field(default_factory=list)
    """Further columns of Pelton: a dtype, or a method of --quantization, also as one comma list."""
    peer: list[str] = msgspec.field(default_factory=list)
    """NAME[:LABEL][@SET]=PYTHON: an engine to run as well, with the interpreter of the environment that has it."""
    peer_model: list[str] = msgspec.field(default_factory=list)
    """NAME[:LABEL]=PATH: the model in a format that this peer reads; Pelton's when unset."""
    num_cores: int | None = None
    """Cores that all processes are bound to, the load's too; those usable when unset."""
    repeats: int = 3
    """Runs of a row, of which the median counts."""
    results: str | None = None
    """A JSON file: what is in it stays, and new rows are put over old ones."""
    show: bool = False
    """Measure nothing: print what --results holds."""
    json: bool = False
    """Print JSON."""
    markdown: bool = False
    """Print the table for a page in Markdown."""

    def __post_init__(self) -> None:
        check_at_least(self, repeats=1)


def run(argv: list[str]) -> int:
    argv = join_repeated(argv, ("--peer", "--peer-model"))
    parsed = parse_flags(argv, [CpuTableArguments], positional=None, program="pelton bench cpu-table", doc=DOC)
    arguments: CpuTableArguments = parsed.structs["CpuTableArguments"]
    results = read_results(arguments.results)
    failed = False
    if not arguments.show:
        rows = check_rows(arguments.rows)
        cores = pick_cores(arguments.num_cores)
        settings = {"model": DEMO, "dtype": "bfloat16", **flat_settings(parsed)}
        check_model(results, settings["model"], arguments.results)
        sets = check_sets(arguments.isa)
        with ending_on_sigterm(), bound_to(cores), tempfile.TemporaryDirectory(prefix="pelton-bench-") as folder:
            plugins = load_plugins()
            model = locate(settings["model"], parsed.config, plugins, needs_weights=not is_dummy(parsed.config))
            engines = find_engines(arguments, settings, str(model), cores, Path(folder))
            work = find_work(parsed.config, settings)
            for isa in sets:
                table = Run(engines_of(engines, isa), rows, arguments.repeats, cores, Path(folder), work=work)
                for name, found in table.measure():
                    failed |= "error" in found and not found["error"].startswith(CANNOT_RUN)
                    merge(results, name, {"model": settings["model"], **found})
                    write_json(arguments.results, results)
    print(json.dumps(results, indent=1) if arguments.json else render(results, as_markdown=arguments.markdown))
    return 1 if failed else 0


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """A command that is told to end takes its engines along: they lead sessions of their own."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def join_repeated(argv: list[str], names: tuple[str, ...]) -> list[str]:
    """Flags that are given several times as one flag with several values."""
    rest: list[str] = []
    found: dict[str, list[str]] = {}
    tokens = list(argv)
    while tokens:
        name, equals, value = tokens.pop(0).partition("=")
        if name.replace("_", "-") not in names:
            rest.append(name + equals + value)
            continue
        values = found.setdefault(name.replace("_", "-"), [])
        values += [value] if equals else []
        while not equals and tokens and not tokens[0].startswith("-"):
            values.append(tokens.pop(0))
    return [*rest, *(token for name, values in found.items() for token in (name, *values))]


def check_rows(texts: list[str]) -> list[str]:
    """Names in the table's order."""
    names = [part for text in texts for part in text.split(",") if part]
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"--rows has {name!r}; the rows are {', '.join(NAMES)}.")
    return [name for name in NAMES if name in names]


def pick_cores(num_cores: int | None) -> list[int]:
    usable = usable_cores()
    if num_cores is not None and not 1 <= num_cores <= len(usable):
        raise ConfigError(
            f"--num-cores is {num_cores}; this process may use {len(usable)}, so take 1 to {len(usable)}."
        )
    return usable[:num_cores]


def check_model(results: dict[str, dict[str, Any]], model: str, path: str | None) -> None:
    others = {row.get("model") for rows in results.values() for row in rows.values()} - {model}
    if others:
        raise ConfigError(f"--results {path} holds rows of {others.pop()}, not of {model}; name another file.")


def check_sets(texts: list[str]) -> list[str]:
    names = list(dict.fromkeys(part for text in texts for part in text.split(",") if part))
    for name in names:
        if name not in SETS:
            raise ConfigError(f"--isa has {name!r}; the instruction sets are {', '.join(SETS)}.")
    return names


def find_work(config: EngineConfig, settings: dict[str, Any]) -> ModelWork | None:
    """Return what a token of the model computes; None for a model that is not a plain decoder."""
    flat = {key: value for key, value in settings.items() if key != "plugin_config"}
    flat |= {"skip_tokenizer_init": True, "load_format": config.load.load_format}
    return work_of(resolve_model(EngineConfig.from_flat(**flat), load_plugins()).hf_config)


class Peer(NamedTuple):
    """One engine that --peer names."""

    kind: str
    label: str
    isa: str

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.label}" if self.label else self.kind


def find_engines(
    arguments: CpuTableArguments, settings: dict[str, Any], model: str, cores: list[int], folder: Path
) -> list[Engine]:
    """Pelton and its variants, then the peers in their order. Raises `ConfigError` for one that is not there, before
    anything runs."""
    peers, models = (
        read_pairs("--peer", arguments.peer, "PYTHON"),
        read_pairs("--peer-model", arguments.peer_model, "PATH"),
    )
    names = {peer.name for peer in peers}
    paths = {peer.name: path for peer, path in models.items()}
    for name in paths:
        if name not in names:
            raise ConfigError(f"--peer-model names {name}, which no --peer does; add --peer {name}=PYTHON.")
    engines = [Engine(PELTON, sys.executable, settings, versions=versions())]
    for variant in dict.fromkeys(part for text in arguments.variants for part in text.split(",") if part):
        changed = {"dtype": variant} if variant in BYTES else {"quantization": variant}
        engines.append(Engine(f"{PELTON} {variant}", sys.executable, {**settings, **changed}, versions=versions()))
    for peer, python in peers.items():
        if shutil.which(python) is None:
            raise ConfigError(
                f"--peer {peer.name}={python}: there is no such program. Give the path of a Python interpreter."
            )
        path = paths.get(peer.name, model)
        engine = find_peer(peer.kind, python, path, cores, folder, label=peer.name)
        engine.isa = peer.isa
        engines.append(engine)
    return engines


def engines_of(engines: list[Engine], isa: str) -> list[Engine]:
    """Those that run with an instruction set: a build for it before one that it is switched off for."""
    own = {engine.name for engine in engines if engine.isa == isa != AUTO}
    return [
        kept_to(engine, isa)
        for engine in engines
        if engine.isa == isa or (engine.isa == AUTO and engine.name not in own)
    ]


def read_pairs(flag: str, texts: list[str], what: str) -> dict[Peer, str]:
    found: dict[Peer, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        rest, _, isa = name.partition("@")
        kind, _, label = rest.partition(":")
        if kind not in RECORDED or not value:
            raise ConfigError(f"{flag} is {text!r}; use NAME={what} with a NAME of {', '.join(RECORDED)}.")
        if isa and isa not in ENVIRON:
            raise ConfigError(f"{flag} is {text!r}; the instruction sets are {', '.join(ENVIRON)}.")
        peer = Peer(kind, label, isa or AUTO)
        if peer in found:
            raise ConfigError(f"{flag} names {name} twice; give it once.")
        found[peer] = value
    return found


def is_dummy(config: EngineConfig) -> bool:
    return config.load.load_format == DUMMY_FORMAT
