"""The rope table equals transformers' for every scaling and both forms of config.json."""

import pytest
import torch

import pelton_backends.sdpa.plugin
import pelton_plugins.models.plugin
from pelton.errors import ConfigError
from pelton.layers.rope import cos_sin_table, get_rope, rope_parameters
from pelton.model.build import HFConfig
from pelton.testing.model_driver import ModelDriver, make_test_build
from pelton.testing.models import (
    ROPE_VARIANTS,
    load_reference,
    make_tiny_checkpoint,
    reference_greedy,
    reference_logits,
)
from pelton.testing.plugins import plugins_of

PLUGINS = plugins_of(pelton_backends.sdpa.plugin, pelton_plugins.models.plugin)
VARIANTS = {
    **ROPE_VARIANTS,
    "yarn-given-scale": {**ROPE_VARIANTS["yarn"], "attention_factor": 1.25, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn-mscale": {**ROPE_VARIANTS["yarn"], "mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False},
    "default": {"rope_type": "default", "rope_theta": 5e5},
}


def transformers_table(parameters, length, **fields):
    """[length, dim] of transformers' Llama rotary module."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=dict(parameters), **fields)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)


@pytest.mark.parametrize("parameters", VARIANTS.values(), ids=VARIANTS)
def test_table_equals_transformers(parameters):
    hf = HFConfig({"rope_parameters": parameters, "max_position_embeddings": 512})
    table = cos_sin_table(rope_parameters(hf, 16), 512)
    torch.testing.assert_close(
        table, transformers_table(parameters, 512, max_position_embeddings=512), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("parameters", VARIANTS.values(), ids=VARIANTS)
def test_the_older_form_of_config_json_means_the_same(parameters):
    old = {key: value for key, value in parameters.items() if key not in ("rope_type", "rope_theta")}
    fields = {"rope_theta": parameters["rope_theta"], "rope_scaling": {"type": parameters["rope_type"], **old}}
    new = HFConfig({"rope_parameters": parameters, "max_position_embeddings": 512})
    assert rope_parameters(HFConfig({**fields, "max_position_embeddings": 512}), 16) == rope_parameters(new, 16)


@pytest.mark.parametrize("variant", ROPE_VARIANTS)
def test_model_logits_equal_transformers(tmp_path, variant):
    path = make_tiny_checkpoint(tmp_path, "llama", with_tokenizer=False, rope_parameters=dict(ROPE_VARIANTS[variant]))
    ids = torch.randint(5, 320, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    driver = ModelDriver(path, plugins=PLUGINS)
    got = torch.cat([driver.step({"a": part})["a"] for part in (ids[:130], ids[130:199], ids[199:])])
    torch.testing.assert_close(got, reference_logits(load_reference(path), ids), atol=2e-4, rtol=1e-4)


def test_dynamic_scaling_follows_a_decode_past_the_trained_length(tmp_path):
    fields = {"rope_parameters": dict(ROPE_VARIANTS["dynamic"]), "max_position_embeddings": 32}
    path = make_tiny_checkpoint(tmp_path, "llama", with_tokenizer=False, **fields)
    prompt = list(range(5, 33))
    want = reference_greedy(load_reference(path), [prompt], 30)[0]
    driver = ModelDriver(path, plugins=PLUGINS, max_model_len=64)
    got, tokens = [], prompt
    for _ in range(30):
        tokens = [int(driver.step({"a": tokens})["a"][-1].argmax())]
        got += tokens
    assert got == want
    # The table at those positions is not the unscaled one.
    table = cos_sin_table(rope_parameters(driver.build.hf, 16), 64)
    plain = cos_sin_table(rope_parameters(HFConfig({"rope_theta": 10000.0}), 16), 64)
    assert torch.allclose(table[:32], plain[:32], atol=1e-6) and not torch.allclose(table[40:], plain[40:], atol=1e-2)


def test_dynamic_scaling_does_not_depend_on_chunks(tmp_path):
    fields = {"rope_parameters": dict(ROPE_VARIANTS["dynamic"]), "max_position_embeddings": 32}
    path = make_tiny_checkpoint(tmp_path, "llama", with_tokenizer=False, **fields)
    ids = list(range(5, 65))
    whole = ModelDriver(path, plugins=PLUGINS, max_model_len=64).step({"a": ids})["a"]
    driver = ModelDriver(path, plugins=PLUGINS, max_model_len=64)
    parts = torch.cat([driver.step({"a": part})["a"] for part in (ids[:20], ids[20:50], ids[50:])])
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)


def test_layers_with_equal_parameters_share_one_table():
    hf = {
        "max_position_embeddings": 64,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    build = make_test_build(hf, PLUGINS)
    full, local = (get_rope(build, 16, layer_type=t) for t in ("full_attention", "sliding_attention"))
    assert full is get_rope(build, 16, layer_type="full_attention")
    assert full is not local and len(build.ropes) == 2
    assert (full.parameters.theta, full.parameters.factor, local.parameters.theta) == (1e6, 8.0, 1e4)


def test_part_of_a_head_may_be_rotated():
    hf = HFConfig({"partial_rotary_factor": 0.5, "rope_theta": 1e4})
    assert cos_sin_table(rope_parameters(hf, 16), 4).shape == (4, 8)


@pytest.mark.parametrize(
    "scaling, message",
    [
        ({"rope_type": "longrope", "factor": 2.0}, "rope_type is 'longrope'; this version has default, linear"),
        ({"rope_type": "linear"}, "rope_type 'linear' needs a factor"),
    ],
)
def test_a_scaling_that_cannot_be_done_is_named(scaling, message):
    with pytest.raises(ConfigError, match=message):
        rope_parameters(HFConfig({"rope_scaling": scaling}), 16)
