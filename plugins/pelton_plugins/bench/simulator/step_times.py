"""`StepTimes`: how long a step takes, by what it computes. Fitted to the steps that `pelton bench steps` has written down.

Two sums of terms that never fall, one for steps of decode alone and one for steps with prompt tokens: a constant, a curve over the
step's tokens, and what attention reads. Each is fitted by least squares of relative errors with weights of at least 0, so that the
mean is right. Around it lies the scatter that was measured.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pelton.errors import ConfigError
from pelton_plugins.bench.steps import COLUMNS, KIND

DOWN = (2, 4, 8, 16, 32, 64)
UP = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Tokens at which the curve may bend downward (small products share what they read) and upward (large ones are bound by arithmetic)."""
MOST_SWEEPS = 3000
LEAST_STEPS = 30
NUM_QUANTILES = 200
NUM_ROUNDS = 4
MOST_RATIO = 8
"""A step that took so many times what it should was held up by something else, such as a compiler: it is left out."""


@dataclass(frozen=True, slots=True)
class Curve:
    """seconds = of_tokens[tokens] + sum of weights x features; scatter: quantiles of measured / fitted, of mean 1."""

    of_tokens: list[float]
    weights: list[float]
    scatter: list[float]


class StepTimes:
    """decode: weight of the context that rows read. mixed: weights of that, prompt rows, token pairs and decode rows."""

    def __init__(self, decode: Curve, mixed: Curve, rng: random.Random | None = None) -> None:
        self._decode, self._mixed = decode, mixed
        self._rng = rng or random.Random(0)

    def decode(self, num_rows: int, context: float) -> float:
        """Mean seconds of a step of decode alone."""
        curve = self._decode
        return curve.of_tokens[num_rows] + curve.weights[0] * context

    def mixed(self, num_rows: int, context: float, num_prompts: int, num_tokens: int, pairs: float) -> float:
        """Mean seconds of a step with prompt tokens."""
        curve = self._mixed
        features = (context, num_prompts, pairs, num_rows)
        terms = sum(weight * value for weight, value in zip(curve.weights, features, strict=True))
        return curve.of_tokens[num_rows + num_tokens] + terms

    def draw(self, mean: float, *, is_decode: bool) -> float:
        """A step of that mean, as steps are scattered."""
        scatter = (self._decode if is_decode else self._mixed).scatter
        return mean * scatter[int(self._rng.random() * len(scatter))]

    @property
    def decode_scatter(self) -> list[float]:
        return self._decode.scatter


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


def fit(steps: Sequence[Sequence[float]], max_tokens: int, rng: random.Random | None = None) -> StepTimes:
    """steps: rows of `COLUMNS`. max_tokens: most of one step. Raises `ConfigError` for too few steps."""
    table = np.asarray(steps, dtype=np.float64)
    if len(table) < LEAST_STEPS:
        raise ConfigError(f"step_times has {len(table)} steps; at least {LEAST_STEPS} are needed to fit a curve.")
    rows, context, prompts, tokens, pairs, seconds = table[:, :6].T
    is_mixed = prompts > 0
    if is_mixed.sum() < LEAST_STEPS or (~is_mixed).sum() < LEAST_STEPS:
        raise ConfigError(
            f"step_times has {len(table)} steps, {is_mixed.sum()} of them with prompts; {LEAST_STEPS} of both kinds are needed."
        )
    decode = _fit(rows[~is_mixed], context[~is_mixed, None], seconds[~is_mixed], max_tokens)
    features = np.stack((context, prompts, pairs, rows), axis=1)[is_mixed]
    mixed = _fit((rows + tokens)[is_mixed], features, seconds[is_mixed], max_tokens)
    return StepTimes(decode, mixed, rng)


def _basis(tokens: np.ndarray) -> np.ndarray:
    """[N] tokens to [N, terms]: a constant, a line, curves that bend downward and such that bend upward."""
    ones, column = np.ones((len(tokens), 1)), tokens[:, None]
    down, up = (
        np.minimum(column, np.array(DOWN, dtype=np.float64)),
        np.maximum(column - np.array(UP, dtype=np.float64), 0),
    )
    return np.concatenate([ones, column, down, up], axis=1)


def _fit(tokens: np.ndarray, features: np.ndarray, seconds: np.ndarray, max_tokens: int) -> Curve:
    terms = np.concatenate([_basis(tokens), features], axis=1)
    num_basis = terms.shape[1] - features.shape[1]
    expected = seconds  # of errors relative to what was measured the mean would come out too small
    is_kept = np.ones(len(seconds), dtype=bool)
    for _ in range(NUM_ROUNDS):
        scale = 1 / expected[is_kept]
        weights = least_squares(terms[is_kept] * scale[:, None], seconds[is_kept] * scale)
        expected = np.maximum(terms @ weights, 1e-9)
        is_kept = seconds < MOST_RATIO * expected
    ratios = (seconds / expected)[is_kept]
    places = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    scatter = np.quantile(ratios, places)
    mean = float(scatter.mean())
    curve = _basis(np.arange(max_tokens + 1, dtype=np.float64)) @ weights[:num_basis]
    return Curve((curve * mean).tolist(), (weights[num_basis:] * mean).tolist(), (scatter / mean).tolist())


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
