"""Regexes and choices by outlines-core: an automaton over tokens, built before the first token.

A mask is then a copy: the states' masks are made once, and shared by all requests with the constraint. Building takes time in
proportion to states times vocabulary, so it is done in a process that can be stopped (`index_process`).
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import outlines_core

from pelton.config.structured_outputs import StructuredOutputsConfig
from pelton.errors import RequestError
from pelton.sampling_params import StructuredOutputsParams
from pelton.structured.interface import Grammar, StructuredOutputBackend, StructuredOutputContext
from pelton_plugins.structured_output.index_process import START_ID, IndexError_, IndexProcess
from pelton_plugins.structured_output.sources import ascii_digits, check_nesting
from pelton_plugins.structured_output.vocabulary import Vocabulary

_MAX_CACHED_BYTES = 256 * 2**20
_MAX_INDEX_BYTES = 64 * 2**20


class Automaton:
    """An index with the masks of its states, made when first asked for."""

    def __init__(self, index: Any, num_words: int, eos_token_ids: Sequence[int]) -> None:
        self.index = index
        self.start: int = index.get_next_state(index.get_initial_state(), START_ID)
        self._eos = [token_id for token_id in eos_token_ids if token_id < 32 * num_words]
        self._num_words = num_words
        self._masks: dict[int, Any] = {}

    def mask(self, state: int) -> Any:
        """[words] int32."""
        known = self._masks.get(state)
        if known is None:
            allowed = np.zeros(32 * self._num_words, dtype=np.uint8)
            token_ids = np.array(self.index.get_allowed_tokens(state) or [], dtype=np.int64)
            allowed[token_ids[token_ids != START_ID]] = 1
            allowed[self._eos] = self.index.is_final_state(state)
            known = self._masks[state] = np.packbits(allowed, bitorder="little").view("<i4")
        return known

    def ends_at(self, state: int) -> bool:
        """True when EOS alone may follow."""
        following = set(self.index.get_allowed_tokens(state) or ())
        return self.index.is_final_state(state) and not following - {START_ID, *self._eos}


class OutlinesGrammar(Grammar):
    """A state of the automaton; None behind EOS."""

    name = "outlines"

    def __init__(self, automaton: Automaton, eos_token_ids: Sequence[int], filler: CopyFiller) -> None:
        self.automaton = automaton
        self.filler: CopyFiller = filler
        self._eos = frozenset(eos_token_ids)
        self.state: int | None = automaton.start

    def after(self, token_ids: Sequence[int]) -> tuple[int, int | None]:
        """How many of the tokens are allowed, and the state behind them."""
        state, index = self.state, self.automaton.index
        for count, token in enumerate(token_ids):
            if state is None:
                return count, state
            is_end = token in self._eos and index.is_final_state(state)
            following = None if token in self._eos else index.get_next_state(state, token)
            if following is None and not is_end:
                return count, state
            state = following
        return len(token_ids), state

    def accept(self, token_ids: Sequence[int]) -> bool:
        count, state = self.after(token_ids)
        if count < len(token_ids):
            return False
        self.state = state
        return True

    def validate(self, token_ids: Sequence[int]) -> int:
        return self.after(token_ids)[0]

    def fill_bitmask(self, row: bytearray | memoryview, draft_token_ids: Sequence[int] = ()) -> None:
        count, state = self.after(draft_token_ids)
        if count < len(draft_token_ids):
            row[:] = b"\xff" * len(row)
        else:
            row[:] = self.mask(state).tobytes()

    def mask(self, state: int | None) -> Any:
        # Behind EOS as before it: nobody samples there.
        return self.automaton.mask(self.automaton.start if state is None else state)

    def is_terminated(self) -> bool:
        return self.state is None or self.automaton.ends_at(self.state)


class CopyFiller:
    def fill(self, rows: Sequence[tuple[OutlinesGrammar, int, Sequence[int]]], bitmask: Any) -> None:
        for grammar, place, drafts in rows:
            for position in range(1 + len(drafts)):
                count, state = grammar.after(drafts[:position])
                if count < position:
                    break
                bitmask[place + position] = grammar.mask(state)


class OutlinesBackend(StructuredOutputBackend):
    """Serves `regex` and `choice`."""

    def __init__(self, context: StructuredOutputContext, vocabulary: Vocabulary | None = None) -> None:
        config = context.engine_config
        self.settings = StructuredOutputsConfig() if config is None else config.structured_outputs
        self.vocabulary = vocabulary or Vocabulary(context)
        eos = self.vocabulary.eos_token_ids
        self._process = IndexProcess(
            self.vocabulary.tokens, self.vocabulary.special_token_ids, eos[0] if eos else len(self.vocabulary.tokens)
        )
        self._filler = CopyFiller()
        self._made: OrderedDict[str, tuple[int, Automaton]] = OrderedDict()  # (bytes of the index, automaton)
        self._lock = threading.Lock()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        try:
            return self.build(params, self.settings.grammar_compile_timeout_s)
        except IndexError_ as error:
            raise RequestError(
                f"structured_outputs.{params.kind} cannot be compiled by outlines: {error}", param="structured_outputs"
            ) from None

    def build(self, params: StructuredOutputsParams, timeout_s: float) -> Grammar:
        """Raises `IndexError_` where there is none within `timeout_s`, `RequestError` for other kinds of constraint."""
        regex = regex_of(params)
        with self._lock:  # one process, so one after the other
            found = self._made.get(regex)
            if found is None:
                found = self._made[regex] = self._build(regex, timeout_s)
                while len(self._made) > 1 and sum(size for size, _ in self._made.values()) > _MAX_CACHED_BYTES:
                    self._made.popitem(last=False)
            self._made.move_to_end(regex)
        return OutlinesGrammar(found[1], self.vocabulary.eos_token_ids, self._filler)

    def _build(self, regex: str, timeout_s: float) -> tuple[int, Automaton]:
        data = self._process.build(regex, timeout_s)
        if len(data) > _MAX_INDEX_BYTES:
            raise IndexError_(f"its automaton has {len(data)} bytes; at most {_MAX_INDEX_BYTES}")
        num_words = -(-self.vocabulary.vocab_size // 32)
        index = outlines_core.Index.from_binary(data)
        return len(data), Automaton(index, num_words, self.vocabulary.eos_token_ids)


def regex_of(params: StructuredOutputsParams) -> str:
    """Raises `RequestError` for what is neither a regex nor a choice."""
    if params.choice is not None:
        return "(" + "|".join(re.escape(text) for text in dict.fromkeys(params.choice)) + ")"
    if params.regex is None:
        raise RequestError(
            f"The structured-output backend outlines serves regex and choice, not {params.kind}; set structured_outputs_backend "
            "to auto or llguidance.",
            param="structured_outputs",
        )
    check_nesting(params.regex, "regex")
    return ascii_digits(params.regex)
