"""The built-in draft proposer keeps what every proposer has to keep, and the suite says what a wrong one does wrong."""

from __future__ import annotations

import pytest

from pelton.config import SpeculativeConfig
from pelton.spec_decode.interface import DraftProposer, ProposerContext
from pelton.testing.draft_proposer import VOCAB_SIZE, DraftProposerConformance
from pelton_plugins.speculative.ngram import NgramProposer


class TestNgram(DraftProposerConformance):
    def make_proposer(self, context):
        return NgramProposer(context)


class TestNgramOfOneToken(DraftProposerConformance):
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=5, prompt_lookup_min=1, prompt_lookup_max=2)

    def make_proposer(self, context):
        return NgramProposer(context)


class _Wrong(DraftProposer):
    def __init__(self, propose, max_draft_tokens=3):
        self._propose = propose
        self.max_draft_tokens = max_draft_tokens
        self.texts: dict[str, list[int]] = {}

    def propose(self, request_id, token_ids):
        return self._propose(self, request_id, token_ids)


def _remembers(self, request_id, token_ids):
    return self.texts.setdefault(request_id, list(token_ids))[:1]


@pytest.mark.parametrize(
    "proposer, test, message",
    [
        (_Wrong(lambda *_: [1] * 4), "test_proposes_a_list", "4 drafts for a text of 1 tokens; max_draft_tokens is 3"),
        (_Wrong(lambda *_: [VOCAB_SIZE]), "test_proposes_a_list", "token 40 of a vocabulary of 40"),
        (_Wrong(lambda *_: None), "test_proposes_a_list", "propose returns None; it must return a list of ints"),
        (
            _Wrong(lambda *_: [], 9),
            "test_says_how_many",
            "max_draft_tokens is 9; it must be 1 to num_speculative_tokens, 3",
        ),
        (_Wrong(lambda _s, _r, tokens: tokens.append(1) or []), "test_leaves_the_tokens", "propose changes token_ids"),
        (_Wrong(_remembers), "test_a_finished_request", r"\[1\] is proposed for an id that was used before, and \[5\]"),
    ],
    ids=["too-many", "no-token", "none", "boast", "writes", "forgets-nothing"],
)
def test_a_wrong_proposer_fails_with_what_it_did(proposer, test, message):
    suite = DraftProposerConformance()
    (name,) = (name for name in dir(suite) if name.startswith(test))
    fresh = [proposer]

    def make():
        return fresh.pop() if fresh else _Wrong(proposer._propose, proposer.max_draft_tokens)

    with pytest.raises(AssertionError, match=message):
        getattr(suite, name)(make)


def test_the_suite_gives_settings_to_the_proposer():
    seen: list[ProposerContext] = []

    class Suite(DraftProposerConformance):
        config = SpeculativeConfig(num_speculative_tokens=7)

        def make_proposer(self, context):
            seen.append(context)
            return NgramProposer(context)

    make = DraftProposerConformance.make.__wrapped__(Suite())
    assert make().max_draft_tokens == 7 and seen[0].vocab_size == VOCAB_SIZE
