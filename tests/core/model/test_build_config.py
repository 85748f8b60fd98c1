"""The object that layers are made from, built from settings."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import pelton_backends.sdpa.plugin
import pelton_plugins.models.plugin
from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.model.build import make_build_config
from pelton.model.registry import build_model
from pelton.model.resolved import ResolvedModel
from pelton.parallel.context import ParallelContext
from pelton.testing.plugins import plugins_of

PLUGINS = plugins_of(pelton_backends.sdpa.plugin, pelton_plugins.models.plugin)
FIELDS = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


def resolved(**hf):
    return ResolvedModel(
        name="m", path="/m", weights_format="dummy", hf_config=FIELDS | hf, architecture="LlamaForCausalLM",
        dtype="bfloat16", max_model_len=64, vocab_size=40, eos_token_ids=[], generation_config={}, tokenizer_path=None,
    )  # fmt: skip


def make(model=None, **flat):
    return make_build_config(
        EngineConfig.from_flat(**flat), model or resolved(), PLUGINS, device=torch.device("cpu"), max_num_seqs=4,
        max_num_batched_tokens=32,
    )  # fmt: skip


def test_settings_reach_the_layers():
    build = make(block_size=8, kv_cache_dtype="float32", attention_backend="TORCH_SDPA")
    model = build_model(build, "LlamaForCausalLM", PLUGINS)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and not model.training
    layer = build.attention_layers["model.layers.1.self_attn.attn"]
    assert (layer.kv_spec().block_size, layer.kv_spec().dtype, layer.needs.dtype) == (8, "float32", "bfloat16")
    assert (layer.num_kv_heads, layer.head_dim, layer.selection.reason) == (4, 8, "named in the settings")
    assert {choice.op for choice in build.ops.choices} == {
        "embed", "add_norm_linear", "qk_norm_rope_write_kv", "linear", "add_norm_gated_linear", "add_norm_logits",
        "add_norm", "gated",
    }  # fmt: skip


@pytest.mark.parametrize("num_ranks, has_adapters, is_told", [(1, False, False), (2, False, True), (2, True, False)])
def test_a_sub_layers_last_matrix_knows_who_sums_its_rows(num_ranks, has_adapters, is_told, monkeypatch):
    """They go to the next norm as they are, but where adapters are added to them first, and with one rank, where there is no sum."""
    build = make()
    build.parallel = ParallelContext(0, num_ranks)
    if has_adapters:
        build.adapters = SimpleNamespace(add=lambda *args, **kwargs: None, refuse=lambda *args: None)
    told, bind = [], build.ops.bind

    def noted(op, needs, tensors):
        if op == "linear":
            told.append(tensors.reduce is not None)
        return bind(op, needs, tensors)

    monkeypatch.setattr(build.ops, "bind", noted)
    build_model(build, "LlamaForCausalLM", PLUGINS)
    assert sum(told) == (4 if is_told else 0), "O and down of two layers"


def test_expected_weights_are_known_before_loading():
    build = make()
    build_model(build, "LlamaForCausalLM", PLUGINS)
    expected = build.weights.expected()
    assert expected["model.layers.0.self_attn.k_proj.weight"] == (32, 32)
    assert expected["lm_head.weight"] == (40, 32) and len(expected) == 2 * 9 + 3


def test_a_backend_that_is_not_there_is_named():
    with pytest.raises(
        ConfigError, match=r"attention_backend is 'FLASHINFER'; for this model and device there is sdpa\."
    ):
        build_model(make(attention_backend="FLASHINFER"), "LlamaForCausalLM", PLUGINS)


@pytest.mark.parametrize("model, flat", [(resolved(), {"quantization": "awq"}),
                                         (resolved(quantization_config={"quant_method": "awq"}), {})])  # fmt: skip
def test_quantized_weights_are_refused_by_method(model, flat):
    with pytest.raises(ConfigError, match=r"quantization (\(config.json's quant_method\) )?is 'awq'; available: none"):
        make(model, **flat)


def test_a_quantized_checkpoint_is_not_quantized_again():
    with pytest.raises(ConfigError, match="quantization is 'q8_0', and the checkpoint is quantized by 'awq'"):
        make(resolved(quantization_config={"quant_method": "awq"}), quantization="q8_0")


@pytest.mark.parametrize("hidden_act", ["relu2"])
def test_an_activation_that_is_not_there_is_named(hidden_act):
    with pytest.raises(ConfigError, match="hidden_act is 'relu2'; gated layers have silu"):
        build_model(make(resolved(hidden_act=hidden_act)), "LlamaForCausalLM", PLUGINS)


@pytest.mark.parametrize(
    "module",
    [
        "pelton_backends.sdpa.plugin",
        "pelton_plugins.models.plugin",
        "pelton.attention.selector",
        "pelton.ops.selector",
        "pelton.parallel.context",
    ],
)
def test_what_lists_and_chooses_does_without_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0
