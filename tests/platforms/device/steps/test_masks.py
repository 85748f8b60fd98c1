"""Masks are written where the `sample` op reads them, in few copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pelton_platforms.device.steps.masks import MaskPlaces, runs
from pelton_platforms.device.steps.staging import mask_column, mask_words


@pytest.mark.parametrize(
    "slots, most_between, expected",
    [
        ([], 3, []),
        ([5], 0, [(5, 6)]),
        ([0, 1, 2], 0, [(0, 3)]),
        ([0, 2, 3], 0, [(0, 1), (2, 4)]),
        ([0, 2, 3], 1, [(0, 4)]),
        ([0, 4, 9, 10], 3, [(0, 5), (9, 11)]),
    ],
)
def test_slots_that_lie_together_are_one_copy(slots, most_between, expected):
    assert runs(np.array(slots, dtype=np.int64), most_between) == expected


@pytest.mark.parametrize("num_given", [2, 3], ids=["fewer-words", "all-words"])
def test_other_slots_have_no_mask_and_missing_words_allow_nothing(num_given):
    words, has_mask = torch.full((6, 3), 7, dtype=torch.int32), torch.ones(6, dtype=torch.bool)
    given = np.arange(1, 2 * num_given + 1, dtype="<i4").reshape(2, num_given)
    MaskPlaces(words, has_mask).place(np.array([4, 1]), given.tobytes())
    assert has_mask.tolist() == [False, True, False, False, True, False]
    expected = np.zeros((2, 3), dtype=np.int32)
    expected[:, :num_given] = given
    assert words[[4, 1]].numpy().tolist() == expected.tolist()


@pytest.mark.parametrize("num_given, num_words", [(4, 4), (2, 4), (4, 2), (3, 3), (4, 3), (2, 3)])
def test_a_column_holds_masks_of_the_models_words_whatever_their_own(num_given, num_words):
    given = np.arange(1, 2 * num_given + 1, dtype="<i4").reshape(2, num_given)
    column = mask_column(given.tobytes(), 2, num_words)
    expected = np.zeros((2, num_words), dtype=np.int32)
    expected[:, : min(num_given, num_words)] = given[:, :num_words]
    assert column.dtype == np.int64
    assert mask_words(torch.from_numpy(column.copy()), 2, num_words).tolist() == expected.tolist()
