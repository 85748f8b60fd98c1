"""Conformance of structured-output backends: what any implementation has to keep, run with pytest.

Subclass `StructuredOutputConformance` in a test module, set `backend` and `good`, and `bad` where anything is refused.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from pelton.errors import RequestError
from pelton.sampling_params import StructuredOutputsParams
from pelton.structured.interface import Grammar, StructuredOutputBackend, StructuredOutputContext
from pelton.testing.models import EOS_ID, VOCAB_SIZE, make_tiny_tokenizer

_MAX_TOKENS = 200


class StructuredOutputConformance:
    backend: ClassVar[type[StructuredOutputBackend]]
    good: ClassVar[Sequence[StructuredOutputsParams]]
    """Constraints that end within 200 tokens, whatever is chosen."""
    bad: ClassVar[Sequence[StructuredOutputsParams]] = ()
    """Constraints that must be refused."""

    @pytest.fixture
    def made(self, tmp_path: Path) -> StructuredOutputBackend:
        path = make_tiny_tokenizer(tmp_path)
        return self.backend(
            StructuredOutputContext(tokenizer_path=str(path), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS_ID])
        )

    def test_what_the_mask_allows_is_accepted_and_nothing_else(self, made: StructuredOutputBackend) -> None:
        for params in self.good:
            grammar = made.compile(params)
            for step in _walk(made.compile(params), random.Random(1)):
                allowed = allowed_tokens(grammar)
                for token in random.Random(2).sample(range(VOCAB_SIZE), 40):
                    # Of a text that is certain, a mask may hold the tokenizer's own token alone.
                    is_right = grammar.validate([token]) == (token in allowed) or (
                        token not in allowed and len(allowed) == 1
                    )
                    assert is_right, f"token {token} in {params}"
                assert grammar.accept([step])

    def test_it_ends_with_eos_alone(self, made: StructuredOutputBackend) -> None:
        for params in self.good:
            grammar = made.compile(params)
            assert len(_walk(grammar, random.Random(3))) < _MAX_TOKENS, f"{params} does not end"
            assert allowed_tokens(grammar) == {EOS_ID}

    def test_drafts_leave_the_state_as_it_is(self, made: StructuredOutputBackend) -> None:
        for params in self.good:
            grammar, chosen = made.compile(params), random.Random(4)
            path = _walk(made.compile(params), chosen)
            before = allowed_tokens(grammar)
            assert grammar.validate(path) == len(path)
            for count in range(len(path)):
                allowed_tokens(grammar, path[:count])
            assert allowed_tokens(grammar) == before
            assert grammar.accept(path), "a text that the masks allowed one by one is not accepted at once"

    def test_a_token_that_is_not_allowed_is_refused(self, made: StructuredOutputBackend) -> None:
        for params in self.good:
            grammar = made.compile(params)
            wrong = next(token for token in range(VOCAB_SIZE) if token not in allowed_tokens(grammar))
            assert not grammar.accept([wrong])

    def test_a_bad_constraint_is_the_clients_error(self, made: StructuredOutputBackend) -> None:
        for params in self.bad:
            with pytest.raises(RequestError):
                made.compile(params)


def allowed_tokens(grammar: Grammar, drafts: Sequence[int] = ()) -> set[int]:
    """Tokens whose bit is set after `drafts`."""
    row = bytearray(4 * -(-VOCAB_SIZE // 32))
    grammar.fill_bitmask(row, drafts)
    return {token for token in range(VOCAB_SIZE) if row[token // 8] >> token % 8 & 1}


def _walk(grammar: Grammar, chooser: random.Random) -> list[int]:
    """Choose allowed tokens until only EOS may follow; returns them."""
    path: list[int] = []
    while not grammar.is_terminated() and len(path) < _MAX_TOKENS:
        allowed = allowed_tokens(grammar) - {EOS_ID}
        if not allowed:
            break
        path.append(chooser.choice(sorted(allowed)))
        assert grammar.accept(path[-1:]), f"token {path[-1]}, which the mask allows, is not accepted"
    return path
