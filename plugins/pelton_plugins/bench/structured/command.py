"""`pelton bench structured FILE`: JSON schemas with instances that are right and wrong, through a structured-output backend.

FILE has a line of JSON for each schema, as MaskBench (arXiv 2501.10868) writes them: `schema`, and `tests` with `data` and
`valid`. A schema passes when its right instances may be written token by token, and its wrong ones may not. Beside it the
same by llguidance as it comes. `--rows` measures in the engine what masks add to a token (`engine.py`).
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pelton.cli.table import format_table
from pelton.errors import ConfigError, PeltonError
from pelton.model.resolve import load_tokenizer, resolve_model
from pelton.plugins import load_plugins, make
from pelton.sampling_params import StructuredOutputsParams
from pelton.structured.interface import Grammar, StructuredOutputBackend, StructuredOutputContext
from pelton_plugins.bench.bounds import check_at_least
from pelton_plugins.bench.record import flat_settings, today, versions, write_json
from pelton_plugins.flags import parse_flags

_MOST_BEGINNINGS = 20_000
"""Texts that are tried to find the order of an instance's properties."""
LEAST_PASSING, MOST_REJECTED = 0.88, 0.005
MOST_COMPILE_P50_S, MOST_COMPILE_P99_S, MOST_MASK_P50_S = 5e-3, 50e-3, 50e-6
"""What is aimed at: schemas that pass, right instances that are refused, times."""
DOC = """Measure structured output: schemas of a file in MaskBench's form that pass, time to compile one, time of a mask.

  pelton bench structured maskbench.jsonl --model smollm2
  pelton bench structured maskbench.jsonl --rows 64"""


class StructuredArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments: what to measure."""

    file: str = ""
    """Schemas and their instances, a line of JSON each."""
    vocabularies: list[int] = msgspec.field(default_factory=lambda: [0, 131_072])
    """Sizes of vocabulary: 0 is the model's own, larger ones are its tokens and pairs of them."""
    limit: int | None = None
    """Schemas that are read, from the first."""
    alone: bool = True
    """Measure llguidance as it comes, too."""
    rows: int = 0
    """Measure in the engine instead: requests at once, each with a schema of its own."""
    output_len: int = 128
    """In the engine: tokens of each request."""
    repeats: int = 5
    """In the engine: runs with masks, each beside one without."""
    failures: bool = False
    """Name the schemas that do not pass."""
    output_json: str | None = None
    """Write the result here."""

    def __post_init__(self) -> None:
        check_at_least(self, rows=0, output_len=2, repeats=1)


def run(argv: list[str]) -> int:
    parsed = parse_flags(argv, [StructuredArguments], positional="file", program="pelton bench structured", doc=DOC)
    arguments: StructuredArguments = parsed.structs["StructuredArguments"]
    if not arguments.file:
        raise ConfigError("pelton bench structured needs a FILE of schemas; MaskBench's is on the Hub.")
    samples = read_samples(arguments.file, arguments.limit)
    settings = flat_settings(parsed)
    if arguments.rows:
        from pelton_plugins.bench.structured.engine import measure_engine, render_engine

        result = measure_engine(samples, arguments, settings)
        print(render_engine(result))
        write_json(arguments.output_json, {"date": today(), "versions": versions(), "settings": settings, **result})
        return 0
    if "model" not in settings:
        parsed = parse_flags([*argv, "--model", "smollm2"], [StructuredArguments], positional="file")
    found = measure(samples, parsed.config, arguments)
    print(render(found))
    if arguments.failures:
        print("\n".join(f"  {one['name']}: {one['why']}" for one in found[0]["failures"]))
    write_json(arguments.output_json, {"date": today(), "versions": versions(), "settings": settings, "runs": found})
    return 0 if all(reached(one) for one in found if one["backend"] != ALONE) else 1


def read_samples(path: str, limit: int | None) -> list[dict[str, Any]]:
    """Raises `ConfigError` for a file of another form."""
    try:
        lines = Path(path).read_text().splitlines()[:limit]
        found = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not found or not all(isinstance(one, dict) and {"schema", "tests"} <= one.keys() for one in found):
        raise ConfigError(f"{path} has lines without schema and tests; each is a schema with its instances.")
    return found


def measure(samples: Sequence[dict[str, Any]], config: Any, arguments: StructuredArguments) -> list[dict[str, Any]]:
    """Each backend on each vocabulary."""
    plugins = load_plugins()
    model = resolve_model(config, plugins)
    name, hook = config.structured_outputs.backend, "pelton_structured_output_backends"
    entry = plugins.find(hook, name, setting="structured_outputs_backend") if name else plugins.entries(hook)[0]
    found = []
    for wanted in arguments.vocabularies:
        vocab_size = wanted or model.vocab_size
        tokenizer = WideTokenizer(load_tokenizer(config, model, plugins), vocab_size)
        context = StructuredOutputContext(
            tokenizer_path=model.tokenizer_path or "", vocab_size=vocab_size, eos_token_ids=model.eos_token_ids,
            engine_config=config, load_tokenizer=lambda made=tokenizer: made,
        )  # fmt: skip
        ways: list[tuple[str, Callable[[Any], Grammar]]] = [
            (entry.name, _compiler(make(entry, StructuredOutputBackend, context)))
        ]
        if arguments.alone:
            ways.append((ALONE, _alone(tokenizer, vocab_size, model.eos_token_ids)))
        for label, compile_schema in ways:
            one = measure_backend(samples, compile_schema, tokenizer, vocab_size, model.eos_token_ids[0])
            found.append({"backend": label, "vocab_size": vocab_size, **one})
    return found


class WideTokenizer:
    """A tokenizer with more tokens: pairs of those that it has."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._base = tokenizer.vocab_size
        chooser, known = random.Random(0), {tokenizer.token_bytes(i) for i in range(self._base)}
        parts = sorted(token for token in known if 0 < len(token) <= 8)
        more: dict[bytes, None] = {}
        while self._base + len(more) < vocab_size:
            pair = chooser.choice(parts) + chooser.choice(parts)
            if pair not in known:
                more[pair] = None
        self._more = list(more)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id) if token_id < self._base else self._more[token_id - self._base]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def _compiler(backend: StructuredOutputBackend) -> Callable[[Any], Grammar]:
    backend.compile(StructuredOutputsParams(json_object=True))  # what it loads with the first
    return lambda schema: backend.compile(StructuredOutputsParams(json=json.dumps(schema)))


ALONE = "llguidance alone"


def _alone(tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> Callable[[Any], Any]:
    """The library's own reading of a schema, with its own defaults."""
    try:
        import llguidance
    except ImportError:
        raise ConfigError("llguidance is not installed here; leave it out with --no-alone.") from None

    class Wrapper:
        is_tokenizer_wrapper, bos_token_id, eos_token_id = True, None, eos_token_ids[0]
        tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]  # noqa: RUF012
        special_token_ids = sorted({*tokenizer.special_token_ids, *eos_token_ids})

        def __call__(self, text: Any) -> Any:
            text = text if isinstance(text, str) else text.decode(errors="replace")
            return tokenizer.encode(text, add_special_tokens=False)

    native = llguidance.LLTokenizer(Wrapper(), n_vocab=vocab_size, eos_token=list(eos_token_ids))

    class Alone:
        def __init__(self, schema: Any) -> None:
            source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
            self.matcher = llguidance.LLMatcher(native, source, log_level=0)
            if self.matcher.is_error():
                raise PeltonError(self.matcher.get_error().splitlines()[0])

        def fill_bitmask(self, row: Any, drafts: Sequence[int] = ()) -> None:
            self.matcher.unsafe_compute_mask_ptr(np.frombuffer(row, np.int32).ctypes.data, len(row))

        def accept(self, token_ids: Sequence[int]) -> bool:
            return bool(self.matcher.consume_tokens(list(token_ids)))

        def copy(self) -> Any:
            made = object.__new__(Alone)
            made.matcher = self.matcher.deep_copy()
            return made

    return Alone


def measure_backend(
    samples: Sequence[dict[str, Any]], compile_schema: Callable[[Any], Any], tokenizer: Any, vocab_size: int, eos: int
) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    compile_s: list[float] = []
    mask_s: list[float] = []
    failures = []
    for sample in samples:
        started = time.perf_counter()
        try:
            grammar = compile_schema(sample["schema"])
        except PeltonError as error:
            counts["refused"] += 1
            failures.append({"name": sample.get("name", ""), "why": str(error)[:200]})
            continue
        compile_s.append(time.perf_counter() - started)
        passes = True
        for test in sample["tests"]:
            is_taken = _takes(grammar, compile_schema, sample, test["data"], tokenizer, vocab_size, eos, mask_s)
            counts["valid" if test["valid"] else "invalid"] += 1
            if is_taken == test["valid"]:
                continue
            passes = False
            if test["valid"]:
                data = in_taken_order(test["data"], _beginner(grammar, compile_schema, sample, tokenizer))
                is_taken = _takes(grammar, compile_schema, sample, data, tokenizer, vocab_size, eos, [])
            what = "wrong accepted" if not test["valid"] else "right in another order" if is_taken else "right rejected"
            counts[what] += 1
            failures.append({"name": sample.get("name", ""), "why": what})
        counts["passing"] += passes
    shares = (0.5, 0.9, 0.99, 1.0)
    return {
        "num_schemas": len(samples), "counts": dict(counts), "num_masks": len(mask_s), "failures": failures,
        "compile_s": [float(np.quantile(compile_s or [0.0], share)) for share in shares],
        "mask_s": [float(np.quantile(mask_s or [0.0], share)) for share in shares],
        "mask_mean_s": float(np.mean(mask_s or [0.0])),
    }  # fmt: skip


def _takes(
    grammar: Any, compile_schema: Callable[[Any], Any], sample: dict[str, Any], data: Any, tokenizer: Any, vocab_size: int,
    eos: int, mask_s: list[float],
) -> bool:  # fmt: skip
    """True when the instance may be written, and be the end."""
    state = _fresh(grammar, compile_schema, sample)
    row = bytearray(4 * -(-vocab_size // 32))
    for token in [*tokenizer.encode(json.dumps(data, ensure_ascii=False), add_special_tokens=False), eos]:
        started = time.perf_counter()
        state.fill_bitmask(row)
        mask_s.append(time.perf_counter() - started)
        if not row[token >> 3] >> (token & 7) & 1 and not (token != eos and _goes_on(state, token)):
            return False
        if token != eos and not state.accept([token]):
            return False
    return True


def _goes_on(state: Any, token: int) -> bool:
    """True for a token that is allowed but not in the mask: where the next text is certain, masks have one token of it."""
    return hasattr(state, "validate") and state.validate([token]) == 1


def _fresh(grammar: Any, compile_schema: Callable[[Any], Any], sample: dict[str, Any]) -> Any:
    return grammar.copy() if hasattr(grammar, "copy") else compile_schema(sample["schema"])  # of a known schema: quick


def _beginner(
    grammar: Any, compile_schema: Callable[[Any], Any], sample: dict[str, Any], tokenizer: Any
) -> Callable[[str], bool]:
    def begins(text: str) -> bool:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return bool(_fresh(grammar, compile_schema, sample).accept(tokens))

    return begins


def in_taken_order(data: Any, begins: Callable[[str], bool]) -> Any:
    """The instance with the properties of each object in an order in which it may be written: how a constrained model writes it.
    As it is where none is found. begins: whether a text may be the beginning of one."""
    left = [_MOST_BEGINNINGS]

    def is_open(text: str) -> bool:
        left[0] -= 1
        return left[0] >= 0 and begins(text)

    def write(text: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            yield from write_object(text + "{", value, {})
        elif isinstance(value, list):
            yield from write_array(text + "[", value, [])
        elif is_open(text := text + json.dumps(value, ensure_ascii=False)):
            yield text, value

    def write_object(text: str, rest: dict[str, Any], made: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        if not rest and is_open(text + "}"):
            yield text + "}", made
        for name, value in rest.items():
            named = f"{text}{', ' if made else ''}{json.dumps(name, ensure_ascii=False)}: "
            if is_open(named):
                for written, inner in write(named, value):
                    others = {key: other for key, other in rest.items() if key != name}
                    yield from write_object(written, others, {**made, name: inner})

    def write_array(text: str, rest: list[Any], made: list[Any]) -> Iterator[tuple[str, Any]]:
        if not rest and is_open(text + "]"):
            yield text + "]", made
        elif rest:
            for written, inner in write(text + (", " if made else ""), rest[0]):
                yield from write_array(written, rest[1:], [*made, inner])

    return next((made for _, made in write("", data)), data)


def reached(one: dict[str, Any]) -> bool:
    counts, (compile_p50, _, compile_p99, _) = one["counts"], one["compile_s"]
    return (
        counts.get("passing", 0) >= LEAST_PASSING * one["num_schemas"]
        and not counts.get("wrong accepted")
        and counts.get("right rejected", 0) < MOST_REJECTED * max(counts.get("valid", 0), 1)
        and compile_p50 < MOST_COMPILE_P50_S
        and compile_p99 < MOST_COMPILE_P99_S
        and one["mask_s"][0] < MOST_MASK_P50_S
    )


HEADER = (
    "backend", "vocabulary", "passing", "refused", "wrong accepted", "right rejected", "other order", "compile ms p50 p90 p99 max",
    "mask us mean p50 p99 max", "reached",
)  # fmt: skip


def render(found: Sequence[dict[str, Any]]) -> str:
    lines = []
    for one in found:
        counts = Counter(one["counts"])
        mask = (one["mask_mean_s"], one["mask_s"][0], *one["mask_s"][2:])
        lines.append([
            one["backend"], str(one["vocab_size"]), f"{counts['passing'] / one['num_schemas']:.1%}", str(counts["refused"]),
            f"{counts['wrong accepted']} of {counts['invalid']}", f"{counts['right rejected']} of {counts['valid']}",
            str(counts["right in another order"]), " ".join(f"{1e3 * value:.1f}" for value in one["compile_s"]),
            " ".join(f"{1e6 * value:.0f}" for value in mask), "yes" if reached(one) else "no",
        ])  # fmt: skip
    return f"{found[0]['num_schemas']} schemas\n{format_table(HEADER, lines, indent='  ')}"
