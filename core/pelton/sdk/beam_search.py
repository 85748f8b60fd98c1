"""Beam search over an engine that samples: each step continues every beam by one token and keeps the likeliest.

A beam is a prompt of its own, whose blocks the prefix cache holds. `LLM.beam_search` and `AsyncLLM.beam_search` run the steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pelton.outputs import Logprob, RequestOutput
from pelton.sampling_params import BeamSearchParams


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam."""

    tokens: list[int]  # the prompt's, then its own
    num_prompt_tokens: int
    logprobs: list[Mapping[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None

    @property
    def own_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def score(self, length_penalty: float) -> float:
        return self.cum_logprob / math.pow(max(len(self.own_tokens), 1), length_penalty)


@dataclass(slots=True)
class BeamSearchOutput:
    sequences: list[BeamSearchSequence]
    """The best beams of one prompt, the best first."""


class BeamSearch:
    """The beams of one prompt."""

    def __init__(
        self, prompt_token_ids: Sequence[int], params: BeamSearchParams, eos_ids: Collection[int], max_model_len: int
    ) -> None:
        self.params = params
        self._max_tokens = min(params.max_tokens, max_model_len - len(prompt_token_ids))
        self.live = [BeamSearchSequence(list(prompt_token_ids), len(prompt_token_ids))]
        self._ended: list[BeamSearchSequence] = []
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_ids)

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """Outputs of one step, one for each beam that is `live`, in their order."""
        found: list[BeamSearchSequence] = []
        for beam, output in zip(self.live, outputs, strict=True):
            (choice,) = output.outputs
            assert choice.logprobs is not None
            row = choice.logprobs[0]
            likeliest = sorted(row.items(), key=lambda item: -item[1].logprob)[: 2 * self.params.beam_width]
            for token_id, logprob in likeliest:
                grown = BeamSearchSequence(
                    [*beam.tokens, token_id],
                    beam.num_prompt_tokens,
                    [*beam.logprobs, row],
                    beam.cum_logprob + logprob.logprob,
                )
                if token_id in self._eos:
                    grown.finish_reason, grown.stop_reason = "stop", token_id
                    self._ended.append(grown)
                else:
                    found.append(grown)
        found.sort(key=lambda beam: -beam.cum_logprob)
        self.live = found[: self.params.beam_width]
        self._ended = self._best(self._ended)
        if self.live and len(self.live[0].own_tokens) >= self._max_tokens:
            for beam in self.live:
                beam.finish_reason = "length"
            self._ended, self.live = self._best([*self._ended, *self.live]), []

    def _best(self, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(beams, key=lambda beam: -beam.score(self.params.length_penalty))[: self.params.beam_width]

    def result(self, tokenizer: Any) -> BeamSearchOutput:
        """tokenizer: for texts; None leaves them out."""
        for beam in self._ended:
            own = beam.own_tokens[:-1] if beam.stop_reason is not None else beam.own_tokens
            beam.text = None if tokenizer is None else str(tokenizer.decode(own))
        return BeamSearchOutput(self._ended)
