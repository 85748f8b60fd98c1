"""`pelton bench table`: the workloads that Pelton is compared by, each engine start in a process of its own.

The method is that of the script which measured the other engines: the same prompts and lengths, `LLM.generate` on token
ids, greedy, random weights, medians of repeats after one that does not count, a fresh first token in each repeat.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pelton.cli.table import format_table
from pelton.errors import ConfigError, EngineError
from pelton_plugins.bench.bounds import check_at_least
from pelton_plugins.bench.record import flat_settings, number, today, versions, write_json
from pelton_plugins.bench.table import long_context, peers, sampling_rows
from pelton_plugins.bench.table.shapes import DENSE, SHAPES, write_shape
from pelton_plugins.flags import parse_flags

START, FIRST_START = "start", "first-start"
SAMPLING = ("sampling1", "sampling32", "sampling256")
SAMPLING_MODEL = "qwen3-0.6b"
WORKLOADS = {row.name: row.workload or row.name for row in peers.ROWS} | {name: name for name in SAMPLING}
"""Row to what has to run for it: two rows may come of one workload."""
GROUPS = {"long-context": tuple(row.name for row in peers.LONG_ROWS), "sampling": SAMPLING}
"""Names for several rows."""
FURTHER = ("shared-prefix", "long-prompt", "sharegpt-2000", "sharegpt-4000", FIRST_START)
DEFAULT_ROWS = tuple(name for name in WORKLOADS if name not in FURTHER)
DOC = f"""Measure the rows that Pelton is compared by, and print them beside other engines' figures and the device's floor.
Weights are random: nothing is fetched. Each model starts once, or twice with the row "start", whose second start counts.
Rows: {", ".join(WORKLOADS)}; {" and ".join(GROUPS)} mean all of theirs.
Contexts above the usual max_model_len have a process of their own; {FIRST_START} starts with empty kernel caches.

  pelton bench table --results table.json                        all rows but {", ".join(FURTHER)}
  pelton bench table --models qwen3-0.6b --rows latency1 batch32 --results table.json
  pelton bench table --show --results table.json                 print what was gathered"""


class TableArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments: what to measure, and where results gather."""

    rows: list[str] = msgspec.field(default_factory=lambda: list(DEFAULT_ROWS))
    """Rows to measure, also as one comma list; those that have an aim for the model when unset."""
    models: list[str] = msgspec.field(default_factory=lambda: list(DENSE))
    """Shapes to measure, also as one comma list; or folders with a config.json."""
    results: str | None = None
    """A JSON file: what is in it stays, and new rows are put over old ones."""
    show: bool = False
    """Measure nothing: print what --results holds."""
    repeats: int | None = None
    """Runs that count, a row; its own number when unset."""
    json: bool = False
    """Print JSON."""
    markdown: bool = False
    """Print the table for a page in Markdown."""

    def __post_init__(self) -> None:
        check_at_least(self, repeats=1)


def run(argv: list[str]) -> int:
    parsed = parse_flags(argv, [TableArguments], positional=None, program="pelton bench table", doc=DOC)
    arguments: TableArguments = parsed.structs["TableArguments"]
    rows = _split(arguments.rows)
    workloads = [] if arguments.show else workloads_of(rows)
    models = _split(arguments.models)
    results = read_results(arguments.results)
    settings = flat_settings(parsed)
    if "model" in settings:
        raise ConfigError("The table's models are named by --models, not by --model.")
    failed = 0
    if workloads:
        with tempfile.TemporaryDirectory(prefix="pelton-bench-") as folder:
            for model in models:
                name = peers.variant(model_name(model), settings)
                is_asked = tuple(rows) != DEFAULT_ROWS
                known = name if name in peers.AIMS else model_name(model)
                todo = workloads if is_asked else [one for one in workloads if has_aim(known, one)]
                for found in measure_model(model, todo, settings, Path(folder), arguments.repeats):
                    failed += "error" in found
                    merge(results, name, found)
                    write_json(arguments.results, results)
    shown = results or {peers.variant(model_name(model), settings): {} for model in models}
    print(json.dumps(results, indent=1) if arguments.json else render(shown, as_markdown=arguments.markdown))
    return 1 if failed else 0


def workloads_of(names: list[str]) -> list[str]:
    """Return what has to run for rows of these names."""
    for name in names:
        if name not in WORKLOADS and name not in GROUPS:
            raise ConfigError(f"--rows has {name!r}; the rows are {', '.join([*WORKLOADS, *GROUPS])}.")
    return list(dict.fromkeys(WORKLOADS[row] for name in names for row in GROUPS.get(name, (name,))))


def has_aim(model: str, workload: str) -> bool:
    """Return whether a row is measured for a model without being asked for: all are, for a model that is not known."""
    if model not in peers.AIMS:
        return True
    return workload in peers.AIMS[model] or (workload in SAMPLING and model == SAMPLING_MODEL)


def _split(texts: list[str]) -> list[str]:
    return [part for text in texts for part in text.split(",") if part]


def model_name(model: str) -> str:
    return model if model in SHAPES else Path(model).name


def read_results(path: str | None) -> dict[str, dict[str, Any]]:
    """Model to row to what was measured; empty without a file."""
    if path is None or not Path(path).exists():
        return {}
    try:
        found = json.loads(Path(path).read_text())
        assert all(isinstance(rows, dict) for rows in found.values())
    except (OSError, ValueError, AttributeError, AssertionError) as error:
        raise ConfigError(f"--results {path} holds no results of this command: {error}.") from error
    return dict(found)


def merge(results: dict[str, dict[str, Any]], model: str, found: dict[str, Any]) -> None:
    """Put a row over an older one; one that failed leaves the older figures beside its error."""
    rows = results.setdefault(model, {})
    name = found["row"]
    if "error" in found and "error" not in rows.get(name, {"error": ""}):
        rows[name] = {**rows[name], "last_error": found["error"]}
    else:
        rows[name] = {key: value for key, value in found.items() if key != "row"}


def measure_model(
    model: str, rows: list[str], settings: dict[str, Any], folder: Path, repeats: int | None
) -> Iterator[dict[str, Any]]:
    """Rows as they are measured, each with its circumstances."""
    path = write_shape(model, folder) if model in SHAPES else Path(model)
    if not (path / "config.json").is_file():
        raise ConfigError(f"--models has {model!r}; use {', '.join(SHAPES)}, or a folder with a config.json.")
    longest = json.loads((path / "config.json").read_text()).get("max_position_embeddings", 8192)
    name = model_name(model)
    defaults = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": min(8192, longest)}
    if FIRST_START in rows:
        yield from _first_start({**defaults, **settings, "model": str(path)}, name, folder)
    long_rows = [row for row in rows if long_context.case_of(row) is not None]
    rest = [row for row in rows if row != FIRST_START and row not in long_rows]
    if rest:
        yield from _measure_rows(rest, {**defaults, **settings, "model": str(path)}, name, repeats)
    if long_rows:
        yield from _measure_long(
            long_rows, {**defaults, **settings, "model": str(path)}, name, repeats, longest, settings
        )


def _first_start(settings: dict[str, Any], name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """A start that finds no kernel compiled: the caches are in a folder of its own."""
    cache = folder / f"{name}-cache"
    environ = {key: value for key, value in os.environ.items() if key not in KERNEL_CACHES}
    environ |= {"XDG_CACHE_HOME": str(cache), "CUDA_CACHE_PATH": str(cache / "cuda")}
    for found in lines_of({"settings": settings, "rows": []}, environ):
        print(f"{name}: {FIRST_START} done", file=sys.stderr)
        yield {**found, "row": FIRST_START, **_about(settings)}


def _measure_rows(
    rows: list[str], settings: dict[str, Any], name: str, repeats: int | None
) -> Iterator[dict[str, Any]]:
    job: dict[str, Any] = {"settings": settings, "rows": [], "repeats": repeats}
    if START in rows:
        print(f"{name}: first start", file=sys.stderr)
        for _ in lines_of(job):
            pass  # it fills the caches; the second start counts
    job["rows"] = [row for row in rows if row != START]
    about = _about(settings)
    for found in lines_of(job):
        row = found["row"]
        if row == START:
            about |= {key: found[key] for key in ("device", "attention_backend") if key in found}
            if START not in rows:
                continue
        print(f"{name}: {row} {found.get('error', 'done')}", file=sys.stderr)
        yield {**found, **about}


def _measure_long(
    rows: list[str], settings: dict[str, Any], name: str, repeats: int | None, longest: int, given: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Rows over contexts that need a larger max_model_len than the others. One that does not fit says so."""
    cases = [case for row in rows if (case := long_context.case_of(row)) is not None]
    fitting = [case.max_model_len for case in cases if case.max_model_len <= longest]
    limit = {} if "max_model_len" in given else {"max_model_len": max(fitting, default=min(8192, longest))}
    for case in cases:
        if case.max_model_len > longest:
            yield {"row": case.name, "no_room": f"the model takes {longest:,} tokens", **_about(settings)}
    left = {case.name for case in cases if case.max_model_len <= longest}
    if not left:
        return
    try:
        for found in _measure_rows(sorted(left), {**settings, **limit}, name, repeats):
            left.discard(found["row"])
            yield found
    except EngineError as error:
        for row in sorted(left):
            yield {"row": row, "error": str(error), **_about({**settings, **limit})}


def _about(settings: dict[str, Any]) -> dict[str, Any]:
    shown = {key: value for key, value in settings.items() if key != "model"}
    return {"date": today(), "versions": versions(), "settings": shown}


def lines_of(job: dict[str, Any], environ: dict[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Return what the process says, line by line. Raises when it ends badly."""
    command = [sys.executable, "-m", "pelton_plugins.bench.table.measure", json.dumps(job)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        raise EngineError(f"The measuring process ended with status {process.returncode}; its messages are above.")


KERNEL_CACHES = ("TRITON_CACHE_DIR", "TRITON_HOME")  # variables that would bring back the usual folder
HEADER = ("row", "pelton", "unit", "vLLM", "SGLang", "x better peer", "floor", "of the floor", "target", "reached")


def render(results: dict[str, dict[str, Any]], *, as_markdown: bool = False) -> str:
    """A table for each model; rows that were not measured show the others' figures."""
    known = [name for name in SHAPES if name in results] + [name for name in results if name not in SHAPES]
    parts = []
    for model in known:
        measured = results[model]
        lines = [_line(row, measured, peers.AIMS.get(model, {}).get(row.name, peers.Aim())) for row in peers.ROWS]
        shown = [line for line, row in zip(lines, peers.ROWS, strict=True) if _is_shown(row, model, measured)]
        about: dict[str, Any] = next((row for row in measured.values() if "device" in row), {})
        where = about.get("device", "unknown device") if measured else "not measured yet"
        errors = [
            f"  {name}: {why}"
            for name, row in measured.items()
            if (why := row.get("error") or row.get("last_error") or row.get("no_room"))
        ]
        table = _markdown([HEADER, *shown]) if as_markdown else format_table(HEADER, shown, indent="  ")
        head = f"{model}, {where}"
        if as_markdown:
            dates = sorted({row["date"][:10] for row in measured.values() if "date" in row})
            head += f", {' to '.join(dict.fromkeys(dates[:1] + dates[-1:]))}:\n" if dates else ":\n"
        parts.append("\n".join([head, table, *errors]))
        if any("kinds" in measured.get(name, {}) for name in SAMPLING):
            parts.append(sampling_table(measured, SAMPLING, as_markdown=as_markdown))
    parts.append(
        f"{peers.VLLM}, {peers.SGLANG} and the floor: {peers.DEVICE}, {peers.DATE}. "
        "x better peer: above 1 is better, in time as in rate."
    )
    return "\n\n".join(parts)


def sampling_table(measured: dict[str, Any], names: Sequence[str], *, as_markdown: bool) -> str:
    """Each kind of request as output tokens/s and as a share of the greedy speed of the same batch."""
    header, names = ["kind of request"], [name for name in names if "kinds" in measured.get(name, {})]
    for name in names:
        header += [f"{sampling_rows.num_rows(name)} rows, tokens/s", "of greedy", "target", "reached"]
    lines = [header]
    for kind in sampling_rows.KINDS:
        line = [kind]
        for name in names:
            line += _share_cells(measured[name]["kinds"], kind, sampling_rows.num_rows(name))
        lines.append(line)
    return _markdown(lines) if as_markdown else format_table(header, lines[1:], indent="  ")


def _share_cells(kinds: dict[str, Any], kind: str, rows: int) -> list[str]:
    speeds = {name: one["out_tok_s"] for name, one in kinds.items()}
    if kind not in speeds:
        return ["-"] * 4
    share, target = speeds[kind] / speeds[sampling_rows.GREEDY], sampling_rows.target(kind, rows)
    reached = "-" if target is None else "yes" if share >= target else "no"
    return [number(speeds[kind], 5), f"{share:.0%}", "-" if target is None else f"{target:.0%}", reached]


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [lines[0], ["---"] * len(lines[0]), *lines[1:]])


def _is_shown(row: peers.Row, model: str, measured: dict[str, Any]) -> bool:
    return row.name in peers.AIMS.get(model, {}) or WORKLOADS[row.name] in measured


def _line(row: peers.Row, measured: dict[str, Any], aim: peers.Aim) -> tuple[str, ...]:
    found = measured.get(WORKLOADS[row.name], {})
    ours = found.get(row.figure)
    digits = 3 if row.is_time else 5
    peer = peers.better_peer(row, aim)
    share = reached = ratio = None
    if ours is not None:
        ratio = peers.times_better(row, ours, peer)
        share = peers.times_better(row, ours, aim.floor)
        if aim.target is not None:
            reached = "no" if (peers.times_better(row, ours, aim.target) or 0) < 1 else "yes"
        if aim.stretch is not None and (peers.times_better(row, ours, aim.stretch) or 0) >= 1:
            reached = "stretch"
    return (
        row.label,
        _figure_cell(found, ours, digits),
        row.unit,
        number(aim.vllm, digits),
        number(aim.sglang, digits),
        number(ratio),
        number(aim.floor, digits),
        "-" if share is None else f"{share:.0%}",
        number(aim.target, digits),
        reached or "-",
    )


def _figure_cell(found: dict[str, Any], ours: float | None, digits: int) -> str:
    if ours is None and "error" in found:
        return "failed"
    return long_context.NO_ROOM if "no_room" in found else number(ours, digits)
