"""The built-in draft proposer keeps what every proposer has to keep, and the suite says what a wrong one does wrong."""

from __future__ import annotations

import pytest
from pelton_drafts import eagle, medusa

from pelton.config import SpeculativeConfig
from pelton.spec_decode.interface import DraftProposer, ProposerContext
from pelton.testing.draft_proposer import VOCAB_SIZE, DrafterConformance, DraftProposerConformance
from pelton.testing.models import make_tiny_checkpoint
from pelton_plugins.speculative.medusa import MedusaDrafter
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


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", with_tokenizer=False))


class TestEagle(DrafterConformance):
    @pytest.fixture(autouse=True)
    def checkpoint(self, llama, tmp_path):
        self.model = llama
        self.speculative_config = {"method": "eagle", "model": eagle(tmp_path / "head", llama)}


def test_the_suite_of_drafters_says_what_a_wrong_one_does(llama, tmp_path, monkeypatch):
    """One that leaves the text of its request behind changed, and one that never makes a draft."""
    suite = DrafterConformance()
    suite.model, suite.speculative_config = llama, {"method": "medusa", "model": medusa(tmp_path / "heads", llama)}
    with monkeypatch.context() as patch:
        patch.setattr(MedusaDrafter, "draft", lambda self, rows: rows._steps.place(rows._slots, 0, rows._slots))
        with pytest.raises(AssertionError):
            suite.test_greedy_tokens_are_those_without_drafts({})
    monkeypatch.setattr("pelton_plugins.scheduler.drafts.Drafts.begin", lambda self, step_id, running: None)
    with pytest.raises(AssertionError, match="0 drafts in 0 rows, with 3 a row at most"):
        suite.test_makes_drafts_and_no_more_than_the_settings_say()
