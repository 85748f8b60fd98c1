"""Layers whose attention reads what an indexer chose, where steps are cut at both."""

import pytest
import torch

from pelton.testing.models import reference_logits
from pelton_platforms.device.graphs.captures import run_split_at_attention


@pytest.mark.parametrize("family", ["deepseek_v32"], indirect=True)
def test_steps_in_pieces(checkpoint, reference, make_driver, token_ids, monkeypatch):
    """Choice and attention are what runs between the pieces: two calls a layer."""
    driver = make_driver(checkpoint)
    forward, calls = driver.model.forward, []

    def in_pieces(batch):
        def call(split):
            cut = split.cut
            split.cut = lambda layer, query, output: (calls.append(layer.layer_name), cut(layer, query, output))
            return forward(split)

        return run_split_at_attention(call, batch)

    monkeypatch.setattr(driver.model, "forward", in_pieces)
    got = torch.cat([driver.step({"a": part})["a"] for part in (token_ids[:50], token_ids[50:51], token_ids[51:90])])
    torch.testing.assert_close(got, reference_logits(reference, token_ids[:90]), atol=1e-4, rtol=1e-4)
    layer = [f"model.layers.{index}.self_attn.{name}" for index in range(4) for name in ("indexer", "attn")]
    assert calls == layer * 3


@pytest.mark.parametrize("family", ["deepseek_v32"], indirect=True)
def test_all_layers_leave_their_choice_in_one_place(checkpoint, make_driver):
    driver = make_driver(checkpoint, max_num_batched_tokens=64)
    choices = {layer.self_attn.indexer.choice for layer in driver.model.layers}
    assert len(choices) == 1 and choices.pop().tokens.shape == (64, 16)
    assert {layer.self_attn.attn.chosen.data_ptr() for layer in driver.model.layers} == {
        driver.model.layers[0].self_attn.indexer.choice.tokens.data_ptr()
    }
