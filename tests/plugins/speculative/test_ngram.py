"""N-gram drafts: which earlier tokens are found, and what is proposed behind them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pelton.config import SpeculativeConfig
from pelton.spec_decode.interface import ProposerContext
from pelton_plugins.speculative.ngram import NgramProposer, propose


def drafts(text, *, longest=5, shortest=3, count=3):
    return propose(np.array(text, dtype=np.int32), longest, shortest, count)


@pytest.mark.parametrize(
    "text, expected",
    [
        pytest.param([1, 2, 3, 9, 8, 1, 2, 3], [9, 8, 1], id="three-tokens-found"),
        pytest.param([1, 2, 3, 9, 8, 7, 6, 2, 3], [], id="two-are-too-few"),
        # (2, 3, 4) stands twice; the four tokens (1, 2, 3, 4) only first: the longest match wins over the latest.
        pytest.param([1, 2, 3, 4, 5, 6, 7, 0, 2, 3, 4, 8, 8, 8, 1, 2, 3, 4], [5, 6, 7], id="longest-first"),
        pytest.param([1, 2, 3, 5, 5, 5, 0, 1, 2, 3, 6, 6, 6, 0, 7, 1, 2, 3], [6, 6, 6], id="latest-of-equals"),
        pytest.param([4, 4, 4, 4, 4, 4, 4, 4], [4, 4, 4], id="a-loop-gives-all-drafts"),
        pytest.param([4, 4, 4, 4], [4], id="too-little-behind-it"),
        pytest.param([7], [], id="one-token"),
        pytest.param([1, 2, 3], [], id="nothing-earlier"),
    ],
)
def test_proposals(text, expected):
    assert drafts(text) == expected


def test_an_n_gram_of_one_token_may_be_enough():
    assert drafts([5, 9, 7, 8, 5], longest=1, shortest=1, count=2) == [9, 7]


def slow(text, longest, shortest, count):
    """The same by its definition, place by place."""
    size = len(text)
    for length in range(min(longest, size - 1), shortest - 1, -1):
        ends = [end for end in range(length, size) if text[end - length : end] == text[size - length :]]
        if ends:
            complete = [end for end in ends if end + count <= size]
            end = complete[-1] if complete else ends[0]
            return text[end : end + count]
    return []


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.integers(1, 6), st.integers(0, 4), st.integers(1, 5),
)  # fmt: skip
def test_proposals_follow_their_definition(text, shortest, more, count):
    found = drafts(text, longest=shortest + more, shortest=shortest, count=count)
    assert found == slow(text, shortest + more, shortest, count)


def test_a_proposer_follows_a_text_that_grows_and_forgets_it():
    proposer = NgramProposer(ProposerContext(config=SpeculativeConfig(method="ngram"), vocab_size=10, max_model_len=9))
    assert proposer.max_draft_tokens == 3
    text = [1, 2, 3, 9] * 100
    for size in range(1, len(text)):
        assert proposer.propose("a", text[:size]) == slow(text[:size], 5, 3, 3)
    assert proposer.propose("b", [1, 2]) == []
    proposer.finished("a")
    proposer.finished("never seen")
    assert proposer.propose("a", [5] * 8) == [5, 5, 5]
