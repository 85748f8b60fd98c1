"""Masks of a step's grammar rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pelton.testing.fake_grammar import FakeGrammar
from pelton_plugins.scheduler.grammars import make_masks


@pytest.mark.parametrize("is_finished, through", [(True, 0), (False, 3)], ids=["it-ended", "its-result-is-discarded"])
def test_a_request_that_needs_no_mask_any_more_has_one_that_allows_all(is_finished, through):
    gone = SimpleNamespace(is_finished=is_finished, discard_through_step=through, grammar=None, drafts=[])
    there = SimpleNamespace(is_finished=False, discard_through_step=2, grammar=FakeGrammar(1, 40, (0,)), drafts=[])
    output = SimpleNamespace(grammar_rows=[0, 1], num_draft=None, step_id=3)
    masks = make_masks(SimpleNamespace(output=output, requests=[gone, there]), 40, None)
    assert (masks.step_id, masks.num_masks, len(masks.bitmask)) == (3, [1, 1], 16)
    assert masks.bitmask[:8] == b"\xff" * 8 != masks.bitmask[8:]
