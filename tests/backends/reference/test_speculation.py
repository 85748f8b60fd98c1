"""The ops of speculation in torch: drafts are those of the host's look-up, and what is kept is what was sampled."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from pelton.ops.speculation import LookupDraftsNeeds, LookupDraftsTensors, VerifyNeeds, VerifyTensors
from pelton_backends.reference.speculation import ReferenceLookupDrafts, ReferenceVerify
from pelton_platforms.device.steps.batch_state import BatchState
from pelton_plugins.speculative.ngram import propose

MAX_LEN = 60


def make_state(texts: list[list[int]]) -> BatchState:
    """Each text is known, its last token not computed yet."""
    state = BatchState(
        max_num_seqs=len(texts), max_model_len=MAX_LEN, vocab_size=9, block_sizes=(4,), num_side_slots=0,
        device=torch.device("cpu"),
    )  # fmt: skip
    for slot, text in enumerate(texts):
        state.token_ids[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        state.num_computed_tokens[slot] = len(text) - 1
    return state


@pytest.mark.parametrize("longest, shortest, count", [(5, 3, 3), (3, 1, 4), (2, 2, 1)])
def test_the_device_finds_the_drafts_that_the_host_finds(longest: int, shortest: int, count: int) -> None:
    chooser = random.Random(longest)
    texts = [[chooser.randrange(3) for _ in range(chooser.randrange(1, 41))] for _ in range(60)]
    state, num_found = make_state(texts), torch.zeros(60, dtype=torch.int64)
    needs = LookupDraftsNeeds(num_drafts=count, longest=longest, shortest=shortest)
    look_up = ReferenceLookupDrafts.bind(needs, LookupDraftsTensors(state))
    look_up(torch.arange(60), torch.full((60,), count), num_found)
    expected = [propose(np.array(text, dtype=np.int32), longest, shortest, count) for text in texts]
    assert num_found.tolist() == [len(drafts) for drafts in expected]
    for slot, (text, drafts) in enumerate(zip(texts, expected, strict=True)):
        assert state.token_ids[slot, : len(text) + len(drafts)].tolist() == text + drafts
    assert any(expected) and not all(expected)


def test_worked_example_of_looking_up() -> None:
    """n-grams of 5 down to 3 tokens, 3 drafts: the longest first, none below the least."""
    state = make_state([[1, 2, 3, 4, 7, 8, 2, 3, 4], [1, 2, 3, 5, 1, 2], [3, 1, 2, 3, 6, 1, 2, 3, 4, 5, 1, 2, 3]])
    num_found = torch.zeros(3, dtype=torch.int64)
    needs = LookupDraftsNeeds(num_drafts=3, longest=5, shortest=3)
    look_up = ReferenceLookupDrafts.bind(needs, LookupDraftsTensors(state))
    look_up(torch.arange(3), torch.tensor([3, 3, 3]), num_found)
    assert num_found.tolist() == [3, 0, 3]
    assert state.token_ids[0, 9:12].tolist() == [7, 8, 2]
    assert state.token_ids[2, 13:16].tolist() == [4, 5, 1]  # the later of two places


def test_drafts_are_kept_up_to_the_first_that_differs() -> None:
    state = make_state([[5, 6], [5, 6], [5], [7]])
    state.token_ids[:3, 2:5] = torch.tensor([1, 2, 3], dtype=torch.int32)
    state.token_ids[2, 1:4] = torch.tensor([1, 2, 3], dtype=torch.int32)
    sampled = torch.tensor(
        [[[1, 0], [2, 0], [4, 0], [9, 1]], [[1, 0], [2, 0], [3, 0], [8, 0]], [[1, 0], [2, 1], [3, 0], [8, 0]], [[2, 0]] * 4],
        dtype=torch.int32,
    )  # fmt: skip
    result = torch.zeros(4, 7, dtype=torch.int32)
    verify = ReferenceVerify.bind(VerifyNeeds(num_drafts=3), VerifyTensors(state))
    verify(torch.arange(4), torch.tensor([3, 3, 1, 0]), sampled.view(16, 2), result)
    assert result[:, :3].tolist() == [[2, 0, 3], [3, 0, 3], [1, 1, 1], [0, 0, 0]]
    assert result[1, 3:].tolist() == [1, 2, 3, 8]
    assert state.num_computed_tokens[:4].tolist() == [4, 5, 2, 1]
    assert state.token_ids[0, :5].tolist() == [5, 6, 1, 2, 4] and state.token_ids[1, :6].tolist() == [5, 6, 1, 2, 3, 8]
    assert state.token_ids[2, :3].tolist() == [5, 1, 2] and state.token_ids[3, :2].tolist() == [7, 2]
