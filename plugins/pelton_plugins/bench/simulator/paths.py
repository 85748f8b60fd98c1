"""Ways between clients and the engine's steps, taken from a server at work.

The steps that the executor `recorded` wrote and what `pelton bench serve --output-json` saw at the same time are by one clock. Laid
beside each other they say when a request came to the engine, and how long after its step each token was with the client.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pelton.errors import ConfigError

NEAR = 24
"""A way to the engine or back is drawn from so many that were measured at about as many rows."""
LEAST_SENT = 12
LOADS = (0, 4, 16, 64)
"""Rows beyond which the way to the engine has a figure of its own."""
GRID_S = np.arange(0, 0.03, 0.00005)


@dataclass(slots=True)
class Paths:
    """Ways to the engine and back; without measured ones, none takes any time."""

    in_scatter: list[float] = field(default_factory=list)
    """Seconds from sending to the first step, at an engine that had nothing to do."""
    in_loaded: list[tuple[int, float]] = field(default_factory=list)
    """(rows, how much longer or shorter it is from so many rows on)."""
    first: list[tuple[float, float]] = field(default_factory=list)
    """(rows, seconds from a step's end to the client) of first tokens, by rows."""
    rng: random.Random = field(default_factory=random.Random)

    def to_engine(self, num_rows: int) -> float:
        """Draw the seconds from a client's sending to the engine's receipt."""
        if not self.in_scatter:
            return 0.0
        drawn = self.in_scatter[int(self.rng.random() * len(self.in_scatter))]
        more = 0.0
        for least, seconds in self.in_loaded:
            if num_rows >= least:
                more = seconds
        return max(drawn + more, 0.0)

    def first_token(self, num_rows: int) -> float:
        """Draw the seconds from a step's end to the client's receipt of a request's first token."""
        if not self.first:
            return 0.0
        place = min(max(bisect_left(self.first, (num_rows,)) - NEAR // 2, 0), max(len(self.first) - NEAR, 0))
        near = min(NEAR, len(self.first))
        return self.first[place + int(self.rng.random() * near)][1]


@dataclass(frozen=True, slots=True)
class Calibration:
    """used: indices of the steps that ran meanwhile; outs: by step, seconds from its end to the clients, NaN where nobody looked."""

    paths: Paths
    used: np.ndarray
    outs: np.ndarray


def read_record(path: str, setting: str) -> dict[str, Any]:
    """Read what `pelton bench serve` wrote. Raises `ConfigError` that names the setting."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        float(found["output_throughput"]), float(found["ttft_ms"]["p50"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{setting} is {path}; use a file that `pelton bench serve --output-json` wrote: {error!r}."
        ) from error
    return dict(found)


class _Engine:
    """Steps of one engine: when each was launched and ended, and its rows."""

    def __init__(self, recorded: dict[str, Any]) -> None:
        table = np.asarray(recorded["steps"], dtype=np.float64)
        self.launches, self.ends, self.rows = table[:, 6], table[:, 7], table[:, 0] + table[:, 2]
        self.prompt_tokens = table[:, 3]
        self.is_used = np.zeros(len(table), dtype=bool)
        self.outs: list[list[float]] = [[] for _ in table]

    def last_chunk(self, step: int, num_prompt_tokens: int, first_token: float) -> int:
        """Return the step of a prompt's last chunk, whose first is in `step`: that gives the first token."""
        num_left = num_prompt_tokens - self.prompt_tokens[step]
        while num_left > 0 and step + 1 < len(self.ends) and self.ends[step + 1] <= first_token:
            step += 1
            num_left -= self.prompt_tokens[step]
        return step


def calibrate(
    recorded: Sequence[dict[str, Any]], files: Sequence[str], rng: random.Random, num_engines: int = 1
) -> Calibration:
    """Lay the steps of some of `num_engines` beside what clients saw.

    files: of `bench serve`, from the server and the time of the recorded steps. Raises `ConfigError` where they are of others.
    """
    engines = [_Engine(one) for one in recorded]
    prompts = sorted(
        (launched, count, place) for place, one in enumerate(recorded) for launched, count in one["prompts"]
    )
    sent: list[tuple[float, float, float, float]] = []  # a request's sending, its launch, the launch before, rows then
    idle, first = [], []
    for file in files:
        requests = [one for one in read_record(file, "calibrate").get("requests", ()) if not one["error"]]
        if not requests or not requests[0].get("sent_s"):
            raise ConfigError(
                f"calibrate is {file}, in which no request has a time; use one of this version's `pelton bench serve`."
            )
        num_found = 0
        for one in sorted(requests, key=lambda request: float(request["sent_s"])):
            begin, times = one["sent_s"], one["sent_s"] + np.array(one["token_times_s"])
            found = next((p for p in prompts if p[1] == one["num_prompt_tokens"] and begin < p[0] < times[0]), None)
            if found is None:
                continue
            num_found += 1
            prompts.remove(found)
            engine = engines[found[2]]
            step = int(np.searchsorted(engine.launches, found[0]))
            before = step - 1
            if before < 0 or engine.ends[before] < begin:
                idle.append(found[0] - begin)
            else:
                sent.append((begin, found[0], engine.launches[before], engine.rows[before]))
            place = engine.last_chunk(step, one["num_prompt_tokens"], times[0])
            count = min(len(times), len(engine.ends) - place)
            outs = times[:count] - engine.ends[place : place + count]
            if count < len(times) or (outs < 0).any() or (outs > 1).any():
                continue  # preempted, or its steps were not those that follow each other
            first.append((float(engine.rows[place]), float(outs[0])))
            for index, out in enumerate(outs[1:], place + 1):
                engine.outs[index].append(float(out))
        if num_found < len(requests) * len(engines) / (2 * num_engines):
            raise ConfigError(f"calibrate is {file}, whose requests are not among those whose steps were recorded.")
        begins, over = (
            min(one["sent_s"] for one in requests),
            max(one["sent_s"] + one["token_times_s"][-1] for one in requests),
        )
        for engine in engines:
            engine.is_used |= (engine.launches > begins) & (engine.ends < over)
    outs_of = np.array([float(np.median(one)) if one else np.nan for engine in engines for one in engine.outs])
    if not first:
        raise ConfigError("calibrate has no request whose tokens are those of the recorded steps.")
    loaded = _loaded(sent)
    base = [loaded[0][1]] if loaded else [float(np.median(idle))] if idle else [0.0]
    if len(idle) >= LEAST_SENT:
        low, high = np.quantile(idle, (0.02, 0.98))
        base = [one for one in idle if low <= one <= high]
    at_rest = float(np.median(base))
    loaded = [(least, seconds - at_rest) for least, seconds in loaded]
    paths = Paths(base, loaded, sorted(first), rng)
    return Calibration(paths, np.nonzero(np.concatenate([engine.is_used for engine in engines]))[0], outs_of)


def _loaded(sent: Sequence[tuple[float, float, float, float]]) -> list[tuple[int, float]]:
    """(rows, seconds) of the way to an engine that computes, from so many rows on: with which most requests would have come after the step
    before the one that took them in, and not after that one."""
    found = []
    for least, most in zip(LOADS, (*LOADS[1:], 1 << 30), strict=True):
        group = np.array(
            [(before - begin, launch - begin) for begin, launch, before, rows in sent if least <= rows < most]
        )
        if len(group) < LEAST_SENT:
            continue
        fits = ((group[:, :1] < GRID_S) & (group[:, 1:] >= GRID_S)).sum(axis=0)
        found.append((max(least, 1), float(np.median(GRID_S[fits >= fits.max() - 0.5]))))
    return found
