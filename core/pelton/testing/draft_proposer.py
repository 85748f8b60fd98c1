"""Conformance of draft proposers on the host: what any implementation has to keep, run with pytest.

Subclass `DraftProposerConformance` in a test module and give it `make_proposer`:

    class TestMine(DraftProposerConformance):
        def make_proposer(self, context):
            return MyProposer(context)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest

from pelton.config import SpeculativeConfig
from pelton.spec_decode.interface import DraftProposer, ProposerContext
from pelton.testing.scheduler import Harness, make_request

VOCAB_SIZE, MAX_MODEL_LEN = 40, 128


class DraftProposerConformance:
    config: ClassVar[SpeculativeConfig] = SpeculativeConfig(method="under_test", num_speculative_tokens=3)

    def make_proposer(self, context: ProposerContext) -> DraftProposer:
        raise NotImplementedError

    @pytest.fixture
    def make(self) -> Callable[[], DraftProposer]:
        return lambda: self.make_proposer(
            ProposerContext(config=self.config, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)
        )

    def test_says_how_many_drafts_it_makes_at_most(self, make: Callable[[], DraftProposer]) -> None:
        most = getattr(make(), "max_draft_tokens", None)
        assert isinstance(most, int) and 1 <= most <= self.config.num_speculative_tokens, (
            f"max_draft_tokens is {most!r}; it must be 1 to num_speculative_tokens, {self.config.num_speculative_tokens}"
        )

    def test_proposes_a_list_of_token_ids_and_no_more_than_it_says(self, make: Callable[[], DraftProposer]) -> None:
        for text in _texts():
            proposer = make()
            drafts = _propose(proposer, "r", text)
            assert len(drafts) <= proposer.max_draft_tokens, (
                f"{len(drafts)} drafts for a text of {len(text)} tokens; max_draft_tokens is {proposer.max_draft_tokens}"
            )

    def test_leaves_the_tokens_as_they_are(self, make: Callable[[], DraftProposer]) -> None:
        for text in _texts():
            given = list(text)
            _propose(make(), "r", given)
            assert given == text, "propose changes token_ids, which are the scheduler's own"

    def test_drafts_depend_on_the_text_alone(self, make: Callable[[], DraftProposer]) -> None:
        """Not on how often it was asked before, nor on other requests between."""
        chooser = random.Random(3)
        proposer, texts = make(), {f"r{i}": text for i, text in enumerate(_texts())}
        known = {name: chooser.randint(1, len(text)) for name, text in texts.items()}
        for _ in range(200):
            name = chooser.choice(list(texts))
            found = _propose(proposer, name, texts[name][: known[name]])
            expected = _propose(make(), name, texts[name][: known[name]])
            assert found == expected, (
                f"{found} is proposed after {known[name]} tokens of {name}, and {expected} by a proposer that was asked nothing before"
            )
            known[name] = min(known[name] + chooser.randint(0, 4), len(texts[name]))

    def test_a_finished_request_is_forgotten(self, make: Callable[[], DraftProposer]) -> None:
        proposer = make()
        proposer.finished("never seen")
        first, second = [1, 2, 3, 4] * 6, [5, 6, 7, 8, 9] * 5
        _propose(proposer, "r", first)
        proposer.finished("r")
        found, expected = _propose(proposer, "r", second), _propose(make(), "r", second)
        assert found == expected, f"{found} is proposed for an id that was used before, and {expected} for a new one"

    @pytest.mark.parametrize(
        "options", [{}, {"max_steps_in_flight": 2}, {"num_blocks": 14}], ids=["one", "overlap", "few-blocks"]
    )
    def test_tokens_are_those_without_drafts(self, make: Callable[[], DraftProposer], options: dict[str, Any]) -> None:
        """Wrong drafts cost time and change nothing: through a scheduler with several requests, preemption and stops."""
        expected = _generate(Harness(**options))
        harness = Harness(proposer=make(), **options)
        assert _generate(harness) == expected


def _generate(harness: Harness) -> dict[str, list[int]]:
    for index, count in enumerate((1, 5, 9, 17)):
        harness.add(make_request(f"r{index}", count, 12 + index))
    harness.run()
    return {name: harness.tokens(name) for name in harness.requests}


def _propose(proposer: DraftProposer, request_id: str, text: Sequence[int]) -> list[int]:
    drafts = proposer.propose(request_id, text)
    assert isinstance(drafts, list) and all(type(token) is int for token in drafts), (
        f"propose returns {drafts!r}; it must return a list of ints, empty for none"
    )
    wrong = [token for token in drafts if not 0 <= token < VOCAB_SIZE]
    assert not wrong, f"propose returns token {wrong[0]} of a vocabulary of {VOCAB_SIZE}"
    return drafts


def _texts() -> Iterator[list[int]]:
    """Short and long, with and without repetition, up to the longest there is."""
    chooser = random.Random(1)
    yield [0]
    yield [VOCAB_SIZE - 1] * 2
    yield [1, 2, 3] * 9
    for length in (2, 7, 31, MAX_MODEL_LEN):
        yield [chooser.randrange(VOCAB_SIZE) for _ in range(length)]
        yield [chooser.randrange(3) for _ in range(length)]
