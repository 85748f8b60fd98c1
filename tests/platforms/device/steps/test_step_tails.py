"""The tail of a decode step with drafts: `Verify`, unless some row asks for what it has not."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pelton.sampling.tails import GREEDY, Verify
from pelton_platforms.device.steps.step_tails import LOGITS, TailChooser


@pytest.mark.parametrize(
    "slots, num_draft, has_masks, tail",
    [
        pytest.param([0, 2], [2, 1], False, Verify(GREEDY), id="plain"),
        pytest.param([0, 1], [2, 1], False, LOGITS, id="with-side-tables"),
        pytest.param([0], [4], False, LOGITS, id="more-drafts-than-there-is-room-for"),
        pytest.param([0], [3], False, Verify(GREEDY), id="as-many-as-there-is-room-for"),
        pytest.param([0], [2], True, LOGITS, id="with-a-mask"),
    ],
)
def test_rows_with_drafts_are_verified_where_they_ask_for_nothing_else(slots, num_draft, has_masks, tail):
    host = SimpleNamespace(
        side_slots=np.array([-1, 0, -1]),
        has_extras=np.zeros(3, bool),
        temperature=np.zeros(3),
        num_logprobs=np.zeros(3),
    )
    state = SimpleNamespace(device=torch.device("cpu"), host=host)
    ops = SimpleNamespace(drafts=SimpleNamespace(width=4), skips_unused=True, num_logprobs=0)
    chooser = TailChooser(state, ops)
    assert chooser.of_decode(np.array(slots), np.array(num_draft), has_masks=has_masks) == tail
