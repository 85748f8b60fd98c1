"""Slices of a checkpoint go to their places, and what does not fit is named."""

import pytest
import torch

from pelton.errors import ConfigError
from pelton.model.build import HFConfig
from pelton.model.weights import WeightMap
from pelton.testing.model_driver import TensorWeight


class Unreadable(TensorWeight):
    def read(self, dim=None, start=0, stop=None):
        raise AssertionError("read although nothing of it is kept")


def test_slices_go_to_their_places():
    weights, merged = WeightMap(), torch.zeros(4, 3)
    weights.expect("q", (6, 3), merged[:2], dim=0, start=2, stop=4)
    weights.expect("k", (2, 6), merged[2:], dim=1, start=3, stop=6)
    q, k = torch.arange(18.0).view(6, 3), torch.arange(12.0).view(2, 6)
    assert weights.load([("q", TensorWeight(q)), ("k", TensorWeight(k))]) == {"q", "k"}
    assert torch.equal(merged, torch.cat([q[2:4], k[:, 3:]]))
    assert weights.expected() == {"q": (6, 3), "k": (2, 6)}


def test_weights_are_converted_as_they_are_copied():
    weights, target = WeightMap(), torch.zeros(2, dtype=torch.bfloat16)
    weights.expect("w", (2,), target)
    weights.load([("w", TensorWeight(torch.tensor([1.0, 2.0], dtype=torch.float64)))])
    assert target.tolist() == [1.0, 2.0]


def test_a_weight_of_which_this_rank_keeps_nothing_is_not_read():
    weights = WeightMap()
    weights.expect("bias", (2,), None)
    assert weights.load([("bias", Unreadable(torch.zeros(2)))]) == {"bias"}


def test_every_problem_is_named_at_once_and_long_lists_are_cut():
    weights = WeightMap()
    for index in range(8):
        weights.expect(f"layers.{index}.w", (1,), torch.zeros(1))
    with pytest.raises(ConfigError) as error:
        weights.load([("layers.7.w", TensorWeight(torch.zeros(1))), ("layers.77.w", TensorWeight(torch.zeros(1)))])
    text = str(error.value)
    assert "missing layers.0.w, layers.1.w, layers.2.w, layers.3.w, layers.4.w and 2 more" in text
    assert "unexpected layers.77.w (near to layers." in text


def test_ignored_names_are_no_error():
    weights = WeightMap()
    weights.ignore(r"lm_head\..*")
    names = ["lm_head.weight", "model.layers.3.self_attn.rotary_emb.inv_freq", "rotary_emb.cos_cached"]
    assert weights.load([(name, Unreadable(torch.zeros(1))) for name in names]) == set()


def test_config_fields_are_attributes_and_a_missing_one_is_named():
    hf = HFConfig({"hidden_size": 8, "sliding_window": None})
    assert (hf.hidden_size, hf.sliding_window, hf.get("sliding_window", 4), hf.get("x", 5)) == (8, None, 4, 5)
    assert getattr(hf, "x", None) is None and not hasattr(hf, "x") and list(hf) == ["hidden_size", "sliding_window"]
    with pytest.raises(ConfigError, match=r"config\.json has no field 'x'.*hf_overrides"):
        hf.x  # noqa: B018
