"""The table for CPUs as text: a part for each instruction set, with Pelton's figures, those of peers that ran, and the
recorded ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pelton.cli.table import format_table
from pelton_plugins.bench.cpu.engines import PELTON
from pelton_plugins.bench.cpu.peers import ROWS, recorded_of, share_targets_of, targets_of
from pelton_plugins.bench.cpu.run import CANNOT_LOAD, CANNOT_RUN, SAMPLING
from pelton_plugins.bench.cpu.sets import AUTO
from pelton_plugins.bench.record import number
from pelton_plugins.bench.table.command import sampling_table
from pelton_plugins.bench.table.peers import Row, times_better

RATIO = (
    "x NAME: how many times as good as that engine in the same run, above 1 is better in time and memory as in rate; a dash "
    "where they did not run together."
)
CEILING = (
    "Of the ceiling: one request against the weights' bytes at the measured reading speed, the others' products against the "
    "measured float32 rate (bfloat16 instructions may exceed it)."
)
Rows = dict[str, dict[str, Any]]


def render(results: dict[str, Rows], *, as_markdown: bool = False) -> str:
    """A part for each instruction set that was asked for."""
    parts = []
    for isa, engines in _by_set(results).items():
        parts.append(_part(isa, engines, as_markdown=as_markdown))
    return "\n\n".join(parts)


def _by_set(results: dict[str, Rows]) -> dict[str, dict[str, Rows]]:
    """Instruction set to engine to rows; `auto` always."""
    found: dict[str, dict[str, Rows]] = {AUTO: {}} if not results else {}
    for key, rows in results.items():
        name, _, isa = key.partition("@")
        found.setdefault(isa or AUTO, {})[name] = rows
    return found


def set_in_use(engines: dict[str, Rows]) -> str | None:
    """The instruction set of a part's ceilings; None for results without."""
    rows = [row for found in engines.values() for row in found.values()]
    return next((str(row["ceiling"]["isa"]) for row in rows if row.get("ceiling")), None)


def _part(isa: str, engines: dict[str, Rows], *, as_markdown: bool) -> str:
    used = set_in_use(engines) or (None if isa == AUTO else isa)
    device, versions, recorded = recorded_of(used)
    ours = [PELTON, *(name for name in engines if name.startswith(f"{PELTON} "))]
    peers = [name for name in engines if name not in ours]
    has_shares = any("share" in row for rows in engines.values() for row in rows.values())
    header = ["row", "pelton", "unit", "target", "reached"]
    header += ["of the ceiling"] if has_shares else []
    for name in ours[1:]:
        header += [name, *(["of the ceiling"] if has_shares else [])]
    for name in peers:
        header += [name, f"x {name}"]
    header += [f"{versions[name]}, recorded" for name in recorded]
    lines = []
    for row in ROWS:
        line = _own_cells(row, engines.get(PELTON, {}).get(row.name, {}), used, has_shares=has_shares)
        for name in ours[1:]:
            found = engines[name].get(row.name, {})
            line += [_cell(row, found), *([_share(found)] if has_shares else [])]
        for name in peers:
            line += _peer_cells(row, name, engines)
        lines.append([*line, *(number(recorded[name].get(row.name), _digits(row)) for name in recorded)])
    table = _markdown([header, *lines]) if as_markdown else format_table(header, lines, indent="  ")
    errors = [
        f"  {name}, {row}: {why}"
        for name, rows in engines.items()
        for row, one in rows.items()
        if (why := one.get("error") or one.get("last_error"))
    ]
    gap = [""] if as_markdown else []
    kinds = []
    if "kinds" in engines.get(PELTON, {}).get(SAMPLING, {}):
        kinds = ["", sampling_table(engines[PELTON], [SAMPLING], as_markdown=as_markdown)]
    foot = f"Recorded: {device}; the better of several runs. {RATIO}"
    return "\n".join([*_head(isa, engines), *gap, table, *errors, *kinds, "", foot, *([CEILING] if has_shares else [])])


def _head(isa: str, engines: dict[str, Rows]) -> list[str]:
    """Model, device, cores and dates of what was measured; then the instruction sets and what they can do."""
    rows = [row for found in engines.values() for row in found.values()]
    if not rows:
        return ["not measured yet"]
    told = {name: next((row[name] for row in rows if name in row), None) for name in ("model", "device", "num_cores")}
    dates = sorted({str(row["date"])[:10] for row in rows if "date" in row})
    parts = [str(told["model"]), str(told["device"] or "unknown device"), f"{told['num_cores']} cores"]
    backend = next((row["attention_backend"] for row in rows if "attention_backend" in row), None)
    parts += [f"attention {backend}"] if backend else []
    lines = [", ".join([*parts, " to ".join(dict.fromkeys(dates[:1] + dates[-1:]))])]
    ceilings = [row["ceiling"] for row in rows if row.get("ceiling")]
    features = next((row["features"] for row in rows if row.get("features")), None)
    if ceilings or isa != AUTO:
        used = set_in_use(engines) or isa
        chosen = f"instruction set {used}, chosen by Pelton" if isa == AUTO else f"instruction set {used}, others off"
        has = f"; this CPU has {' '.join(features)}" if features else ""
        lines.append(f"  {chosen}{has}")
    if ceilings:
        lines.append(
            f"  measured ceilings: {_span(ceilings, 'gflops')} GFLOP/s float32, {_span(ceilings, 'read_gb_s')} GB/s"
        )
    return lines


def _span(ceilings: Sequence[dict[str, Any]], name: str) -> str:
    """The lowest and the highest of a run: machines that others use change within minutes."""
    low, high = (number(pick(one[name] for one in ceilings)) for pick in (min, max))
    return low if low == high else f"{low} to {high}"


def _own_cells(row: Row, found: dict[str, Any], used: str | None, *, has_shares: bool) -> list[str]:
    ours, target, share_target = (
        found.get(row.figure),
        targets_of(used).get(row.name),
        share_targets_of(used).get(row.name),
    )
    if share_target is not None:
        share = found.get("share")
        told = f"{share_target:.0%} of ceiling"
        reached = "-" if share is None else "yes" if share >= share_target else "no"
    else:
        told = number(target, _digits(row))
        reached = "-" if not ours or target is None else "yes" if (times_better(row, ours, target) or 0) >= 1 else "no"
    return [row.label, _cell(row, found), row.unit, told, reached, *([_share(found)] if has_shares else [])]


def _peer_cells(row: Row, name: str, engines: dict[str, Rows]) -> list[str]:
    """A peer's figure, and the ratio to the variant of its label, else to Pelton's first column."""
    other = engines[name].get(row.name, {})
    variant = f"{PELTON} {name.partition(':')[2]}"
    found = engines.get(variant if variant in engines else PELTON, {}).get(row.name, {})
    ours = found.get(row.figure)
    is_same_run = ours is not None and found.get("run") == other.get("run")
    return [_cell(row, other), number(times_better(row, ours, other.get(row.figure)) if is_same_run else None)]


def _share(found: dict[str, Any]) -> str:
    share = found.get("share")
    return "-" if share is None else f"{share:.0%}"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [lines[0], ["---"] * len(lines[0]), *lines[1:]])


def _digits(row: Row) -> int:
    return 3 if row.is_time else 5


def _cell(row: Row, found: dict[str, Any]) -> str:
    if row.figure in found:
        return number(found[row.figure], _digits(row))
    error = str(found.get("error", ""))
    for start in (CANNOT_RUN, CANNOT_LOAD):
        if error.startswith(start):
            return start.removesuffix(" the model")
    return "failed" if error else "-"
