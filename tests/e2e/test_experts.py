"""Mixtures of experts: greedy ids equal transformers' float32 greedy ids, whatever happens to the batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pelton_e2e import Reference, generate, greedy, greedy_reference, make_llm, make_prompts, references_in
from pelton_isas import FLOAT32_PATHS
from pelton_stacked import stacked
from safetensors.torch import load_file, save_file

from pelton.errors import ConfigError
from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint
from pelton_plugins.models import gpt_oss

FAMILIES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v2_moe", "deepseek_v3_moe", "gpt_oss", "llama4", "minimax_m2",
    "olmoe", "ernie4_5_moe", "dots1", "solar_open",
)  # fmt: skip
NUM_TOKENS = 17  # every prompt goes on over the end of a block
LENGTHS = (1, 5, 16, 33, 129, 200)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """From family to its checkpoint with transformers' answers."""
    return references_in(tmp_path_factory, NUM_TOKENS, LENGTHS)


@pytest.fixture(params=FAMILIES)
def reference(request: pytest.FixtureRequest, made: Callable[[str], Reference]) -> Reference:
    return made(request.param)


def test_reference_has_no_ties(reference: Reference) -> None:
    assert reference.min_top2_gap > 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_num_seqs": 1, "enforce_eager": True}, id="alone"),
        pytest.param({"max_num_batched_tokens": 16, "async_scheduling": False}, id="chunked"),
    ],
)
def test_ids_equal_transformers(reference: Reference, settings: dict[str, Any]) -> None:
    every = slice(
        None, None, 2 if settings.get("max_num_seqs") == 1 else 1
    )  # a prompt alone is as many steps as all of them
    with make_llm(reference.path, **settings) as llm:
        assert generate(llm, reference.prompts[every], greedy(NUM_TOKENS)) == reference.outputs[every]
        assert llm.kv_cache_usage() == 0.0


@pytest.mark.parametrize("path", FLOAT32_PATHS, indirect=True)
@pytest.mark.parametrize("family", ["deepseek_v3_moe", "gpt_oss"])
def test_every_way_in_which_a_cpu_computes_gives_the_same(
    made: Callable[[str], Reference], family: str, path: str
) -> None:
    reference = made(family)
    with make_llm(reference.path, max_num_batched_tokens=64) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


def test_steps_of_experts_are_recorded(made: Callable[[str], Reference]) -> None:
    with make_llm(made("gpt_oss").path) as llm:
        report = llm.llm_engine.info.report
        assert report.attention_backend == "native"
        assert not [note for note in report.notes if "recordable" in note]


def test_prefix_hits_change_nothing(reference: Reference) -> None:
    with make_llm(reference.path) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        again = llm.generate([{"prompt_token_ids": p} for p in reference.prompts], greedy(NUM_TOKENS), use_tqdm=False)
        assert [list(o.outputs[0].token_ids) for o in again] == reference.outputs
        assert sum(o.num_cached_tokens or 0 for o in again) >= 256


def test_preemption_changes_nothing(reference: Reference) -> None:
    num_blocks = 1 + {"gpt_oss": 28, "dots1": 28, "llama4": 48}.get(
        reference.family, 20
    )  # windows and chunks have blocks of their own
    with make_llm(
        reference.path, max_model_len=256, max_num_batched_tokens=64, num_gpu_blocks_override=num_blocks
    ) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        assert llm.num_preemptions() > 0


def test_a_method_that_knows_nothing_of_experts_is_refused(
    made: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("pelton_plugins.weight_forms.blocks.BlockWeights.experts")
    monkeypatch.delattr("pelton_plugins.weight_forms.blocks.BlockWeights.decoded")
    with pytest.raises(ConfigError, match="experts, which this version keeps in the model's dtype"):
        make_llm(made("mixtral").path, quantization="q8_0")


@pytest.mark.parametrize("is_kept", [False, True], ids=["decoded", "packed"])
def test_experts_in_four_bits(
    made: Callable[[str], Reference], is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers once as mxfp4 and once as bfloat16: gpt-oss's released form and its plain one. Packed: as on a GPU."""
    repacked = Mock(side_effect=gpt_oss.repacked_mxfp4)
    monkeypatch.setattr(gpt_oss, "repacked_mxfp4", repacked)
    if is_kept:
        monkeypatch.setattr(gpt_oss, "keeps_packed", lambda config: True)
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    for folder in (plain, packed):
        shutil.copytree(made("gpt_oss").path, folder)
    tensors = load_file(plain / "model.safetensors")
    small: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(3)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, num_in, num_out = tensors[name].shape
        codes = torch.randint(16, (count, num_out, num_in // 32, 32), generator=generator)
        scales = torch.randint(123, 127, (count, num_out, num_in // 32), generator=generator)
        numbers = values[codes % 8] * torch.where(codes < 8, 1.0, -1.0) * 2.0 ** (scales.unsqueeze(-1) - 127)
        tensors[name] = numbers.flatten(-2).transpose(1, 2).contiguous()
        small[f"{name}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        small[f"{name}_scales"] = scales.to(torch.uint8)
    save_file(tensors, plain / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in small}
    save_file(rest | small, packed / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    prompts, answers = made("gpt_oss").prompts, []
    for folder in (plain, packed):
        with make_llm(str(folder)) as llm:
            answers.append(generate(llm, prompts, greedy(NUM_TOKENS)))
    assert answers[0] == answers[1] != made("gpt_oss").outputs
    assert repacked.called == is_kept
    if is_kept:
        small[next(name for name in small if name.endswith("_scales"))].view(-1)[7] = 200
        save_file(rest | small, packed / "model.safetensors")
        with pytest.raises(ConfigError, match=r"_proj_scales has a scale of 2\^73; served are scales of up to 2\^64"):
            make_llm(str(packed))


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        {"data_parallel_size": 2, "enable_expert_parallel": True},
    ],
    ids=["one", "ranks", "engines"],
)
def test_the_load_of_experts_is_counted(made: Callable[[str], Reference], parallel: dict[str, Any]) -> None:
    """Every token that is computed counts once for each of its experts, in every layer; padding, warm-up and the profile do not."""
    reference = made("qwen3_moe")
    config = json.loads((Path(reference.path) / "config.json").read_text())
    computed = sum(len(prompt) + NUM_TOKENS - 1 for prompt in reference.prompts) * config["num_experts_per_tok"]
    with make_llm(
        reference.path, plugin_config={"models": {"count_expert_load": True}}, enable_prefix_caching=False, **parallel
    ) as llm:
        read = partial(llm.llm_engine.client.call, "worker.expert_load")
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        loads = read(True)
        assert len(loads) == config["num_hidden_layers"]
        assert {len(load) for load in loads.values()} == {config.get("num_experts", config.get("num_local_experts"))}
        assert {sum(load) for load in loads.values()} == {computed}
        assert not any(sum(load) for load in read().values())
    with (
        make_llm(reference.path) as llm,
        pytest.raises(Exception, match=r"Set plugin_config\.models\.count_expert_load"),
    ):
        llm.llm_engine.client.call("worker.expert_load")


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3_moe"])
def test_experts_may_be_one_tensor_a_matrix(made: Callable[[str], Reference], family: str, tmp_path: Path) -> None:
    reference, folder = made(family), tmp_path / "stacked"
    shutil.copytree(reference.path, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(stacked(tensors), folder / "model.safetensors")
    with make_llm(str(folder)) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


def test_layers_that_predict_further_tokens_are_not_read(made: Callable[[str], Reference], tmp_path: Path) -> None:
    reference, folder = made("glm4_moe"), tmp_path / "released"
    shutil.copytree(reference.path, folder)
    fields = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields))
    layer = f"model.layers.{fields['num_hidden_layers']}"
    unread = {
        f"{layer}.{name}.weight": torch.ones(4) for name in ("eh_proj", "shared_head.head", "mlp.experts.0.up_proj")
    }
    save_file(load_file(folder / "model.safetensors") | unread, folder / "model.safetensors")
    with make_llm(str(folder)) as llm:
        assert generate(llm, reference.prompts[:3], greedy(NUM_TOKENS)) == reference.outputs[:3]


def test_glm4_moe_lite_is_deepseek_v3s_shape(tmp_path: Path) -> None:
    import transformers

    sizes = {
        "hidden_size": 64,
        "kv_lora_rank": 32,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
    }
    path = make_tiny_checkpoint(
        tmp_path / "glm4_moe_lite", config_class=transformers.Glm4MoeLiteConfig, model_class=transformers.Glm4MoeLiteForCausalLM,
        with_tokenizer=False, **sizes, num_key_value_heads=4, moe_intermediate_size=40, n_routed_experts=8, num_experts_per_tok=3,
        routed_scaling_factor=1.5,
    )  # fmt: skip
    prompts = make_prompts(VOCAB_SIZE, (1, 16, 33))
    outputs, gap = greedy_reference(str(path), prompts, NUM_TOKENS)
    assert gap > 1e-4
    fields = json.loads((path / "config.json").read_text())
    assert fields.pop("mlp_layer_types") == ["dense", "sparse", "sparse", "sparse"]
    (path / "config.json").write_text(json.dumps(fields))  # as it is released
    with make_llm(str(path), max_num_batched_tokens=16, model_impl="pelton") as llm:
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == outputs


def test_minimax_m2_as_it_is_released(made: Callable[[str], Reference], tmp_path: Path) -> None:
    """The part of a head that turns is a number of its own, the rope's base is the architecture's."""
    reference, folder = made("minimax_m2"), tmp_path / "released"
    shutil.copytree(reference.path, folder)
    fields = json.loads((folder / "config.json").read_text())
    assert fields.pop("rope_parameters")["partial_rotary_factor"] * fields["head_dim"] == fields["rotary_dim"]
    known = {"scoring_func": "sigmoid", "qk_norm_type": "per_layer", "use_qk_norm": True, "attn_type_list": [1] * 4}
    (folder / "config.json").write_text(json.dumps(fields | known))
    with make_llm(str(folder)) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
    with pytest.raises(ConfigError, match="qk_norm_type is 'per_head'; this model has 'per_layer'"):
        make_llm(str(folder), hf_overrides={"qk_norm_type": "per_head"})


def test_windows_of_dots1_without_a_list_of_layers(made: Callable[[str], Reference], tmp_path: Path) -> None:
    reference, folder = made("dots1"), tmp_path / "released"
    shutil.copytree(reference.path, folder)
    fields = json.loads((folder / "config.json").read_text())
    assert fields.pop("layer_types")[2:] == ["sliding_attention"] * 2
    (folder / "config.json").write_text(json.dumps(fields))
    with make_llm(str(folder)) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


@pytest.mark.parametrize(
    "field, value, right",
    [("use_bias", True, "this model has False"), ("moe_norm_min", 0.01, "is the same up to 1e-09")],
)
def test_values_of_ernie_that_are_not_computed(
    made: Callable[[str], Reference], field: str, value: Any, right: str
) -> None:
    with pytest.raises(ConfigError, match=f"{field} is {value}; .*{right}"):
        make_llm(made("ernie4_5_moe").path, hf_overrides={field: value})


def test_llama4_with_a_part_for_images_gives_its_text(made: Callable[[str], Reference], tmp_path: Path) -> None:
    """A checkpoint as it is released: the text's configuration within the whole's, its tensors behind a prefix, others beside them."""
    reference, folder = made("llama4"), tmp_path / "whole"
    shutil.copytree(reference.path, folder)
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["vision_model.class_embedding"] = tensors["multi_modal_projector.linear_1.weight"] = torch.zeros(4)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": text}
    (folder / "config.json").write_text(json.dumps(whole | {"vision_config": {"hidden_size": 16}}))
    with make_llm(str(folder)) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


def test_blocks_behind_a_chunk_are_given_back(made: Callable[[str], Reference]) -> None:
    """A request of 232 tokens holds blocks of one chunk in the groups of local layers: three of chunks, one of all tokens."""
    reference = made("llama4")
    with make_llm(reference.path, max_num_batched_tokens=32, num_gpu_blocks_override=40, max_model_len=256) as llm:
        assert generate(llm, reference.prompts[-1:], greedy(NUM_TOKENS)) == reference.outputs[-1:]
