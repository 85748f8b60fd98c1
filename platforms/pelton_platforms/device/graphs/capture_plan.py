"""Which steps are captured before requests ask for them, and in which order: one value, made at the start."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from pelton.attention.metadata import BatchDescriptor
from pelton.logging import get_logger, phase
from pelton.sampling.tails import Sample, Tail, Variant, Verify
from pelton_platforms.device.graphs.dispatcher import MAX_MIXED_TOKENS, GraphDispatcher

if TYPE_CHECKING:
    from pelton.config import CUDAGraphMode
    from pelton_platforms.device.graphs.graph_runner import GraphRunner
    from pelton_platforms.device.steps.model_runner import ModelRunner

logger = get_logger(__name__)

FIRST_TOKENS = 8
"""Steps up to this size are captured at the start; larger ones in idle moments, or when a step first has their size."""
_FIRST_RECORDED_TOKENS = 1
"""The same where calls are recorded: a step that is recorded late loses little."""


class Capture(NamedTuple):
    """One graph, or the pieces of one step."""

    mode: CUDAGraphMode
    key: BatchDescriptor

    def __str__(self) -> str:
        return f"{self.mode}: {self.key}"


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """Captures in their order: those that the first requests need, then sizes that may stand in for many others, then the rest;
    steps with adapters behind those without, but small ones of the first variant are there from the start: the first request with
    an adapter would hold up those that run."""

    captures: tuple[Capture, ...]
    num_first: int
    """Of them, at the start; the others in idle moments."""

    @classmethod
    def make(
        cls,
        dispatcher: GraphDispatcher,
        variants: Sequence[Variant],
        *,
        has_lora: bool = False,
        first_tokens: int = FIRST_TOKENS,
    ) -> CapturePlan:
        """variants: of sampling, that each decode step is captured with."""
        keys = sorted(dispatcher.valid_keys(), key=lambda item: _order_of_use(item[1], first_tokens))
        captures = [Capture(mode, replace(key, tail=tail)) for mode, key in keys for tail in _tails(key, variants)]
        num_first = sum(capture.key.num_tokens <= first_tokens for capture in captures)
        if has_lora:
            adapted = [Capture(mode, replace(key, has_lora=True)) for mode, key in captures]
            usual = {tail for _, key in keys for tail in list(_tails(key, variants))[:1]}
            first = [one for one in adapted[:num_first] if one.key.tail in usual]
            captures[num_first:num_first] = first
            captures += [one for one in adapted if one not in first]
            num_first += len(first)
        return cls(tuple(captures), num_first)

    def __str__(self) -> str:
        lines = list(map(str, self.captures))
        return "\n".join(["at the start:", *lines[: self.num_first], "in idle moments:", *lines[self.num_first :]])


def _tails(key: BatchDescriptor, variants: Sequence[Variant]) -> Iterator[Tail | None]:
    if not key.uniform_query_len:
        yield None
        return
    for variant in variants:
        yield Sample(variant) if key.uniform_query_len == 1 else Verify(variant)


def _order_of_use(key: BatchDescriptor, first_tokens: int) -> tuple[bool, int]:
    size = key.num_tokens
    is_stand_in = (
        size & (size - 1) == 0 and not key.is_prompt and (size <= MAX_MIXED_TOKENS or key.uniform_query_len > 0)
    )
    return size > first_tokens and not is_stand_in, size


def plan_captures(runner: ModelRunner, graphs: GraphRunner) -> CapturePlan:
    """The plan of a start."""
    variants = runner.tails.variants
    plan = CapturePlan.make(
        graphs.dispatcher,
        variants[:1] if graphs.runs_calls else variants,
        has_lora=runner.ops.adapters is not None,
        first_tokens=_FIRST_RECORDED_TOKENS if graphs.runs_calls else FIRST_TOKENS,
    )
    logger.debug("Steps to be captured, %s", plan)
    return plan


class CaptureQueue:
    """Works a plan off."""

    def __init__(self, plan: CapturePlan, graphs: GraphRunner, synchronize: Callable[[], None]) -> None:
        self._graphs, self._synchronize = graphs, synchronize
        self._num_first = plan.num_first
        self._left = deque(plan.captures)
        self._is_told = False

    def capture_first(self, phase_s: dict[str, float]) -> None:
        """Those of the start."""
        with phase("capture graphs", phase_s, total=self._num_first, unit=" graphs") as progress:
            for _ in range(self._num_first):
                self._graphs.warm_up(*self._left.popleft())
                progress.advance(1)
            self._synchronize()

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """One more, of those that no step has captured meanwhile; False: none is left, which the log says once."""
        while self._left:
            capture = self._left.popleft()
            if not self._graphs.has(*capture):
                self._graphs.warm_up(*capture)
                self._synchronize()
                return True
        if not self._is_told:
            self._is_told = True
            logger.info("All graphs are captured: %d.", len(self._graphs.full) + len(self._graphs.pieces))
        return False
