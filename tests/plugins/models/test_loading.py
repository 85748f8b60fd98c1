"""What the models read of a checkpoint, and what they say when it does not fit."""

import json

import pytest
import torch

from pelton.errors import ConfigError
from pelton.testing.model_driver import ModelDriver, TensorWeight, checkpoint_weights
from pelton.testing.models import load_reference, make_tiny_checkpoint, reference_logits
from pelton_plugins.models import axk2, hy_v4, mistral_large4
from pelton_plugins.models.stacked_experts import one_for_each_expert

OWN_NAMES = {"axk2": axk2.own_names, "hy_v4": hy_v4.own_names, "mistral_large4": mistral_large4.own_names}
"""Families that transformers saves by released names, one with a part for images."""


class CountingWeight(TensorWeight):
    """Keeps how many numbers were read."""

    def __init__(self, tensor, counts):
        super().__init__(tensor)
        self.counts = counts

    def read(self, dim=None, start=0, stop=None):
        part = super().read(dim, start, stop)
        self.counts.append(part.numel())
        return part


def test_every_checkpoint_name_is_used_once(checkpoint, family, make_driver):
    driver = make_driver(checkpoint)
    weights = dict(checkpoint_weights(checkpoint))
    if family == "llama4":  # whose experts are one tensor a matrix
        weights = dict(one_for_each_expert(weights.items(), driver.build.weights.expected(), is_transposed=True))
    if family in OWN_NAMES:
        weights = dict(one_for_each_expert(OWN_NAMES[family](weights.items()), driver.build.weights.expected()))
        weights = {name: one for name, one in weights.items() if not driver.build.weights.ignores(name)}
    assert driver.used_weights == set(weights)
    assert driver.build.weights.expected() == {name: tuple(weight.shape) for name, weight in weights.items()}


def test_weights_are_read_once_and_never_in_whole_under_tensor_parallelism(tmp_path, make_driver, model_plugins):
    from pelton.model.registry import build_model
    from pelton.parallel.context import ParallelContext
    from pelton.testing.model_driver import make_test_build

    path = make_tiny_checkpoint(tmp_path, "llama", with_tokenizer=False)
    build = make_test_build(
        json.loads((path / "config.json").read_text()), model_plugins, parallel=ParallelContext(1, 2)
    )
    counts = []
    weights = [(name, CountingWeight(weight.tensor, counts)) for name, weight in checkpoint_weights(path)]
    matrices = sum(weight.tensor.numel() for _, weight in weights if len(weight.shape) == 2)
    norms = sum(weight.tensor.numel() for _, weight in weights if len(weight.shape) == 1)
    build_model(build, "LlamaForCausalLM", model_plugins).load_weights(weights)
    assert len(counts) == len(weights)
    assert sum(counts) == matrices / 2 + norms


@pytest.mark.parametrize(
    "change, message",
    [
        pytest.param(lambda w: w.pop("model.layers.1.mlp.up_proj.weight"),
                     r"missing model\.layers\.1\.mlp\.up_proj\.weight", id="missing"),
        pytest.param(lambda w: w.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(1)}),
                     r"unexpected model\.layers\.9\.mlp\.up_proj\.weight \(near to", id="unexpected"),
        pytest.param(lambda w: w.update({"model.norm.weight": torch.zeros(65)}),
                     r"model\.norm\.weight is \[65\]; config\.json makes it \[64\]", id="misshapen"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_named(tmp_path, make_driver, change, message):
    path = make_tiny_checkpoint(tmp_path, "llama", with_tokenizer=False)
    driver = make_driver(path)
    tensors = {name: weight.tensor for name, weight in checkpoint_weights(path)}
    change(tensors)
    with pytest.raises(ConfigError, match=message):
        driver.model.load_weights((name, TensorWeight(tensor)) for name, tensor in tensors.items())


def test_a_tied_copy_of_the_head_and_old_rope_buffers_are_skipped(tmp_path, make_driver):
    driver = make_driver(make_tiny_checkpoint(tmp_path, "llama", with_tokenizer=False))
    extra = {"lm_head.weight": torch.zeros(320, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    weights = {n: w.tensor for n, w in checkpoint_weights(tmp_path)} | extra
    assert not driver.model.load_weights((n, TensorWeight(t)) for n, t in weights.items()) & extra.keys()


@pytest.mark.parametrize(
    "family, fields",
    [
        pytest.param("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}, id="llama-untied-biases"),
        pytest.param("llama", {"num_key_value_heads": 4, "head_dim": None, "hidden_act": "gelu"}, id="llama-mha-gelu"),
        pytest.param("mistral", {"sliding_window": None}, id="mistral-without-window"),
        pytest.param("qwen2", {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 20,
                               "max_window_layers": 2}, id="qwen2-tied-upper-layers-windowed"),
        pytest.param("qwen3", {"attention_bias": True, "num_key_value_heads": 2}, id="qwen3-biases"),
        pytest.param("gemma3", {"final_logit_softcapping": 8.0, "attn_logit_softcapping": None, "num_hidden_layers": 2,
                                "layer_types": ["full_attention", "sliding_attention"]}, id="gemma3-final-soft-cap"),
    ],
)  # fmt: skip
def test_variants_of_a_family_equal_transformers(tmp_path, make_driver, token_ids, family, fields):
    path = make_tiny_checkpoint(tmp_path, family, with_tokenizer=False, **fields)
    driver = make_driver(path)
    got = torch.cat([driver.step({"a": part})["a"] for part in (token_ids[:41], token_ids[41:42], token_ids[42:50])])
    torch.testing.assert_close(got, reference_logits(load_reference(path), token_ids[:50]), atol=1e-4, rtol=1e-4)


def test_config_json_in_the_older_form_gives_the_same_gemma(tmp_path, make_driver, token_ids):
    path = make_tiny_checkpoint(tmp_path, "gemma3", with_tokenizer=False)
    want = make_driver(path).step({"a": token_ids})["a"]
    fields = json.loads((path / "config.json").read_text())
    for name in ("rope_parameters", "layer_types", "_sliding_window_pattern", "tie_word_embeddings"):
        fields.pop(name)
    fields |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6, "rope_scaling": None}
    (path / "config.json").write_text(json.dumps(fields))
    assert torch.equal(make_driver(path).step({"a": token_ids})["a"], want)


def test_gemma_has_a_window_on_five_layers_of_six(tmp_path, make_driver):
    driver = make_driver(make_tiny_checkpoint(tmp_path, "gemma3", with_tokenizer=False))
    windows = [layer.kv_spec() for layer in driver.build.attention_layers.values()]
    assert [getattr(spec, "sliding_window", None) for spec in windows] == [32, 32, 32, 32, 32, None]
    assert len(driver.backends) == 2


def test_a_missing_field_of_config_json_is_named(tmp_path, make_driver):
    path = make_tiny_checkpoint(tmp_path, "llama", with_tokenizer=False)
    fields = json.loads((path / "config.json").read_text())
    del fields["intermediate_size"]
    (path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"config\.json has no field 'intermediate_size'"):
        make_driver(path)


def test_disabling_the_hybrid_manager_puts_windowed_and_full_layers_in_one_group(
    tmp_path, make_driver, token_ids, monkeypatch
):
    from pelton.kv_cache.spec import FullAttentionSpec
    from pelton.testing import model_driver

    def full_only(build, num_blocks):
        spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_dim=16, dtype="float32")
        names = tuple(build.attention_layers)
        tensors = tuple(model_driver.KVCacheTensor(num_blocks * spec.page_size_bytes, (name,)) for name in names)
        return model_driver.KVCachePlan(num_blocks, tensors, (model_driver.KVCacheGroup(names, spec),))

    path = make_tiny_checkpoint(tmp_path, "gemma3", with_tokenizer=False)
    monkeypatch.setattr(model_driver, "plan_one_group_per_spec", full_only)
    driver: ModelDriver = make_driver(path)
    got = torch.cat([driver.step({"a": part})["a"] for part in (token_ids[:90], token_ids[90:91])])
    torch.testing.assert_close(got, reference_logits(load_reference(path), token_ids[:91]), atol=1e-4, rtol=1e-4)


def test_a_random_checkpoint_of_other_classes_is_one_of_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, Olmo2Config, Olmo2ForCausalLM

    path = make_tiny_checkpoint(
        tmp_path, config_class=Olmo2Config, model_class=Olmo2ForCausalLM, with_tokenizer=False, num_hidden_layers=2
    )
    model = AutoModelForCausalLM.from_pretrained(path)
    assert type(model) is Olmo2ForCausalLM and model.config.num_hidden_layers == 2
    for wrong in ({}, {"family": "llama", "model_class": Olmo2ForCausalLM}, {"config_class": Olmo2Config}):
        with pytest.raises(ValueError, match="either a family, or config_class and model_class"):
            make_tiny_checkpoint(tmp_path / "wrong", **wrong)
