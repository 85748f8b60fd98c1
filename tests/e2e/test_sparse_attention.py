"""Attention to the tokens that an indexer chooses: what of it `test_cache_kinds.py` does not go through.

Indexers of the tiny checkpoints choose 16 tokens of prompts with up to 200. DeepSeek V3.2 has one in each layer, GLM-5 in two of four.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pelton_e2e import Reference, generate, greedy, greedy_reference, make_llm, make_prompts, references_in
from pelton_small_models import make_small
from pelton_stacked import stacked
from safetensors.torch import load_file, save_file

from pelton.errors import ConfigError
from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint
from pelton_plugins.models.mistral_large4 import own_names

NUM_TOKENS = 17
LENGTHS = (3, 17, 40, 90, 200)
TOP_K = 16


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    return references_in(tmp_path_factory, NUM_TOKENS, LENGTHS)


@pytest.fixture
def reference(made: Callable[[str], Reference]) -> Reference:
    found = made("deepseek_v32")
    assert found.min_top2_gap > 1e-4
    return found


@pytest.fixture
def glm(made: Callable[[str], Reference]) -> Reference:
    found = made("glm_moe_dsa")
    assert found.min_top2_gap > 1e-4
    return found


@pytest.mark.parametrize(
    "family, top_k", [("deepseek_v32", 8), ("deepseek_v32", 32), ("deepseek_v32", 512), ("glm_moe_dsa", 32)]
)
def test_another_number_of_chosen_tokens_gives_other_ids(
    made: Callable[[str], Reference], family: str, top_k: int
) -> None:
    """So the choice of `test_ids_equal_transformers` counts. With as many tokens as are chosen or fewer, nothing changes."""
    reference = made(family)
    with make_llm(reference.path, hf_overrides={"index_topk": top_k}) as llm:
        found = generate(llm, reference.prompts, greedy(NUM_TOKENS))
    assert all(own != ids for own, ids in zip(found[1:], reference.outputs[1:], strict=True))
    seen = max(min(top_k, TOP_K) - LENGTHS[0], 1)  # tokens from contexts that either choice has all of
    assert found[0][:seen] == reference.outputs[0][:seen]


def test_all_tokens_chosen_is_transformers_with_all(tmp_path: Any) -> None:
    path = str(make_tiny_checkpoint(tmp_path, "deepseek_v32", with_tokenizer=False, index_topk=300))
    prompts = make_prompts(VOCAB_SIZE, LENGTHS)
    expected, _ = greedy_reference(path, prompts, NUM_TOKENS)
    with make_llm(path, max_num_batched_tokens=48) as llm:
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == expected


def test_the_indexers_keys_take_the_bytes_of_their_own_layers(reference: Reference) -> None:
    """48 numbers of a latent and 24 of an indexer's key for each token and layer."""
    with make_llm(reference.path, kv_cache_memory_bytes=4 * 16 * (48 + 24) * 4 * 100) as llm:
        assert llm.llm_engine.info.num_blocks == 100


def test_layers_without_an_indexer_keep_no_keys_of_one(glm: Reference) -> None:
    with make_llm(glm.path, kv_cache_memory_bytes=16 * (4 * 48 + 2 * 24) * 4 * 100) as llm:
        assert llm.llm_engine.info.num_blocks == 100


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"indexer_rope_interleave": False}, id="rope-by-halves"),
        pytest.param({"indexer_types": None}, id="an-indexer-in-each-layer"),
    ],
)
def test_what_glm_has_else_than_deepseek_counts(glm: Reference, fields: dict[str, Any], tmp_path: Path) -> None:
    path = _changed(glm, tmp_path, fields)
    if "indexer_types" in fields:
        tensors = load_file(path / "model.safetensors")
        own = {name: tensor for name, tensor in tensors.items() if ".indexer." in name}
        for layer in (0, 2):
            tensors |= {
                name.replace(f".{layer}.", f".{layer + 1}.", 1): t.clone()
                for name, t in own.items()
                if f"layers.{layer}." in name
            }
        save_file(tensors, path / "model.safetensors")
    with make_llm(str(path)) as llm:
        assert generate(llm, glm.prompts[1:], greedy(NUM_TOKENS)) != glm.outputs[1:]


def test_glm_as_it_is_released(glm: Reference, tmp_path: Path) -> None:
    """Other fields, a layer that predicts further tokens, indexers in layers that do not read them; experts in one tensor a matrix."""
    known = {
        "indexer_types": None, "mlp_layer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 1, "num_nextn_predict_layers": 1,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "indexer_rope_interleave": True, "rope_interleave": True,
    }  # fmt: skip
    path = _changed(glm, tmp_path, known)
    tensors = load_file(path / "model.safetensors")
    assert "model.layers.1.mlp.experts.0.up_proj.weight" in tensors
    unread = {f"model.layers.{name}.weight": torch.ones(4) for name in ("1.self_attn.indexer.wk", "4.eh_proj")}
    for some in (tensors, stacked(tensors)):
        save_file(some | unread, path / "model.safetensors")
        with make_llm(str(path), max_num_batched_tokens=48) as llm:
            assert generate(llm, glm.prompts, greedy(NUM_TOKENS)) == glm.outputs


def _changed(reference: Reference, tmp_path: Path, fields: dict[str, Any]) -> Path:
    """The checkpoint with other fields; None takes one away."""
    path = tmp_path / "changed"
    shutil.copytree(reference.path, path)
    old = json.loads((path / "config.json").read_text())
    new = {name: value for name, value in {**old, **fields}.items() if value is not None or name not in fields}
    (path / "config.json").write_text(json.dumps(new))
    return path


@pytest.fixture
def mistral(made: Callable[[str], Reference]) -> Reference:
    found = made("mistral_large4")
    assert found.min_top2_gap > 1e-4
    return found


@pytest.mark.parametrize(
    "family, settings",
    [
        pytest.param(
            "mistral_large4", {"tensor_parallel_size": 2, "max_num_batched_tokens": 48}, id="mistral-tensor-parallel"
        ),
        pytest.param(
            "mistral_large4", {"pipeline_parallel_size": 2, "pipeline_layer_partition": [4, 1]}, id="mistral-stages"
        ),
        pytest.param("hy_v4", {"tensor_parallel_size": 2, "max_num_batched_tokens": 48}, id="hy-tensor-parallel"),
        pytest.param("hy_v4", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, id="hy-stages-of-two-ranks"),
    ],
)
def test_over_ranks(made: Callable[[str], Reference], family: str, settings: dict[str, Any]) -> None:
    reference = made(family)
    with make_llm(reference.path, **settings) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


@pytest.fixture
def hy(made: Callable[[str], Reference]) -> Reference:
    found = made("hy_v4")
    assert found.min_top2_gap > 1e-4
    return found


@pytest.mark.parametrize(
    "name", ["learnable_sink_param", "attn.linear_gate.weight", "attn_layer.hc_fn", "hc_head_base"]
)
def test_what_hy_has_learned_counts(hy: Reference, name: str, tmp_path: Path) -> None:
    path = _changed(hy, tmp_path, {})
    tensors = load_file(path / "model.safetensors")
    assert any(one.endswith(name) for one in tensors)
    changed = {one: t * -2.0 if one.endswith(name) else t for one, t in tensors.items()}
    save_file(changed, path / "model.safetensors")
    with make_llm(str(path)) as llm:
        assert generate(llm, hy.prompts[1:], greedy(NUM_TOKENS)) != hy.outputs[1:]


@pytest.mark.parametrize("fields", [{"swiglu_limit": 10.0}, {"hc_magnitude": 1.0}, {"rope_interleave": True}], ids=str)
def test_what_hy_has_else_than_deepseek_counts(hy: Reference, fields: dict[str, Any]) -> None:
    with make_llm(hy.path, hf_overrides=fields) as llm:
        assert generate(llm, hy.prompts[1:], greedy(NUM_TOKENS)) != hy.outputs[1:]


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"swiglu_limit": 0.0}, "swiglu_limit is 0.0, and this model's experts clamp"),
        ({"attention_bias": True}, "attention_bias is True; this model has False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; this model has 'silu'"),
    ],
)
def test_what_is_refused_of_hy(hy: Reference, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_llm(hy.path, hf_overrides=fields)


@pytest.fixture
def ax(made: Callable[[str], Reference]) -> Reference:
    found = made("axk2")
    assert found.min_top2_gap > 1e-4
    return found


@pytest.mark.parametrize(
    "name", ["layers.2.input_layernorm.W_up.weight", "layers.1.post_attention_layernorm.W_down.weight"]
)
def test_what_gates_norms_of_ax_counts(ax: Reference, name: str, tmp_path: Path) -> None:
    path = _changed(ax, tmp_path, {})
    tensors = load_file(path / "model.safetensors")
    tensors[f"model.{name}"] *= -2.0
    save_file(tensors, path / "model.safetensors")
    with make_llm(str(path)) as llm:
        assert generate(llm, ax.prompts[1:], greedy(NUM_TOKENS)) != ax.outputs[1:]


def test_ax_by_the_names_of_transformers(ax: Reference, tmp_path: Path) -> None:
    names = {
        "layernorm.W_down.": "layernorm.mlp.fc1.",
        "layernorm.W_up.": "layernorm.mlp.fc2.",
        ".q_b_proj.": ".q_gate_proj.",
    }
    path, own = _changed(ax, tmp_path, {}), {}
    for name, tensor in load_file(path / "model.safetensors").items():
        for saved, other in names.items():
            name = name.replace(saved, other)
        own[name] = tensor
    assert "model.layers.0.self_attn.q_gate_proj.weight" in own
    save_file(stacked(own), path / "model.safetensors")
    with make_llm(str(path)) as llm:
        assert generate(llm, ax.prompts, greedy(NUM_TOKENS)) == ax.outputs


def test_groups_of_ax(tmp_path: Path) -> None:
    """Experts of groups that are not chosen count as 0 in transformers: a correction below 0 might choose them."""
    path = make_tiny_checkpoint(tmp_path / "groups", "axk2", with_tokenizer=False, n_group=4, topk_group=2)
    with pytest.raises(ConfigError, match="e_score_correction_bias has so many numbers below 0"):
        make_llm(str(path))
    tensors = load_file(path / "model.safetensors")
    changed = {name: t.abs() if name.endswith("correction_bias") else t for name, t in tensors.items()}
    save_file(changed, path / "model.safetensors", metadata={"format": "pt"})
    prompts = make_prompts(VOCAB_SIZE, LENGTHS)
    expected, gap = greedy_reference(str(path), prompts, NUM_TOKENS)
    assert gap > 1e-4
    with make_llm(str(path), max_num_batched_tokens=48) as llm:
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == expected


def test_a_frequency_of_experts_without_types_of_layers_is_refused(ax: Reference, tmp_path: Path) -> None:
    path = _changed(ax, tmp_path, {"mlp_layer_types": None, "moe_layer_freq": 2})
    with pytest.raises(ConfigError, match="moe_layer_freq is 2; this model has 1"):
        make_llm(str(path))


@pytest.fixture
def dots(made: Callable[[str], Reference]) -> Reference:
    found = made("dots3_note")
    assert found.min_top2_gap > 1e-4
    return found


@pytest.mark.parametrize("window", [23, 25, 512])
def test_the_window_of_dots_counts(dots: Reference, window: int) -> None:
    with make_llm(dots.path, hf_overrides={"sliding_window": window}) as llm:
        found = generate(llm, dots.prompts, greedy(NUM_TOKENS))
    assert found[2:] != dots.outputs[2:]
    assert found[0] == dots.outputs[0], "3 + 17 tokens are in each window"


@pytest.mark.parametrize(
    "name", ["1.self_attn.g_proj", "0.self_attn.k_rope_only_layernorm", "0.self_attn.kv_a_layernorm"]
)
def test_what_dots_has_learned_counts(dots: Reference, name: str, tmp_path: Path) -> None:
    path = _changed(dots, tmp_path, {})
    tensors = load_file(path / "model.safetensors")
    tensors[f"model.layers.{name}.weight"] *= -2.0
    save_file(tensors, path / "model.safetensors")
    with make_llm(str(path)) as llm:
        assert generate(llm, dots.prompts[1:], greedy(NUM_TOKENS)) != dots.outputs[1:]


def test_layers_of_dots_that_predict_further_tokens_stay_in_the_file(dots: Reference, tmp_path: Path) -> None:
    path = _changed(dots, tmp_path, {})
    unread = {f"model.{name}.weight": torch.ones(4) for name in ("layers.5.eh_proj", "mtp.norm")}
    save_file(load_file(path / "model.safetensors") | unread, path / "model.safetensors")
    with make_llm(str(path)) as llm:
        assert generate(llm, dots.prompts[:2], greedy(NUM_TOKENS)) == dots.outputs[:2]


@pytest.mark.parametrize(
    "fields, reason",
    [
        (
            {"layer_types": ["sliding_attention"] * 4},
            "layer_types is .*; expected indexed_attention, .* for each of 5 layers",
        ),
        ({"use_dsa": True}, "config.json has use_dsa, which transformers replaces"),
        (
            {"rope_parameters": {"sliding_attention": None}},
            "rope_parameters is .*; expected one set for sliding_attention",
        ),
        (
            {"head_dim": 48},
            "rope_parameters turn 19 numbers of layer 1 .indexed_attention., whose qk_rope_head_dim is 16",
        ),
        (
            {"per_layer_config": {"2": {"sliding_window": 8}}},
            "another sliding_window for layer 2; this model has one for all, 24",
        ),
        ({"mlp_bias": True}, "mlp_bias is True; this model has False"),
    ],
)
def test_what_is_refused_of_dots(dots: Reference, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_llm(dots.path, hf_overrides=fields)


def test_the_text_of_hy_with_a_part_for_images(tmp_path: Path) -> None:
    """Its pairs that turn lie beside each other, and norms of latents have config.json's eps."""
    path = make_small(tmp_path, "hy_v4_vl", reads_more=True, text_config={"rms_norm_eps": 1e-2, "hc_mult": 2})
    prompts = make_prompts(VOCAB_SIZE, LENGTHS)
    expected, gap = greedy_reference(path, prompts, NUM_TOKENS)
    assert gap > 1e-4
    with make_llm(path, max_num_batched_tokens=48) as llm:
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == expected


def test_mistral_by_the_names_of_transformers(mistral: Reference, tmp_path: Path) -> None:
    """The tiny checkpoint has those of a released one."""
    path = _changed(mistral, tmp_path, {})
    tensors = load_file(path / "model.safetensors")
    assert "layers.2.attention.wkv_b.weight" in tensors
    own = {}
    for name, weight in tensors.items():
        ((name, _),) = own_names([(name, weight)])  # type: ignore[list-item]
        own[name.replace("model.", "model.language_model.", 1)] = weight.clone()
    save_file(stacked(own), path / "model.safetensors")
    with make_llm(str(path)) as llm:
        assert generate(llm, mistral.prompts, greedy(NUM_TOKENS)) == mistral.outputs


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"kv_source_layers": [0, 1, 0, 1, 0]}, id="latents-of-another-layer"),
        pytest.param({"topk_group": 1}, id="groups"),
    ],
)
def test_what_mistral_has_else_than_deepseek_counts(mistral: Reference, fields: dict[str, Any], tmp_path: Path) -> None:
    path = _changed(mistral, tmp_path, {})
    tensors = load_file(path / "model.safetensors")
    if "kv_source_layers" in fields:
        unread = {f"layers.4.attention.{name}.weight" for name in ("wkv_a_with_mqa", "kv_a_norm")}
        assert unread <= set(tensors)
        save_file({name: t for name, t in tensors.items() if name not in unread}, path / "model.safetensors")
    with make_llm(str(path), hf_overrides=fields) as llm:
        found = generate(llm, mistral.prompts[1:], greedy(NUM_TOKENS))
    assert found != mistral.outputs[1:]


@pytest.mark.parametrize(
    "name", ["lerope.alpha", "ssmax_scaling.s", "indexer.ssmax_scaling.b", "indexer.q_input_norm.bias"]
)
def test_what_mistral_has_learned_counts(mistral: Reference, name: str, tmp_path: Path) -> None:
    path = _changed(mistral, tmp_path, {})
    tensors = load_file(path / "model.safetensors")
    changed = {one: t + 0.7 if one.endswith(name) else t for one, t in tensors.items()}
    save_file(changed, path / "model.safetensors")
    with make_llm(str(path)) as llm:
        assert generate(llm, mistral.prompts[1:], greedy(NUM_TOKENS)) != mistral.outputs[1:]


@pytest.mark.parametrize(
    "settings, reason",
    [
        pytest.param(
            {"hf_overrides": {"attention_bias": True}}, "attention_bias is True; this model has False", id="bias"
        ),
        pytest.param(
            {"hf_overrides": {"kv_source_layers": [0, 1, 1, 1, 4]}},
            "kv_source_layers has 1 for layer 2; .* turns its keys, here none",
            id="source-without-rope",
        ),
        pytest.param(
            {"hf_overrides": {"rope_parameters": {"rope_type": "dynamic"}}},
            "rope_type is 'dynamic', whose frequencies change with the length",
            id="rope",
        ),
        pytest.param(
            {"pipeline_parallel_size": 2, "pipeline_layer_partition": [2, 3]},
            "Layer 2 reads the latents of layer 0 .*which another pipeline stage has",
            id="stages",
        ),
        pytest.param(
            {"hf_overrides": {"text_config": {"model_type": "mistral"}}},
            "text_config has model_type 'mistral'",
            id="text",
        ),
    ],
)
def test_what_is_refused_of_mistral(mistral: Reference, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_llm(mistral.path, **settings)


@pytest.mark.parametrize("block_size", [1, 8, 48])
def test_block_sizes_change_nothing(reference: Reference, block_size: int) -> None:
    with make_llm(reference.path, block_size=block_size, max_num_batched_tokens=64) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


def test_drafts_change_nothing(reference: Reference) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    repeated = [prompt + ids for prompt, ids in zip(reference.prompts, reference.outputs, strict=True)]
    with make_llm(reference.path) as llm:
        plain = generate(llm, repeated, greedy(NUM_TOKENS))
    with make_llm(reference.path, speculative_config=drafts) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        assert generate(llm, repeated, greedy(NUM_TOKENS)) == plain


@pytest.mark.parametrize(
    "settings, reason",
    [
        pytest.param({"kv_cache_dtype": "fp8_e4m3"}, "sdpa_sparse .*: kv dtype fp8_e4m3, only auto", id="8-bits"),
        pytest.param(
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "decode_context_parallel_size is 2, and this model's indexer compares all tokens",
            id="shared-cache",
        ),
        pytest.param({"attention_backend": "sdpa_mla"}, "sdpa_mla' cannot serve this model", id="named"),
        pytest.param({"hf_overrides": {"q_lora_rank": None}}, "q_lora_rank is None", id="no-query-latent"),
    ],
)
def test_what_is_refused_says_why(reference: Reference, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_llm(reference.path, **settings)


@pytest.mark.parametrize(
    "settings, reason",
    [
        pytest.param({"hf_overrides": {"indexer_types": ["shared", "full"] * 2}}, "Layer 0 has no indexer", id="first"),
        pytest.param(
            {"pipeline_parallel_size": 2, "pipeline_layer_partition": [3, 1]},
            r"Layer 3 has no indexer, and none is before it in its pipeline stage. Layers \[0, 2\] have one",
            id="first-of-a-stage",
        ),
        pytest.param({"hf_overrides": {"indexer_types": ["all"] * 4}}, "indexer_types is .*'all'", id="unknown"),
    ],
)
def test_what_is_refused_of_layers_without_an_indexer(glm: Reference, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_llm(glm.path, **settings)
