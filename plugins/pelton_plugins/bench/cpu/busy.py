"""`pelton bench busy`: what is left of an engine's speed while other programs use the same cores.

Each engine is a process of its own (`busy_engine.py`). A round measures it alone, beside one loop that does nothing, beside two,
and beside a second engine that does the same work; rounds follow each other, and medians count.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from pelton.cli.table import format_table
from pelton.errors import EngineError
from pelton_plugins.bench.bounds import check_at_least
from pelton_plugins.bench.record import circumstances, flat_settings, number, write_json
from pelton_plugins.flags import parse_flags

ENGINE = "pelton_plugins.bench.cpu.busy_engine"
LOOP = "while True: pass"
SITUATIONS = {"alone": 0, "beside one busy loop": 1, "beside two": 2}  # loops
SIDE_BY_SIDE = ("two engines, the one", "two engines, the other")
DOC = """Speed of decoding, alone and beside programs that use the same cores: with one request, and of many at once.

  pelton bench busy smollm2
  pelton bench busy smollm2 --quantization gguf --output-json busy.json"""


class BusyArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of the measurement: what is decoded, and for how long."""

    num_seqs: int = 16
    """Requests at once, where there are many."""
    input_len: int = 64
    """Tokens of each prompt."""
    output_len: int = 24
    """Tokens made for each of many requests."""
    seconds: float = 2.0
    """Of each measurement, at least."""
    rounds: int = 3
    """How often everything is measured."""
    output_json: str | None = None
    """Write the result here."""

    def __post_init__(self) -> None:
        check_at_least(self, num_seqs=1, input_len=1, output_len=2, seconds=0.01, rounds=1)


def run(argv: list[str]) -> int:
    parsed = parse_flags(argv, [BusyArguments], program="pelton bench busy", doc=DOC)
    arguments: BusyArguments = parsed.structs["BusyArguments"]
    defaults = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "log_level": "warning"}
    settings = {**defaults, **flat_settings(parsed)}
    result = measure(settings, arguments)
    result |= circumstances(result.pop("device"), settings)
    print(render(result))
    write_json(arguments.output_json, result)
    return 0


class Engine:
    """A process with an engine, which does what it is told as long as it is told."""

    def __init__(self, settings: dict[str, Any], arguments: BusyArguments) -> None:
        job = {
            "settings": settings,
            **{name: getattr(arguments, name) for name in ("num_seqs", "input_len", "output_len")},
        }
        command = [sys.executable, "-m", ENGINE, json.dumps(job)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.device = ""

    def wait_until_ready(self) -> None:
        self.device = self.answer()["device"]

    def ask(self, work: str, seconds: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"work": work, "seconds": seconds}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(
                f"The engine's process ended with status {self._process.wait()}; its own message is above."
            )
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def measure(settings: dict[str, Any], arguments: BusyArguments) -> dict[str, Any]:
    found: dict[str, dict[str, list[float]]] = {}
    with contextlib.ExitStack() as stack:
        engines = []
        for _ in range(2):  # the second starts when the first has compiled what is to be compiled
            engines.append(Engine(settings, arguments))
            stack.callback(engines[-1].end)
            engines[-1].wait_until_ready()
        for index in range(arguments.rounds):
            for situation, values in _round(engines, arguments.seconds):
                for name, value in values.items():
                    found.setdefault(situation, {}).setdefault(name, []).append(value)
            print(f"\rround {index + 1} of {arguments.rounds} ", end="", file=sys.stderr)
        print(file=sys.stderr)
    medians = {
        situation: {name: statistics.median(values) for name, values in figures.items()}
        for situation, figures in found.items()
    }
    alone = medians["alone"]
    shares = {
        situation: {
            "one_request": alone["ms_a_token"] / figures["ms_a_token"],
            "many_requests": figures["out_tok_s"] / alone["out_tok_s"],
        }
        for situation, figures in medians.items()
    }
    sizes = {name: getattr(arguments, name) for name in ("num_seqs", "input_len", "output_len", "rounds", "seconds")}
    return {"medians": medians, "shares": shares, "all": found, **sizes, "device": engines[0].device}


def _round(engines: list[Engine], seconds: float) -> Iterator[tuple[str, dict[str, float]]]:
    for situation, num_loops in SITUATIONS.items():
        with _loops(num_loops):
            for work in ("one", "many"):
                engines[0].ask(work, seconds)
                yield situation, engines[0].answer()
    for work in ("one", "many"):
        for engine in engines:
            engine.ask(work, seconds)
        yield from zip(SIDE_BY_SIDE, [engine.answer() for engine in engines], strict=True)


@contextlib.contextmanager
def _loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-S", "-c", LOOP]) for _ in range(count)]
    try:
        if loops:
            time.sleep(0.2)  # they run by then
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def render(result: dict[str, Any]) -> str:
    rows = [
        (
            situation, number(figures["ms_a_token"]), f"{result['shares'][situation]['one_request']:.0%}",
            number(figures["out_tok_s"]), f"{result['shares'][situation]['many_requests']:.0%}",
        )
        for situation, figures in result["medians"].items()
    ]  # fmt: skip
    header = ("", "ms a token, 1 request", "share", f"output tok/s, {result['num_seqs']} requests", "share")
    what = f"{result['input_len']} in, {result['output_len']} out, medians of {result['rounds']} rounds, {result['device']}"
    return f"{what}\n" + format_table(header, rows, indent="  ")
