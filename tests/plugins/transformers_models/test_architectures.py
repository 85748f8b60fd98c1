"""Logits of small models equal transformers', in chunks beside another request; the whole sweep is tests/tools/sweep_transformers.py."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from pelton_e2e import make_prompts
from pelton_small_models import HABITS, VOCAB_SIZE, make_small
from safetensors.torch import load_file, save_file

import pelton_backends.sdpa.plugin
import pelton_plugins.transformers_models.plugin
from pelton.errors import ConfigError
from pelton.testing.model_driver import ModelDriver
from pelton.testing.plugins import plugins_of


@pytest.fixture(scope="module")
def plugins():
    return plugins_of(pelton_backends.sdpa.plugin, pelton_plugins.transformers_models.plugin)


def reference(path, ids):
    [name] = json.loads((Path(path) / "config.json").read_text())["architectures"]
    kind = getattr(transformers, name)
    model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def check(path, plugins):
    prompt, other = make_prompts(VOCAB_SIZE, (50, 9))
    driver = ModelDriver(path, plugins=plugins)
    steps = [
        driver.step({"a": prompt[:30]}),
        driver.step({"a": prompt[30:48], "b": other}),
        driver.step({"a": prompt[48:49]}),
        driver.step({"a": prompt[49:]}, num_padding=3),
    ]
    expected = reference(path, prompt)
    torch.testing.assert_close(torch.cat([step["a"] for step in steps]), expected, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(steps[1]["b"], reference(path, other), atol=2e-3, rtol=1e-3)
    assert expected.std() > 0.1


@pytest.mark.parametrize(
    "model_type, changes",
    [
        ("apertus", {}),  # an activation with parameters
        ("axk1", {}),  # latent attention, experts in groups
        ("mimo_v2_flash", {}),  # values wider than keys, sinks, windows
        ("dbrx", {}),  # queries, keys and values are clipped; experts read values on the host
        ("olmo", HABITS["clipped"]),  # in place
        ("longcat_flash", {}),  # two attentions in a layer's module
        ("laguna", {}),  # layers with other numbers of heads
        ("biogpt", {}),  # learned positions
        ("sarvam_moe", {}),  # tensors that are cut
    ],
)
def test_logits_equal_transformers(tmp_path, plugins, model_type, changes):
    check(make_small(tmp_path, model_type, **changes), plugins)


def test_a_type_that_has_anothers_class_goes_by_its_own_name_too(tmp_path, plugins):
    """transformers builds LlamaForCausalLM for it, under other names of tensors."""
    path = Path(make_small(tmp_path, "exaone"))
    [prompt] = make_prompts(VOCAB_SIZE, (20,))
    expected = reference(path, prompt)
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, "architectures": ["ExaoneForCausalLM"]}))
    got = ModelDriver(path, plugins=plugins).step({"a": prompt})["a"]
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=1e-3)
    (path / "config.json").write_text(json.dumps({**fields, "architectures": ["OtherForCausalLM"]}))
    with pytest.raises(ConfigError, match="no causal language model of that name for model_type 'exaone'"):
        ModelDriver(path, plugins=plugins)


@pytest.mark.parametrize("model_type", ["glm4_moe_lite", "exaone_moe"])
def test_tensors_that_transformers_leaves_are_left(tmp_path, plugins, model_type):
    """Of layers that predict further tokens: by their number, or by a name that the model's class has."""
    path = Path(make_small(tmp_path, model_type))
    tensors, fields = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    layer = "mtp.layers.0" if model_type == "exaone_moe" else f"model.layers.{fields['num_hidden_layers']}"
    unread = {f"{layer}.{name}.weight": torch.ones(4, 4) for name in ("eh_proj", "mlp.experts.0.gate_proj")}
    save_file(tensors | unread, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(fields | {"num_nextn_predict_layers": 1}))
    check(str(path), plugins)


@pytest.mark.parametrize("model_type", ["glm4v", "qwen2_audio", "deepseek_vl_hybrid"])
def test_the_text_of_models_that_read_images_or_sound(tmp_path, plugins, model_type):
    path = make_small(tmp_path, model_type, reads_more=True)
    check(path, plugins)
    model = ModelDriver(path, plugins=plugins).model
    unused = [
        one for name, one in model.named_parameters() if "tower" in name or "visual" in name or "vision_model" in name
    ]
    assert unused and all(one.numel() == 0 for one in unused)


@pytest.mark.parametrize(
    "model_type, why",
    [
        ("bart", r"BartForCausalLM \(model.decoder, BartDecoder\) .*place in the batch"),
        ("roberta", r"RobertaForCausalLM \(roberta, RobertaModel\) .*do not begin at 0"),
        ("doge", r"\(model.layers.0.self_attn, DogeAttention\) .*mask of its own"),
        ("minimax_m3_vl_text", r"\(model.layers.1.self_attn, MiniMaxM3VLAttention\) .*'block_indices'"),
        ("jetmoe", r"\(model.layers.0.self_attention, JetMoeAttention\) .*shapes alone"),
        ("inkling_text", r"\(model.layers.0.self_attn.k_sconv.conv1d, Conv1d\) .*a convolution over tokens"),
        ("mpt", r"\(transformer.blocks.0.attn, MptAttention\) .*does not go through"),
    ],
)
def test_says_which_module_and_why(tmp_path, plugins, model_type, why):
    path = make_small(tmp_path, model_type)
    with pytest.raises(ConfigError, match=why) as refused:
        ModelDriver(path, plugins=plugins)
    assert "\n" not in str(refused.value)


def test_a_model_that_pools_is_checked_too(tmp_path):
    from pelton import LLM

    settings = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "kv_cache_memory_bytes": 2**22}
    with pytest.raises(ConfigError, match=r"\(model.decoder, BartDecoder\) .*place in the batch"):
        LLM(model=make_small(tmp_path, "bart"), runner="pooling", disable_log_stats=True, **settings)
