"""The tail of a step, by what its rows ask for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pelton.sampling.tails import GREEDY, Variant, Verify
from pelton.worker.batch_state import NO_LOGPROBS
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


@pytest.mark.parametrize(
    "slots, has_nuclei",
    [
        pytest.param([0], True, id="top-p-alone"),
        pytest.param([1, 2, 3, 4], False, id="with-top-k-or-min-p-or-greedy"),
        pytest.param([1, 0], True, id="one-of-two"),
    ],
)
def test_steps_with_logprobs_say_whether_a_row_has_a_nucleus_alone(slots, has_nuclei):
    host = SimpleNamespace(
        has_extras=np.ones(5, bool),
        temperature=np.array([1.0, 1.0, 1.0, 0.0, 1.0]),
        sampling={
            "top_k": np.array([100, 50, 100, 100, 100]),
            "top_p": np.array([0.9, 0.9, 0.9, 0.9, 1.0]),
            "min_p": np.array([0.0, 0.0, 0.1, 0.0, 0.0]),
        },
        num_logprobs=np.array([5, 5, NO_LOGPROBS, 0, 0]),
        processors=None,
    )
    state = SimpleNamespace(device=torch.device("cuda"), host=host, vocab_size=100)
    chooser = TailChooser(state, SimpleNamespace(num_logprobs=20))
    for has_mask in (False, True):
        variant = chooser.variant(np.array(slots), has_masks=has_mask)
        assert variant == Variant(has_mask=has_mask, has_logprobs=True, has_nuclei=has_nuclei)
    host.num_logprobs[:] = NO_LOGPROBS
    assert chooser.variant(np.array(slots), has_masks=False) == Variant(), "captured beforehand, whatever the filters"
