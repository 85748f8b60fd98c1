"""Choose the backend by constraint: outlines where its automaton is small, llguidance for everything else."""

from __future__ import annotations

import logging
import re

from pelton.sampling_params import StructuredOutputsParams
from pelton.structured.interface import Grammar, StructuredOutputBackend, StructuredOutputContext
from pelton_plugins.structured_output.index_process import IndexError_
from pelton_plugins.structured_output.llguidance_backend import LLGuidanceBackend
from pelton_plugins.structured_output.outlines_backend import OutlinesBackend, regex_of

logger = logging.getLogger(__name__)

_MAX_WORK = 2**24
"""States times vocabulary of an automaton that is worth building: about 0.1 s."""
_BUDGET_S = 1.0
"""Of building it; what takes longer goes to llguidance."""


class AutoBackend(StructuredOutputBackend):
    """Logs what it chose, and counts it."""

    def __init__(self, context: StructuredOutputContext) -> None:
        self._guidance = LLGuidanceBackend(context)
        self._outlines = OutlinesBackend(context, self._guidance.vocabulary)
        self._metrics = context.metrics

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        name, why, grammar = self._choose(params)
        logger.debug("Structured output, %s: %s (%s).", params.kind, name, why)
        return grammar

    def known(self, params: StructuredOutputsParams) -> Grammar | None:
        return self._guidance.known(params)  # which knows what outlines did not take

    def _choose(self, params: StructuredOutputsParams) -> tuple[str, str, Grammar]:
        if params.regex is None and params.choice is None:
            return "llguidance", "outlines serves regex and choice", self._guidance.compile(params)
        work = num_states(regex_of(params)) * self._guidance.vocabulary.vocab_size
        if work > _MAX_WORK:
            why = f"about {work:,} states times tokens; at most {_MAX_WORK:,}"
        else:
            try:
                grammar = self._outlines.build(
                    params, min(_BUDGET_S, self._outlines.settings.grammar_compile_timeout_s)
                )
                return "outlines", f"about {work:,} states times tokens", grammar
            except IndexError_ as error:
                why = f"outlines: {error}"
        return "llguidance", why, self._guidance.compile(params)


_COUNTED = re.compile(r"\{(\d*),?(\d*)\}")


def num_states(regex: str) -> int:
    """More states than a regex of ordinary form has: its characters, times the counts that stand in it, up to a work too great."""
    count = len(regex)
    for least, most in _COUNTED.findall(regex):
        if count > _MAX_WORK:  # no more to know, and of a long regex a number of thousands of digits
            break
        count *= max(int((most or least or "1")[:18]), 1)
    return count
