"""`pelton bench embed`: texts a second through an embedding model, beside other engines in the same run."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from pelton.cli.table import format_table
from pelton.errors import ConfigError
from pelton_plugins.bench.bounds import check_at_least
from pelton_plugins.bench.embed.engines import ENGINES
from pelton_plugins.bench.record import circumstances, flat_settings, number, write_json
from pelton_plugins.flags import parse_flags

DOC = """Texts a second, from strings to vectors, tokenizing included: the median of some calls with many texts, each engine in a
process of its own, one after the other and then again. An engine whose package is missing is left out, and the reason told.

  pelton bench embed minilm --lengths 32 256
  pelton bench embed minilm --engines pelton transformers --output-json embed.json
  pelton bench embed minilm --http --num-clients 2            inputs a second through /v1/embeddings, in base64"""


class EmbedArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The texts, and who embeds them."""

    lengths: list[int] = msgspec.field(default_factory=lambda: [32, 256])
    """Tokens of each text, special ones included; a row of the table for each."""
    num_tokens: int = 32_768
    """Tokens of a call: as many texts as that makes."""
    repeats: int = 3
    """Calls that count, of each engine in each of its turns."""
    turns: int = 2
    """How often each engine has its turn."""
    engines: list[str] = msgspec.field(default_factory=lambda: list(ENGINES))
    """pelton, transformers, sentence-transformers, fastembed (ONNX)."""
    num_threads: int | None = None
    """Threads of each engine; one a core when unset."""
    http: bool = False
    """Start a server with the engine's flags and send requests to /v1/embeddings; the fields below say how."""
    url: str | None = None
    """A server that runs already, instead."""
    num_clients: int = 4
    """Processes that send."""
    connections: int = 8
    """Of each client, with a request in flight on each."""
    batch_size: int = 32
    """Inputs of a request."""
    texts: bool = False
    """Send texts, which the server tokenizes; token ids otherwise."""
    seconds: float = 5.0
    """Seconds that count, for each length, --repeats times."""
    warm_s: float = 2.0
    """Seconds of sending before those."""
    output_json: str | None = None
    """Write the result here."""

    def __post_init__(self) -> None:
        check_at_least(self, num_tokens=1, repeats=1, turns=1, num_clients=1, connections=1, batch_size=1)
        if not self.seconds > 0 or not self.warm_s >= 0:
            raise ConfigError(f"seconds is {self.seconds} and warm_s {self.warm_s}; use such as 5 and 2.")
        if any(length < 3 for length in self.lengths):
            raise ConfigError(f"lengths is {self.lengths}; use at least 3, such as 32 256.")
        unknown = [name for name in self.engines if name not in ENGINES]
        if unknown:
            raise ConfigError(f"engines has {unknown[0]!r}; there are {', '.join(ENGINES)}.")


def run(argv: list[str]) -> int:
    parsed = parse_flags(argv, [EmbedArguments], program="pelton bench embed", doc=DOC)
    arguments: EmbedArguments = parsed.structs["EmbedArguments"]
    settings = flat_settings(parsed)
    if arguments.http or arguments.url is not None:
        from pelton_plugins.bench.embed import http as embed_http

        return embed_http.run(arguments, settings)
    threads = arguments.num_threads or len(os.sched_getaffinity(0))
    path = _folder(parsed.config)
    found: dict[str, dict[str, Any]] = {}
    for turn in range(arguments.turns):
        for name in arguments.engines:
            print(f"turn {turn + 1} of {arguments.turns}: {name}", file=sys.stderr)
            _add(found.setdefault(name, {}), _measured(name, path, arguments, settings, threads))
    result: dict[str, Any] = {
        "threads": threads, "num_tokens": arguments.num_tokens, "lengths": arguments.lengths, "engines": found
    }  # fmt: skip
    result |= circumstances(f"{threads} threads of this CPU", settings)
    print(render(result))
    write_json(arguments.output_json, result)
    return 0


def _folder(config: Any) -> str:
    from pelton.model.resolve import locate
    from pelton.plugins import load_plugins

    path = locate(config.model.model, config, load_plugins())
    if not Path(path).is_dir():
        raise ConfigError(f"{path} is not a folder; give the Hugging Face folder of an embedding model.")
    return str(path)


def _measured(
    name: str, path: str, arguments: EmbedArguments, settings: dict[str, Any], threads: int
) -> dict[str, Any]:
    """One turn of one engine, in a process of its own."""
    job = {
        "engine": name, "path": path, "lengths": arguments.lengths, "num_tokens": arguments.num_tokens,
        "repeats": arguments.repeats, "settings": {**settings, "model": path}, "threads": threads,
    }  # fmt: skip
    own = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    done = subprocess.run(
        [sys.executable, "-m", "pelton_plugins.bench.embed.engines"], input=json.dumps(job), text=True,
        capture_output=True, env={**os.environ, **own},
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return {"error": reason}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _add(all_turns: dict[str, Any], turn: dict[str, Any]) -> None:
    if "error" in turn:
        all_turns["error"] = turn["error"]
        return
    all_turns["version"] = turn["version"]
    for length, rates in turn["texts_per_s"].items():
        all_turns.setdefault("texts_per_s", {}).setdefault(length, []).extend(rates)
    all_turns["cosine"] = turn["cosine"]


def render(result: dict[str, Any]) -> str:
    engines = result["engines"]
    rows = []
    for length in result["lengths"]:
        for name, engine in engines.items():
            rates = engine.get("texts_per_s", {}).get(str(length))
            if rates:
                best = f"{number(min(rates), 4)} to {number(max(rates), 4)}"
                rows.append((length, name, number(statistics.median(rates), 4), best))
    table = format_table(("tokens", "engine", "texts/s", "least to most"), rows, indent="  ")
    notes = [f"  {name}: left out: {engine['error']}" for name, engine in engines.items() if "error" in engine]
    versions = ", ".join(f"{name} {engine['version']}" for name, engine in engines.items() if "version" in engine)
    cosines = ", ".join(
        f"{name} {engine['cosine']:.6f}" for name, engine in engines.items() if "cosine" in engine and name != "pelton"
    )
    said = [f"{result['num_tokens']} tokens a call, {result['threads']} threads; {versions}", table, *notes]
    return "\n".join([*said, *([f"  least cosine with Pelton's vectors: {cosines}"] if cosines else [])])
