"""A model that cannot run says which module, and why; every other one of a kind is left alone."""

import json
import subprocess
import sys

import pytest
import torch
from pelton_transformers import make_checkpoint

import pelton_backends.sdpa.plugin
import pelton_plugins.models.plugin
import pelton_plugins.transformers_models.plugin
from pelton.errors import ConfigError
from pelton.testing.model_driver import ModelDriver
from pelton.testing.models import make_tiny_checkpoint
from pelton.testing.plugins import plugins_of


@pytest.fixture(scope="module")
def plugins():
    return plugins_of(pelton_backends.sdpa.plugin, pelton_plugins.transformers_models.plugin)


def fields_of(model_type, **overrides):
    """config.json of a small model, without weights."""
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **overrides)
    fields = json.loads(config.to_json_string(use_diff=False))
    known = transformers.MODEL_MAPPING_NAMES if hasattr(transformers, "MODEL_MAPPING_NAMES") else {}
    name = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return {**fields, "architectures": [name.__name__ if name else known.get(model_type, "UnknownModel")]}


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
}


@pytest.mark.parametrize(
    "model_type, overrides, why",
    [
        ("bloom", {}, "BloomForCausalLM .*does not go through transformers' attention interface"),
        # Newer versions of transformers have shapes there that end the trace before.
        (
            "gptj",
            {"n_layer": 2},
            "GPTJForCausalLM .*(does not go through transformers' attention interface|shapes alone)",
        ),
        ("falcon", {"alibi": True}, "FalconForCausalLM .*ALiBi"),
        ("mamba", {}, "MambaForCausalLM .*state"),
        ("jamba", {}, "JambaForCausalLM .*state"),
        ("diffllama", {"num_key_value_heads": 2}, r"\(model.layers.0.self_attn, DiffLlamaAttention\) .*more than once"),
        ("gemma3n_text", {}, "num_kv_shared_layers"),
        (
            "bert",
            {"is_decoder": False},
            r"\(bert.encoder.layer.0.attention.self, BertSelfAttention\) .*later tokens too",
        ),
        (
            "llama4_text",
            {"attention_chunk_size": 16, "num_local_experts": 2},
            "Llama4TextAttention.*its attention mask follows from the tokens",
        ),
        ("t5", {}, "an encoder with a decoder"),
    ],
)
def test_says_which_module_and_why(plugins, model_type, overrides, why):
    fields = fields_of(model_type, **({} if model_type == "t5" else {**SMALL, **overrides}))
    with pytest.raises(ConfigError, match=rf"(?s){why}"):
        ModelDriver(hf_config=fields, weights=[], plugins=plugins, num_blocks=4)


def test_a_mask_that_is_neither_causal_nor_a_window_is_refused_where_attention_gets_it(plugins, monkeypatch):
    from transformers.masking_utils import create_causal_mask
    from transformers.models.olmo import modeling_olmo

    def ahead(batch, head, query, key):
        return key <= query + 1

    def other_mask(**options):
        return create_causal_mask(**options, or_mask_function=ahead)

    monkeypatch.setattr(modeling_olmo, "create_causal_mask", other_mask)
    with pytest.raises(
        ConfigError, match=r"OlmoAttention\) .*its attention mask is neither causal nor a sliding window"
    ):
        ModelDriver(hf_config=fields_of("olmo", **SMALL), weights=[], plugins=plugins, num_blocks=4)


def test_an_unknown_model_names_its_type(plugins):
    with pytest.raises(
        ConfigError, match=r"architecture 'OwnForCausalLM', and transformers .* knows no model_type 'own'"
    ):
        ModelDriver(hf_config={"architectures": ["OwnForCausalLM"], "model_type": "own"}, weights=[], plugins=plugins)


def test_numbers_that_json_lacks_are_read(plugins):
    """transformers writes Infinity as an object, and reads no such object where a number must be."""
    fields = fields_of("olmo", **SMALL)
    with pytest.raises(ConfigError, match="missing"):  # no weights: the fields were read
        ModelDriver(hf_config={**fields, "clip_qkv": {"__float__": "Infinity"}}, weights=[], plugins=plugins)


def test_frequencies_that_follow_the_length_need_a_bound(plugins, tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    path = make_checkpoint(tmp_path, "glm", rope_parameters={**rope, "partial_rotary_factor": 0.5})
    with pytest.raises(ConfigError, match="set max_model_len to 512"):
        ModelDriver(path, plugins=plugins, max_model_len=1024)


def test_a_checkpoint_that_lacks_a_tensor_says_so(plugins, tmp_path):
    from pelton.testing.model_driver import checkpoint_weights

    path = make_checkpoint(tmp_path, "phi3")
    weights = [(name, weight) for name, weight in checkpoint_weights(path) if "layers.1.mlp.down_proj" not in name]
    with pytest.raises(ConfigError, match=r"missing model\.layers\.1\.mlp\.down_proj\.weight"):
        ModelDriver(path, weights=weights, plugins=plugins)


@pytest.mark.usefixtures("script_forks")
def test_models_of_our_own_do_not_import_transformers(tmp_path):
    path = make_tiny_checkpoint(tmp_path, "llama")
    script = (
        "import sys; from pelton import LLM, SamplingParams\n"
        f"with LLM(model={str(path)!r}, max_model_len=64, kv_cache_memory_bytes=2**20, disable_log_stats=True) as llm:\n"
        "    llm.generate('a', SamplingParams(max_tokens=2), use_tqdm=False)\n"
        "sys.exit('transformers' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_setting_names_whose_modules(tmp_path):
    from pelton import LLM

    path = make_tiny_checkpoint(tmp_path, "llama", with_tokenizer=False)
    small = {
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "kv_cache_memory_bytes": 2**20,
        "disable_log_stats": True,
    }
    with pytest.raises(ConfigError, match=r"model_impl is 'thunder'; there is auto, pelton, transformers\."):
        LLM(model=str(path), model_impl="thunder", **small)
    other = make_checkpoint(tmp_path / "stablelm", "stablelm")
    for name in ("pelton", "vllm"):
        with pytest.raises(ConfigError, match="No model plugin offers architecture 'StableLmForCausalLM'"):
            LLM(model=other, model_impl=name, **small)


def test_any_model_of_ours_runs_on_transformers_modules_too(plugins, tmp_path):
    path = make_tiny_checkpoint(tmp_path, "gemma3", with_tokenizer=False)
    ids = torch.randint(5, 320, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    ours = plugins_of(pelton_backends.sdpa.plugin, pelton_plugins.models.plugin)
    one, two = (ModelDriver(path, plugins=each).step({"a": ids})["a"] for each in (plugins, ours))
    torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)
