"""`pelton bench speculation`: decoding with drafts, at full acceptance and at none, against decoding without.

Weights are `cycle_loader`'s: texts either go round, so that every draft is right, or never come back to a token, so that there is
nothing to draft; or each of their n-grams is in the prompt with another token behind it, so that drafts are found and refused. Each
engine has a process of its own. All engines must give the same ids.
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import msgspec

from pelton.cli.table import format_table
from pelton.errors import ConfigError, EngineError
from pelton_plugins.bench.bounds import check_at_least
from pelton_plugins.bench.record import flat_settings, number, today, versions, write_json
from pelton_plugins.bench.table.shapes import DENSE, SHAPES, write_shape
from pelton_plugins.flags import parse_flags

CASES = ("repeats", "never repeats", "misleads")
MOST_COST, LEAST_SPEEDUP, MOST_LOSS = 1.25, 2.5, 0.05
"""What is aimed at: a step with 3 drafts by one without, the gain at full acceptance, the loss at none."""
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_pauses")
_NGRAM = 3
"""Tokens that are found again in a prompt that misleads: `prompt_lookup_min`."""
DOC = """Measure n-gram speculation: texts that go round, whose drafts are all right, texts that never come back to a token, and texts
whose drafts are all wrong.
Weights are random but for embedding and LM head: nothing is fetched. Drafts, those accepted and pauses are counted.

Engines start one after another; with --kv-cache-memory-bytes, which leaves room for all, at once, and measure in turn.

  pelton bench speculation --models qwen3-0.6b --rows 1 8 32 --drafts 3 5
  pelton bench speculation --models llama3.1-8b --rows 1 --drafts 3 --texts repeats --kv-cache-memory-bytes 6000000000"""


class SpeculationArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments: what to measure."""

    models: list[str] = msgspec.field(default_factory=lambda: list(DENSE))
    """Shapes to measure, with an LM head of their own; or folders with a config.json."""
    rows: list[int] = msgspec.field(default_factory=lambda: [1, 8, 32])
    """Requests at once."""
    drafts: list[int] = msgspec.field(default_factory=lambda: [3, 5])
    """num_speculative_tokens."""
    texts: list[str] = msgspec.field(default_factory=lambda: list(CASES))
    """Kinds of text: repeats, never repeats, misleads."""
    input_len: int = 128
    output_len: int = 256
    """At least 2: a step's time is that of the second half of the tokens, by the difference of two runs."""
    repeats: int = 3
    """Runs that count."""
    output_json: str | None = None
    """Write the result here."""

    def __post_init__(self) -> None:
        check_at_least(self, repeats=1, input_len=1, output_len=2)
        for text in self.texts:
            if text not in CASES:
                raise ConfigError(f"--texts is {text!r}; use any of {', '.join(map(repr, CASES))}.")


def run(argv: list[str]) -> int:
    parsed = parse_flags(argv, [SpeculationArguments], positional=None, program="pelton bench speculation", doc=DOC)
    arguments: SpeculationArguments = parsed.structs["SpeculationArguments"]
    settings = flat_settings(parsed)
    if "model" in settings or "speculative_config" in settings:
        raise ConfigError("Models are named by --models, drafts by --drafts.")
    results: dict[str, Any] = {}
    for model in arguments.models:
        with tempfile.TemporaryDirectory(prefix="pelton-bench-") as folder:
            results[model] = _measure_model(model, arguments, settings, Path(folder))
        print(f"{model}, {arguments.input_len} in, {arguments.output_len} out:\n{render(results[model])}")
    write_json(arguments.output_json, {"date": today(), "versions": versions(), "models": results})
    return 0 if all(found["ids_are_equal"] for found in results.values()) else 1


def _measure_model(
    model: str, arguments: SpeculationArguments, settings: dict[str, Any], folder: Path
) -> dict[str, Any]:
    path = write_shape(model, folder) if model in SHAPES else Path(model)
    config = json.loads((path / "config.json").read_text()) | {"tie_word_embeddings": False}
    untied = folder / "untied"
    untied.mkdir()
    (untied / "config.json").write_text(json.dumps(config))
    longest = max(arguments.input_len, (_NGRAM + 1) * arguments.output_len) + arguments.output_len
    base = {"load_format": "cycle", "skip_tokenizer_init": True, "max_model_len": longest + 64, "model": str(untied)}
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        engines: dict[int, Popen[str]] = {}

        def start(count: int) -> None:
            own = {"speculative_config": {"method": "ngram", "num_speculative_tokens": count}} if count else {}
            job = {"settings": base | settings | own, "arguments": msgspec.to_builtins(arguments)}
            command = [sys.executable, "-m", "pelton_plugins.bench.speculation", json.dumps(job)]
            engines[count] = stack.enter_context(Popen(command, stdin=PIPE, stdout=PIPE, text=True))
            stack.callback(engines[count].kill)  # those that still wait, when another fails

        counts = (0, *arguments.drafts)
        for count in counts if "kv_cache_memory_bytes" in settings else ():
            start(count)
        for count in counts:
            if count not in engines:
                start(count)
            found[str(count)] = {f"{one.pop('case')}, {one['rows']}": one for one in _lines_of(engines[count])}
            print(f"{model}: {count} drafts done", file=sys.stderr)
    return {"engines": found, "ids_are_equal": all(
        one["ids"] == found["0"][name]["ids"] for rows in found.values() for name, one in rows.items()
    )}  # fmt: skip


def _lines_of(process: Popen[str]) -> Iterator[dict[str, Any]]:
    """Tell an engine that its turn has come, and yield what it measures."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)
    if process.wait():
        raise EngineError(f"The measuring process ended with status {process.returncode}; its messages are above.")


HEADER = (
    "text",
    "rows",
    "drafts",
    "tokens/s",
    "x plain",
    "tokens a step",
    "step x plain",
    "accepted",
    "pauses",
    "reached",
)


def render(found: dict[str, Any]) -> str:
    plain, lines = found["engines"]["0"], []
    for count, rows in found["engines"].items():
        for name, one in rows.items():
            speedup = one["out_tok_s"] / plain[name]["out_tok_s"]
            cost = one["step_ms"] / plain[name]["step_ms"]
            lines.append([
                name.partition(",")[0], str(one["rows"]), count, number(one["out_tok_s"], 5), f"{speedup:.2f}",
                f"{one['tokens_a_step']:.2f}", f"{cost:.2f}",
                f"{one['num_accepted_tokens']}/{one['num_draft_tokens']}", str(one["num_pauses"]),
                _reached(name, int(count), speedup, cost),
            ])  # fmt: skip
    ids = "The ids are those without drafts." if found["ids_are_equal"] else "THE IDS DIFFER from those without drafts."
    return f"{format_table(HEADER, lines, indent='  ')}\n{ids}"


def _reached(name: str, count: int, speedup: float, cost: float) -> str:
    if not count:
        return "-"
    if name.startswith(CASES[0]):
        is_reached = speedup >= LEAST_SPEEDUP and (count != 3 or cost <= MOST_COST)
    else:
        is_reached = speedup >= 1 - MOST_LOSS
    return "yes" if is_reached else "no"


# In the measuring process.


def measure(job: dict[str, Any], until_its_turn: Callable[[], object] = lambda: None) -> Iterator[dict[str, Any]]:
    """Yield a line for each case and number of rows, once the engine has started and `until_its_turn` has returned."""
    from pelton import LLM
    from pelton_plugins.bench.host.cycle_loader import num_round_tokens
    from pelton_plugins.bench.offline import greedy

    arguments = msgspec.convert(job["arguments"], SpeculationArguments)
    with LLM(**job["settings"], disable_log_stats=False) as llm:
        until_its_turn()
        half = arguments.output_len // 2
        vocab_size = llm.llm_engine.model.vocab_size
        for case in (case for case in reversed(CASES) if case in arguments.texts):
            for rows in arguments.rows:
                seconds, halves, ids, before = [], [], hashlib.sha256(), _counts(llm)
                for repeat in range(arguments.repeats + 1):
                    draw = random.Random(f"{case} {rows} {repeat}").randrange
                    prompts, others = (
                        [_prompt(case, draw, arguments, vocab_size, num_round_tokens(vocab_size)) for _ in range(rows)]
                        for _ in range(2)
                    )
                    outputs, took = _timed(llm, prompts, greedy([arguments.output_len] * rows))
                    ids.update(json.dumps(outputs).encode())
                    seconds.append(took)
                    halves.append(_timed(llm, others, greedy([half] * rows))[1])
                    if repeat == 0:
                        before = _counts(llm)
                counts = {name: value - before[name] for name, value in _counts(llm).items()}
                num_tokens = rows * arguments.output_len
                took, took_half = statistics.median(seconds[1:]), statistics.median(halves[1:])
                num_decoded = rows * (arguments.output_len + half - 2) * arguments.repeats
                tokens_a_step = num_decoded / (num_decoded - counts["num_accepted_tokens"])
                yield {
                    "case": case, "rows": rows, "out_tok_s": num_tokens / took, "tokens_a_step": tokens_a_step,
                    "step_ms": (took - took_half) / (arguments.output_len - half) * tokens_a_step * 1e3,
                    "all_seconds": seconds[1:], "all_half_seconds": halves[1:], "ids": ids.hexdigest(), **counts,
                }  # fmt: skip


def _prompt(case: str, draw: Any, arguments: SpeculationArguments, vocab_size: int, first: int) -> list[int]:
    if case == "repeats":
        token_id = draw(first)
        return [token_id - token_id % 8 + (token_id + i) % 8 for i in range(arguments.input_len)]
    if case == "never repeats":
        return [draw(first, vocab_size - 4096) for _ in range(arguments.input_len)]
    start = draw(
        first + _NGRAM, vocab_size - 4096
    )  # what is generated goes on from here; what follows in the prompt does not
    grams = [[*range(start + place - _NGRAM, start + place), draw(first)] for place in range(arguments.output_len)]
    return [*(token for gram in grams for token in gram), *range(start - _NGRAM, start)]


def _timed(llm: Any, prompts: list[list[int]], params: Any) -> tuple[list[list[int]], float]:
    import time

    began = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    took = time.perf_counter() - began
    return [list(output.outputs[0].token_ids) for output in outputs], took


def _counts(llm: Any) -> dict[str, int]:
    found = dict.fromkeys(COUNTERS, 0)
    for metric in llm.get_metrics():
        for name in COUNTERS:
            if metric.name.endswith(f"spec_decode_{name}"):
                found[name] += int(metric.value)
    return found


if __name__ == "__main__":
    for line in measure(json.loads(sys.argv[1]), sys.stdin.read):  # which ends when the engine's turn has come
        print(json.dumps(line), flush=True)
