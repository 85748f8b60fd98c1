"""`StepTimes`: how long a step takes, by what it computes. Fitted to the steps that `pelton bench steps` has written down.

Two sums of terms that never fall, one for steps of decode alone and one for steps with prompt tokens: a constant, a curve over the
step's tokens, and what attention reads. Each is fitted by least squares of relative errors with weights of at least 0, so that the
mean is right. Around it lies the scatter that was measured, by the step's size, and in the order in which it was met: what held one
step up may hold up the next, or let it wait less.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pelton.errors import ConfigError
from pelton_plugins.bench.simulator.paths import Calibration
from pelton_plugins.bench.steps import COLUMNS, KIND

DOWN = (2, 4, 8, 16, 32, 64)
UP = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Tokens at which the curve may bend downward (small products share what they read) and upward (large ones are bound by arithmetic)."""
MOST_SWEEPS = 3000
LEAST_STEPS = 30
NUM_ROUNDS = 4
MOST_RATIO = 3
"""A step that took so many times what it should was held up by something else, such as a compiler: it is left out."""
SIZES = (1, 2, 3, 5, 9, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 769, 1025, 1537, 2049, 4097)
"""Tokens from which steps have a scatter of their own."""
LEAST_SCATTER = 40
STAYS = 31 / 32
"""How often the scatter goes on with the step that was measured next, and not with any."""


class Scatter:
    """Measured steps of one size: ratios to the fitted mean, and seconds from their ends to the clients."""

    __slots__ = ("factor", "outs", "place", "ratios")

    def __init__(self, ratios: np.ndarray, outs: np.ndarray) -> None:
        self.factor = float(ratios.mean())
        self.ratios: list[float] = (ratios / self.factor).tolist()
        self.outs: list[float] = outs.tolist()
        self.place = 0

    def next(self, rng: random.Random) -> tuple[float, float]:
        """Draw (ratio, with mean 1; seconds to the clients)."""
        drawn, count = rng.random(), len(self.ratios)
        place = self.place + 1 if drawn < STAYS else int((drawn - STAYS) / (1 - STAYS) * count)
        self.place = place = place if place < count else 0
        return self.ratios[place], self.outs[place]


@dataclass(frozen=True, slots=True)
class Curve:
    """seconds = of_tokens[tokens] + sum of weights x features, times the factor of the size's scatter."""

    of_tokens: list[float]
    weights: list[float]
    after_rest: float
    """Seconds that a step takes besides, or less, when the device had nothing to do before it."""
    scatters: list[Scatter]
    """[tokens]"""


@dataclass
class StepTimes:
    """decode: weight of the context that rows read. mixed: weights of that, prompt rows, token pairs and decode rows."""

    decode_curve: Curve
    mixed_curve: Curve
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def decode(self, num_rows: int, context: float) -> float:
        """Mean seconds of a step of decode alone."""
        curve = self.decode_curve
        return (curve.of_tokens[num_rows] + curve.weights[0] * context) * curve.scatters[num_rows].factor

    def mixed(self, num_rows: int, context: float, num_prompts: int, num_tokens: int, pairs: float) -> float:
        """Mean seconds of a step with prompt tokens."""
        curve, count = self.mixed_curve, num_rows + num_tokens
        features = (context, num_prompts, pairs, num_rows)
        terms = sum(weight * value for weight, value in zip(curve.weights, features, strict=True))
        return (curve.of_tokens[count] + terms) * curve.scatters[count].factor

    def draw(self, mean: float, num_tokens: int, *, is_decode: bool, is_first: bool = False) -> tuple[float, float]:
        """Draw (seconds of a step of that mean, seconds from its end to the clients). is_first: after a rest."""
        curve = self.decode_curve if is_decode else self.mixed_curve
        ratio, out = curve.scatters[num_tokens].next(self.rng)
        return max(mean * ratio + (curve.after_rest if is_first else 0.0), 0.0), out

    def restart(self) -> None:
        """Begin the scatter anew, for a server that knows nothing of those before."""
        for scatter in (*self.decode_curve.scatters, *self.mixed_curve.scatters):
            scatter.place = 0

    def decode_scatter(self, num_rows: int) -> Scatter:
        return self.decode_curve.scatters[num_rows]


def read_steps(path: str) -> dict[str, Any]:
    """Read what `pelton bench steps` wrote. Raises `ConfigError`."""
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"step_times is {path}, which cannot be read: {error}.") from error
    if not isinstance(found, dict) or found.get("kind") != KIND or found.get("columns") != list(COLUMNS):
        raise ConfigError(
            f"step_times is {path}; use a file that `pelton bench steps --output-json` of this version wrote."
        )
    return found


def fit(
    steps: Sequence[Sequence[float]], max_tokens: int, rng: random.Random | None = None, calibration: Calibration | None = None
) -> StepTimes:  # fmt: skip
    """steps: rows of `COLUMNS`. max_tokens: most of one step. Raises `ConfigError` for too few steps."""
    table = np.asarray(steps, dtype=np.float64)
    if len(table) < LEAST_STEPS:
        raise ConfigError(f"step_times has {len(table)} steps; at least {LEAST_STEPS} are needed to fit a curve.")
    is_first = np.zeros(len(table), dtype=bool)
    is_first[1:] = table[1:, 6] > table[:-1, 7]  # launched when the one before had ended
    outs = np.full(len(table), np.nan)
    if calibration is not None:
        table, is_first, outs = (one[calibration.used] for one in (table, is_first, calibration.outs))
    rows, context, prompts, tokens, pairs, seconds = table[:, :6].T
    is_mixed = prompts > 0
    if is_mixed.sum() < LEAST_STEPS or (~is_mixed).sum() < LEAST_STEPS:
        raise ConfigError(
            f"step_times has {len(table)} steps, {is_mixed.sum()} of them with prompts; {LEAST_STEPS} of both kinds are needed."
        )
    decode, mixed = ~is_mixed, is_mixed
    features = np.stack((context, prompts, pairs, rows), axis=1)
    return StepTimes(
        _fit(rows[decode], context[decode, None], is_first[decode], seconds[decode], outs[decode], max_tokens),
        _fit((rows + tokens)[mixed], features[mixed], is_first[mixed], seconds[mixed], outs[mixed], max_tokens),
        rng or random.Random(0),
    )


def _basis(tokens: np.ndarray) -> np.ndarray:
    """[N] tokens to [N, terms]: a constant, a line, curves that bend downward and such that bend upward."""
    ones, column = np.ones((len(tokens), 1)), tokens[:, None]
    down, up = (
        np.minimum(column, np.array(DOWN, dtype=np.float64)),
        np.maximum(column - np.array(UP, dtype=np.float64), 0),
    )
    return np.concatenate([ones, column, down, up], axis=1)


def _fit(
    tokens: np.ndarray, features: np.ndarray, is_first: np.ndarray, seconds: np.ndarray, outs: np.ndarray, max_tokens: int
) -> Curve:  # fmt: skip
    terms = np.concatenate([_basis(tokens), features, is_first[:, None], -1.0 * is_first[:, None]], axis=1)
    bends = (
        2
        + len(DOWN)
        + np.array([place for place, knot in enumerate(UP) if (tokens > knot).sum() < LEAST_SCATTER], dtype=int)
    )
    terms[:, bends] = 0  # of few steps a line would be drawn to many tokens
    num_basis = terms.shape[1] - features.shape[1] - 2
    # A step that took next to nothing does not decide alone.
    expected = np.maximum(
        seconds, 0.25 * np.median(seconds)
    )  # of errors relative to what was measured the mean would come out too small
    is_kept = np.ones(len(seconds), dtype=bool)
    for _ in range(NUM_ROUNDS):
        scale = 1 / expected[is_kept]
        weights = least_squares(terms[is_kept] * scale[:, None], seconds[is_kept] * scale)
        expected = np.maximum(terms @ weights, 1e-9)
        is_kept = seconds < MOST_RATIO * expected
    after_rest = float(weights[-2] - weights[-1])
    plain = np.maximum(expected - after_rest * is_first, 1e-9)
    ratios = np.maximum(seconds - after_rest * is_first, 0.1 * plain) / plain
    curve = _basis(np.arange(max_tokens + 1, dtype=np.float64)) @ weights[:num_basis]
    scatters = _scatters(tokens[is_kept], ratios[is_kept], outs[is_kept], max_tokens)
    return Curve(curve.tolist(), weights[num_basis:-2].tolist(), after_rest, scatters)


def _scatters(tokens: np.ndarray, ratios: np.ndarray, outs: np.ndarray, max_tokens: int) -> list[Scatter]:
    """The scatter of each number of tokens: of its size, with those of neighbouring sizes where too few were measured."""
    known = ~np.isnan(outs)
    if known.any():
        places = np.arange(len(outs))
        outs = np.interp(places, places[known], outs[known])  # a step that nobody looked at: as those around it
    else:
        outs = np.zeros(len(outs))
    size_of = np.searchsorted(SIZES, tokens, side="right")
    sizes, made = np.searchsorted(SIZES, np.arange(max_tokens + 1), side="right"), {}
    for size in np.unique(sizes):
        reach = 0
        while True:
            is_near = abs(size_of - size) <= reach
            if is_near.sum() >= min(LEAST_SCATTER, len(tokens)):
                break
            reach += 1
        made[int(size)] = Scatter(ratios[is_near], outs[is_near])
    return [made[int(size)] for size in sizes]


def least_squares(terms: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The weights x >= 0 with the least |terms x - wanted|.

    One weight after the other is set to its best value, over and over: nothing is solved at once, since terms may be near to each other.
    """
    scale = np.linalg.norm(terms, axis=0)
    scale[scale == 0] = 1
    # Only the products matter: they are as small as the number of terms squared. Their diagonal is 1.
    square, target = (terms / scale).T @ (terms / scale), (terms / scale).T @ wanted
    found, gain = np.zeros(len(target)), target.copy()
    for _ in range(MOST_SWEEPS):
        largest = 0.0
        for place in range(len(target)):
            change = max(found[place] + gain[place], 0.0) - found[place]
            if change:
                found[place] += change
                gain -= change * square[place]
                largest = max(largest, abs(change))
        if largest <= 1e-9 * abs(found).max():
            break
    return found / scale
