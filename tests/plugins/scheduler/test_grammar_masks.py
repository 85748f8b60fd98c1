"""Masks of a step's grammar rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pelton.testing.fake_grammar import FakeGrammar
from pelton_plugins.scheduler.grammars import AfterReasoning, MaskMaker


@pytest.mark.parametrize("is_finished, through", [(True, 0), (False, 3)], ids=["it-ended", "its-result-is-discarded"])
def test_a_request_that_needs_no_mask_any_more_has_one_that_allows_all(is_finished, through):
    gone = SimpleNamespace(is_finished=is_finished, discard_through_step=through, grammar=None, drafts=[])
    there = SimpleNamespace(is_finished=False, discard_through_step=2, grammar=FakeGrammar(1, 40, (0,)), drafts=[])
    there.late_masks = None
    output = SimpleNamespace(grammar_rows=[0, 1], num_draft=None, step_id=3, slots=[5, 2])
    masks = MaskMaker(40).make(SimpleNamespace(output=output, requests=[gone, there]), None)
    assert (masks.step_id, masks.num_masks, len(masks.bitmask)) == (3, [1, 1], 16)
    assert masks.bitmask[:8] == b"\xff" * 8 != masks.bitmask[8:]


def after_reasoning(prompt=()):
    """A grammar of four tokens behind the tokens 30, 31, 30, 32."""
    return AfterReasoning(FakeGrammar(4, 40, (0,)), [30, 31, 30, 32], list(prompt))


@pytest.mark.parametrize(
    "parts",
    [
        [[7, 8, 30, 31, 30, 32]],
        [[7], [8], [30], [31], [30], [32]],
        [[7, 8, 30], [31, 30], [32]],
        [[30, 31], [30, 31, 30, 32]],
        [[30, 30, 31, 30], [32]],
    ],
    ids=["at-once", "one-by-one", "in-parts", "begun-twice", "begun-late"],
)
def test_the_end_of_the_reasoning_is_seen_however_its_tokens_come(parts):
    grammar = after_reasoning()
    for part in parts:
        assert grammar.accept(part)
    assert not grammar.accept([3]) and grammar.accept([1, 2]) and not grammar.is_terminated()
    assert grammar.accept([1, 2, 0]) and grammar.is_terminated()


def test_a_prompt_that_ends_the_reasoning_begins_the_answer():
    grammar = after_reasoning([9, 30, 31, 30, 32])
    assert grammar.begins_after([30, 31, 30, 32]) == 0 and grammar.validate([1, 2, 5]) == 2
    assert after_reasoning([9, 30, 31, 30]).accept([3, 6, 9])  # reasoning: no rule for it


def test_what_follows_the_end_among_the_same_tokens_must_fit():
    grammar = after_reasoning()
    assert grammar.accept([7, 30, 31])
    assert grammar.begins_after([30, 32, 1]) == 2 and grammar.begins_after([30, 33]) == -1
    assert grammar.validate([30, 33, 9]) == 3 and grammar.validate([30, 32, 1, 2, 5]) == 4
    row = bytearray(8)
    grammar.fill_bitmask(row, [30])
    assert row == b"\xff" * 8
    grammar.fill_bitmask(row, [30, 32, 1])
    expected = bytearray(8)
    FakeGrammar(4, 40, (0,)).fill_bitmask(expected, [1])
    assert row == expected
    assert not after_reasoning().accept([30, 31, 30, 32, 3]) and grammar.accept([30, 32, 1])
