"""Layers whose attention reads what an indexer chose, where steps are cut at both."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from pelton.errors import ConfigError
from pelton.model.build import HFConfig
from pelton.testing.models import reference_logits
from pelton_platforms.device.graphs.captures import run_split_at_attention
from pelton_plugins.models.indexer import layers_with_indexer


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "mistral_large4"], indirect=True)
def test_steps_in_pieces(checkpoint, reference, make_driver, token_ids, monkeypatch):
    """Choice and attention are what runs between the pieces: two calls a layer, one where a layer has no indexer."""
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
    kinds = getattr(reference.config.get_text_config(), "indexer_types", ["full"] * 4)
    calls_of = {"full": ("indexer", "attn"), "shared": ("attn",)}
    layers = [f"model.layers.{index}.self_attn.{name}" for index, kind in enumerate(kinds) for name in calls_of[kind]]
    assert calls == layers * 3


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "mistral_large4"], indirect=True)
def test_all_layers_leave_their_choice_in_one_place(checkpoint, make_driver):
    driver = make_driver(checkpoint, max_num_batched_tokens=64)
    choices = {layer.self_attn.indexer.choice for layer in driver.model.layers if layer.self_attn.indexer is not None}
    assert len(choices) == 1 and choices.pop().tokens.shape == (64, 16)
    assert {layer.self_attn.attn.chosen.data_ptr() for layer in driver.model.layers} == {
        driver.model.layers[0].self_attn.indexer.choice.tokens.data_ptr()
    }


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"], indirect=True)
def test_memory_is_measured_with_queries_and_output_of_latents(checkpoint, make_driver, monkeypatch):
    """The pass without a cache makes what attention reads and fills, and nothing that is not a number."""
    layer, made = make_driver(checkpoint).model.layers[0].self_attn.attn, []
    absorbed = layer._absorbed
    monkeypatch.setattr(layer, "_absorbed", lambda *given: made.append(absorbed(*given)) or made[-1])
    batch = SimpleNamespace(attention=(), positions=torch.arange(5))
    query = torch.randn(5, layer.num_heads * (layer.nope_dim + layer.rope_dim))
    out = layer(query, torch.randn(5, layer.head_dim), batch)
    assert made[0].shape == (5, layer.num_heads, layer.head_dim)
    assert out.shape == (5, layer.num_heads * layer.value_dim) and not out.any()


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"index_topk_freq": 4}, {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 2, "index_skip_topk_offset": 0},
        {"index_topk_freq": 0}, {"index_topk_pattern": "FFSSFSFSS"}, {"index_topk_pattern": ["full", "shared", "full"] * 3},
        {"indexer_types": ["full", "full", "shared"] * 3, "index_topk_freq": 2},
    ],
    ids=str,
)  # fmt: skip
def test_layers_with_an_indexer_are_those_of_transformers(fields):
    types = transformers.GlmMoeDsaConfig(num_hidden_layers=9, **fields).indexer_types
    own = layers_with_indexer(HFConfig({"num_hidden_layers": 9, **fields}))
    assert sorted(own) == [index for index in range(9) if types[index] == "full"]


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"indexer_types": ["full"] * 3}, "indexer_types is .*expected 'full' or 'shared' .* for each of 4 layers"),
        ({"indexer_types": ["full", "none"] * 2}, "indexer_types is .*'none'"),
        ({"index_topk_pattern": "FSX-"}, "index_topk_pattern is 'FSX-'"),
    ],
)
def test_layers_of_no_known_kind_are_refused(fields, reason):
    with pytest.raises(ConfigError, match=reason):
        layers_with_indexer(HFConfig({"num_hidden_layers": 4, **fields}))
