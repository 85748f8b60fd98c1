"""Models with states: greedy ids equal transformers' float32 ids, whatever happens to the batch."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pelton_e2e import Reference, generate, greedy, make_llm, make_prompts
from safetensors.torch import load_file, save_file

from pelton import LLM, LoRARequest
from pelton.errors import ConfigError
from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint

NUM_TOKENS = 8
LENGTHS = (1, 2, 10, 16, 33, 75, 140)
"""Three prompts go on over an end of a block of 16 tokens: they end 6, 0 and 5 before it."""
CROWDED = (60, 61, 62)  # all of them want another block of attention's tokens soon
DELTA_NET = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 16,
}  # fmt: skip
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_chunk_size": 32}
NEMOTRON = {
    "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24, "chunk_size": 32, "n_routed_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 40,
}  # fmt: skip
MIXED = ["linear_attention", "full_attention"] * 2
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # family: (beginning of transformers' classes, fields)
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1, 3]}),
    "mamba2": ("Mamba2", {
        "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24, "tie_word_embeddings": False, "chunk_size": 32,
    }),
    "qwen3_next": ("Qwen3Next", {**DELTA_NET, **EXPERTS, "mlp_only_layers": [1]}),
    "qwen3_5": ("Qwen3_5", {**DELTA_NET, "layer_types": MIXED}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**DELTA_NET, **EXPERTS}),
    "granitemoehybrid": ("GraniteMoeHybrid", {
        **MAMBA, "layer_types": MIXED, "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 40,
        "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3,
    }),
    "granite-dense": ("GraniteMoeHybrid", {
        **MAMBA, "layer_types": MIXED, "num_local_experts": 0, "shared_intermediate_size": 96, "position_embedding_type": "rope",
    }),
    "falcon_h1": ("FalconH1", {
        **MAMBA, "mamba_d_ssm": 128, "key_multiplier": 0.7, "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 1.1, "ssm_out_multiplier": 0.9, "ssm_multipliers": [1.2, 0.9, 0.8, 1.1, 0.7],
        "mlp_multipliers": [0.9, 1.1], "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0,
    }),
    "falcon_h1-norm": ("FalconH1", {**MAMBA, "mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": True}),
    "nemotron_h": ("NemotronH", {**NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]}),
    "nemotron_h-latent": ("NemotronH", {
        **NEMOTRON, "layers_block_type": ["moe", "linear_attention", "full_attention"], "moe_latent_size": 24, "n_group": 2,
        "routed_scaling_factor": 1.5, "time_step_min": 0.4, "mlp_bias": True, "seed": 2,
    }),
    "mamba": ("Mamba", {"state_size": 12}),
    "falcon_mamba": ("FalconMamba", {"state_size": 12, "tie_word_embeddings": False}),
    "jamba": ("Jamba", {
        "mamba_d_state": 12, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 3, "num_experts": 6,
    }),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 32, "conv_bias": True}),
    "lfm2_moe": ("Lfm2Moe", {
        "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }),
    "lfm3": ("Lfm3", {
        "num_hidden_layers": 5, "layer_types": ["conv", "sliding_attention", "conv", "full_attention", "conv"], "sliding_window": 24,
    }),
    "lfm3-bare": ("Lfm3", {
        "layer_types": ["conv", "full_attention", "sliding_attention", "conv"], "sliding_window": 24, "conv_bias": True,
        "use_sandwich_norm": False, "use_attention_gate": False, "attention_bias": True, "tie_word_embeddings": False,
    }),
    "olmo_hybrid": ("OlmoHybrid", {
        "num_key_value_heads": 4,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 16,
        "rope_parameters": {"rope_theta": None, "rope_type": "default"},
    }),
    "kimi_linear": ("KimiLinear", {
        "num_key_value_heads": 4,
        "linear_head_dim": 16, "linear_num_heads": 4, "kv_lora_rank": 48, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
        "v_head_dim": 20, "layer_types": MIXED, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    }),
    "bailing_hybrid": ("BailingHybrid", {
        "num_key_value_heads": 4, "head_dim": 16, "layer_types": MIXED, "kv_lora_rank": 48, "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16, "v_head_dim": 20, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "kda_lower_bound": -2.0,
    }),
    "bailing_hybrid-free": ("BailingHybrid", {
        "num_key_value_heads": 4, "head_dim": 16, "layer_group_size": 2, "kv_lora_rank": 48, "q_lora_rank": 40,
        "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20, "num_local_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 4, "kda_safe_gate": False,
    }),
    "recurrent_gemma": ("RecurrentGemma", {
        "hidden_size": 96, "lru_width": 80, "attention_window_size": 24, "block_types": ["recurrent", "attention"], "logits_soft_cap": 3.0,
    }),
    "lara_mini": ("LaraMini", {
        **DELTA_NET, **EXPERTS, "sliding_window": 24,
        "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
    }),
    "zamba2": ("Zamba2", {
        "head_dim": 32, "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"], "num_mem_blocks": 2, "adapter_rank": 6,
        "use_shared_attention_adapter": True, "use_mem_rope": True, "num_key_value_heads": 4, "mamba_d_state": 24, "mamba_ngroups": 2,
        "chunk_size": 32, "time_step_min": 0.2, "seed": 3,
    }),
    "zamba2-plain": ("Zamba2", {
        "head_dim": 32, "layers_block_type": ["linear_attention", "hybrid"] * 2, "adapter_rank": 6, "mamba_d_state": 24,
        "chunk_size": 32, "add_bias_linear": True, "tie_word_embeddings": False,
    }),
    "minimax": ("MiniMax", {
        "num_local_experts": 6, "num_experts_per_tok": 2, "block_size": 32, "full_attn_alpha_factor": 1.3,
        "full_attn_beta_factor": 0.8, "linear_attn_alpha_factor": 1.2, "linear_attn_beta_factor": 0.9, "mlp_alpha_factor": 1.1,
        "mlp_beta_factor": 0.7,
    }),
}  # fmt: skip
BLOCKS = {
    "qwen3_next": 23,
    "qwen3_5": 17,
    "qwen3_5_moe": 23,
    "jamba": 11,
    "lfm2": 17,
    "lfm2_moe": 17,
    "lfm3": 19,
    "lara_mini": 19,
    "lfm3-bare": 17,
    "olmo_hybrid": 17,
    "kimi_linear": 11,
    "zamba2": 37,
    "zamba2-plain": 11,
    "bailing_hybrid": 11,
    "bailing_hybrid-free": 11,
    "minimax": 17,
}
"""With which three prompts of 64 tokens fit, and hardly more; others: 8."""
WITH_WINDOWS = {"lfm3": 68, "lfm3-bare": 67, "recurrent_gemma": 36, "lara_mini": 68, "zamba2": 102}
"""Blocks of the longest request: a window keeps as many as a chunk has, here the whole prompt."""
WITHOUT_ATTENTION = ("mamba2", "mamba", "falcon_mamba")


def checkpoint(folder: Path, family: str) -> str:
    import transformers

    name, fields = FAMILIES[family]
    config = next(found for kind in ("TextConfig", "Config") if (found := getattr(transformers, name + kind, None)))
    made = make_tiny_checkpoint(
        folder / family, config_class=config, model_class=getattr(transformers, f"{name}ForCausalLM"), with_tokenizer=False,
        **fields,
    )  # fmt: skip
    tensors = load_file(made / "model.safetensors")
    if biases := [
        name for name in tensors if name.endswith("expert_bias")
    ]:  # zeros, which would choose as nothing does
        tensors |= {name: torch.linspace(-0.3, 0.3, len(tensors[name])) for name in biases}
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    if rates := [name for name in tensors if name.endswith("recurrent_param")]:  # states that fade slowly, and at once
        tensors |= {name: torch.linspace(-7.0, 0.0, len(tensors[name])) for name in rates}
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return str(made)


_answers: dict[tuple[str, tuple[int, ...]], tuple[list[int], float]] = {}


def continuations(path: str, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """transformers' greedy ids, each from all tokens before it; and the smallest gap between the best two logits. Asked once a prompt.

    The ids of an engine are guesses: where transformers' own is the one that was guessed, the next needs no pass of its own."""
    keys = [(path, tuple(prompt)) for prompt in prompts]
    lacking = [list(key[1]) for key in keys if key not in _answers]
    if lacking:
        with make_llm(path) as llm:
            guesses = generate(llm, lacking, greedy(NUM_TOKENS))
        for prompt, guess in zip(lacking, guesses, strict=True):
            _answers[path, tuple(prompt)] = _continued(path, prompt, guess)
    found = [_answers[key] for key in keys]
    return [ids for ids, _ in found], min(gap for _, gap in found)


def _continued(path: str, prompt: list[int], guess: list[int]) -> tuple[list[int], float]:
    ids: list[int] = []
    gap = 1.0
    while len(ids) < NUM_TOKENS:
        tried = guess[len(ids) : -1]
        with torch.inference_mode():
            logits = _of_transformers(path)(input_ids=torch.tensor([[*prompt, *ids, *tried]]), use_cache=False).logits[
                0
            ]
        best = logits[-1 - len(tried) :].topk(2)
        own = best.indices[:, 0].tolist()
        num_right = next((i for i, token in enumerate(tried) if token != own[i]), len(tried))
        ids += own[: num_right + 1]
        gap = min(gap, float((best.values[:, 0] - best.values[:, 1])[: num_right + 1].min()))
    return ids, gap


@functools.lru_cache(maxsize=1)
def _of_transformers(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path).float().eval()


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    path = checkpoint(tmp_path_factory.mktemp("state"), request.param)
    prompts = make_prompts(VOCAB_SIZE, LENGTHS)
    continuations(path, prompts + make_prompts(VOCAB_SIZE, CROWDED))
    return Reference(request.param, path, prompts, *continuations(path, prompts))


def test_batched_and_again(reference: Reference) -> None:
    """In so few blocks that little is found again, or nothing: the second time much is computed over blocks that others have left."""
    assert reference.min_top2_gap > 1e-4
    assert len({token for ids in reference.outputs for token in ids}) > 10
    few = BLOCKS.get(reference.family, 8) * (1 if reference.family in WITHOUT_ATTENTION else 2)
    few = max(few, WITH_WINDOWS.get(reference.family, 0))
    with make_llm(reference.path, num_gpu_blocks_override=few) as llm:
        for _ in range(2):
            prompts = [{"prompt_token_ids": prompt} for prompt in reference.prompts]
            outputs = llm.generate(prompts, greedy(NUM_TOKENS), use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == reference.outputs
        assert llm.kv_cache_usage() == 0.0


def found(llm: LLM, prompts: list[list[int]], expected: list[list[int]]) -> list[int | None]:
    """Compute prompts together, check the answers, and return how many tokens each has found."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy(NUM_TOKENS), use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    return [output.num_cached_tokens for output in outputs]


MAIN = pytest.mark.parametrize(
    "reference",
    ["bamba", "mamba2", "qwen3_next", "jamba", "lfm2", "lfm3", "recurrent_gemma", "kimi_linear"],
    indirect=True,
)


@MAIN
def test_states_are_found(reference: Reference) -> None:
    """A prompt that comes again is computed from its last full block on, and the next turn of a chat from the output's."""
    ends = zip(reference.prompts[-2:], reference.outputs[-2:], strict=True)
    turns = [prompt + ids + [7, 8, 9] for prompt, ids in ends]
    answers, _ = continuations(reference.path, turns)
    for settings in ({}, {"max_num_batched_tokens": 24, "max_num_seqs": 2}, {"async_scheduling": False}):
        with make_llm(reference.path, num_gpu_blocks_override=500, **settings) as llm:
            size = block_size_of(llm)
            assert not any(found(llm, reference.prompts, reference.outputs))
            again = [(len(prompt) - 1) // size * size for prompt in reference.prompts]
            assert any(again) and found(llm, reference.prompts, reference.outputs) == again
            # The last token of an answer is not computed: of the prompt of 75 and its answer 82 are, of the prompt whole blocks 64.
            assert found(llm, turns, answers) == [(len(turn) - 5) // size * size for turn in turns]
            assert llm.reset_prefix_cache()
            assert not any(found(llm, reference.prompts[:3], reference.outputs[:3]))
            assert llm.kv_cache_usage() == 0.0


@pytest.mark.parametrize("reference", ["bamba"], indirect=True)
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["ranks", "stages"])
def test_each_rank_and_stage_copies_its_states(reference: Reference, sizes: dict[str, int]) -> None:
    prompts, outputs = reference.prompts[-2:], reference.outputs[-2:]
    with make_llm(reference.path, num_gpu_blocks_override=500, **sizes) as llm:
        assert [found(llm, prompts, outputs) for _ in range(2)] == [[0, 0], [64, 128]]


@MAIN
def test_what_two_prompts_begin_with_is_found_by_the_third(reference: Reference) -> None:
    common = make_prompts(VOCAB_SIZE, (130,), seed=7)[0]
    prompts = [common + tail for tail in make_prompts(VOCAB_SIZE, (70, 75, 80), seed=8)]
    expected, gap = continuations(reference.path, prompts)
    assert gap > 1e-4
    with make_llm(reference.path, num_gpu_blocks_override=300) as llm:
        size = block_size_of(llm)
        numbers = [found(llm, [prompt], [ids])[0] for prompt, ids in zip(prompts, expected, strict=True)]
    # Layers without attention to all tokens keep nothing that would tell where two part.
    does_not_see = reference.family in (*WITHOUT_ATTENTION, "recurrent_gemma")
    assert numbers == [0, 0, 0 if does_not_see else 130 // size * size]


def block_size_of(llm: LLM) -> int:
    return int(llm.llm_engine.client._core.plan.hash_block_size)  # type: ignore[attr-defined]


def test_alone_in_chunks(reference: Reference) -> None:
    with make_llm(reference.path, max_num_seqs=1, max_num_batched_tokens=16, async_scheduling=False) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


def test_preempted(reference: Reference) -> None:
    """Requests that give up their blocks compute their states again. A state alone never wants another block."""
    prompts = make_prompts(VOCAB_SIZE, CROWDED)
    expected, _ = continuations(reference.path, prompts)
    tight = {"max_model_len": 128, "max_num_batched_tokens": 24, "max_num_seqs": 3}
    with make_llm(reference.path, num_gpu_blocks_override=BLOCKS.get(reference.family, 8), **tight) as llm:
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == expected
        assert (llm.num_preemptions() > 0) == (reference.family not in WITHOUT_ATTENTION)


def check_crowded(reference: Reference, **sizes: int) -> None:
    """Requests over ranks or stages: preempted and in chunks, batched, and alone."""
    prompts = make_prompts(VOCAB_SIZE, CROWDED)
    expected, _ = continuations(reference.path, prompts)
    tight = {"max_model_len": 128, "max_num_batched_tokens": 24, "max_num_seqs": 3}
    blocks = BLOCKS.get(reference.family, 8)
    with make_llm(reference.path, **sizes, num_gpu_blocks_override=blocks, **tight) as llm:
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == expected
        assert (llm.num_preemptions() > 0) == (reference.family not in WITHOUT_ATTENTION)
        assert generate(llm, reference.prompts[:-1], greedy(NUM_TOKENS)) == reference.outputs[:-1]
        assert generate(llm, reference.prompts[4:5], greedy(NUM_TOKENS)) == reference.outputs[4:5]
        assert llm.kv_cache_usage() == 0.0


def test_over_two_ranks(reference: Reference) -> None:
    """Each holds the states of its heads, or channels."""
    check_crowded(reference, tensor_parallel_size=2)


# Each kind of layer; kinds that a stage lacks (both of Nemotron-H); layers that add up their sums themselves, and some that do.
@pytest.mark.parametrize(
    "reference", ["bamba", "qwen3_next", "nemotron_h", "nemotron_h-latent", "jamba", "lfm2", "lfm3", "olmo_hybrid", "minimax", "zamba2"],
    indirect=True,
)  # fmt: skip
def test_in_two_stages(reference: Reference) -> None:
    check_crowded(reference, pipeline_parallel_size=2)


@MAIN
def test_samples_and_a_request_that_leaves(reference: Reference) -> None:
    from pelton import SamplingParams

    with make_llm(reference.path) as llm:
        params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt} for prompt in reference.prompts[:3]]
        first = llm.generate(prompts, params, use_tqdm=False)
        again = llm.generate(prompts, params, use_tqdm=False)
        ids = [[list(one.token_ids) for one in output.outputs] for output in first]
        assert ids == [[list(one.token_ids) for one in output.outputs] for output in again]
        llm.llm_engine.add_request("gone", {"prompt_token_ids": reference.prompts[-1]}, greedy(50))
        llm.llm_engine.step()
        llm.llm_engine.abort_request("gone")
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


def _old_layer_names(text: dict[str, Any]) -> None:
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    text["layer_types"] = [names[kind] for kind in text["layer_types"]]


def _qwen_fields(text: dict[str, Any]) -> None:
    """Layers by their interval, a rope's fields at the outer level."""
    del text["layer_types"]
    parameters = text.pop("rope_parameters")
    text |= {"full_attention_interval": 4, "rope_theta": parameters["rope_theta"]}  # a quarter of a head turns


def _nemotron_pattern(text: dict[str, Any]) -> None:
    assert text.pop("layers_block_type") == ["linear_attention", "mlp", "full_attention", "moe"]
    text["hybrid_override_pattern"] = "M-*E"


def _lfm2_fields(text: dict[str, Any]) -> None:
    text["block_ff_dim"], text["full_attn_idxs"] = text.pop("intermediate_size"), [1, 3]
    text["tie_embedding"] = text.pop("tie_word_embeddings")
    del text["layer_types"]


def _lfm3_fields(text: dict[str, Any]) -> None:
    """With what is left out that the entry says."""
    ropes = text.pop("rope_parameters")
    assert [ropes[f"{kind}_attention"]["rope_theta"] for kind in ("sliding", "full")] == [1e4, 1e6]
    del text["norm_eps"], text["use_sandwich_norm"], text["use_attention_gate"], text["conv_L_cache"]


def _recurrent_fields(text: dict[str, Any]) -> None:
    """A rope's fields at the outer level, and what the entry says left out."""
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    del text["rms_norm_eps"], text["conv1d_width"], text["hidden_activation"], text["tie_word_embeddings"]


def _zamba_fields(text: dict[str, Any]) -> None:
    """Older names of layers, and what follows from other fields left out."""
    text["layers_block_type"] = [kind.replace("linear_attention", "mamba") for kind in text["layers_block_type"]]
    del (
        text["rms_norm_eps"],
        text["attention_head_dim"],
        text["num_key_value_heads"],
        text["tie_word_embeddings"],
        text["hidden_act"],
    )


def _kimi_fields(text: dict[str, Any]) -> None:
    """Layers count from 1."""
    linear = {"head_dim": text.pop("linear_head_dim"), "num_heads": text.pop("linear_num_heads")}
    linear |= {
        "short_conv_kernel_size": text.pop("linear_conv_kernel_dim"),
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
    }
    del text["layer_types"], text["mlp_layer_types"]
    text |= {"linear_attn_config": linear, "first_k_dense_replace": 1}


def _bailing_fields(text: dict[str, Any]) -> None:
    """As DeepSeek's are called, and with what is left out that the entry says."""
    names = {
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
        "moe_renormalize": "norm_topk_prob",
    }
    text |= {new: text.pop(old) for old, new in names.items()}
    text |= {"max_position_embeddings": text.pop("model_max_length"), "layer_group_size": 2}
    del (
        text["layer_types"],
        text["mlp_layer_types"],
        text["rope_parameters"],
        text["rope_theta"],
        text["routed_scaling_factor"],
    )
    del text["linear_head_dim"], text["linear_conv_kernel_dim"], text["kda_safe_gate"], text["num_shared_experts"]


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("granitemoehybrid", _old_layer_names),
        ("qwen3_next", _qwen_fields),
        ("nemotron_h", _nemotron_pattern),
        ("lfm2", _lfm2_fields),
        ("lfm3", _lfm3_fields),
        ("kimi_linear", _kimi_fields),
        ("bailing_hybrid", _bailing_fields),
        ("zamba2", _zamba_fields),
        ("recurrent_gemma", _recurrent_fields),
    ],
)
def test_fields_as_released_checkpoints_have_them(tmp_path: Path, family: str, change: Any) -> None:
    path = Path(checkpoint(tmp_path, family))
    prompts = make_prompts(VOCAB_SIZE, (5, 33))
    expected, _ = continuations(str(path), prompts)
    text = json.loads((path / "config.json").read_text())
    change(text)
    (path / "config.json").write_text(json.dumps(text))
    with make_llm(str(path)) as llm:
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == expected


@pytest.mark.parametrize(
    ("family", "architecture", "others"),
    [
        ("qwen3_5", "Qwen3_5ForConditionalGeneration", ("model.visual.patch_embed.proj", "mtp.fc")),
        ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", ("model.visual.patch_embed.proj", "mtp.fc")),
        ("qwen3_5", "MiniCPMV4_6ForConditionalGeneration", ("model.vision_tower.patch", "model.merger.mlp.0.linear_1")),
        ("qwen3_5", "MiniCPMV4_7ForConditionalGeneration", ("model.vision_tower.patch", "model.merger.mlp.0.linear_1")),
        ("qwen3_5", "MiniCPMOcrForConditionalGeneration", ("model.vision_tower.patch", "model.merger.mlp.0.linear_1")),
        (
            "lfm2",
            "Lfm2VlForConditionalGeneration",
            ("model.vision_tower.patch", "model.multi_modal_projector.linear_1"),
        ),
        (
            "lfm3",
            "Lfm3VlForConditionalGeneration",
            ("model.vision_tower.patchifier", "model.multi_modal_projector.linear_1"),
        ),
    ],
)
def test_the_text_of_a_released_checkpoint(
    tmp_path: Path, family: str, architecture: str, others: tuple[str, ...]
) -> None:
    """As it is released: fields in text_config, tensors behind a prefix beside those of other parts, experts stacked."""
    path = Path(checkpoint(tmp_path, family))
    prompts = make_prompts(VOCAB_SIZE, (5, 33))
    expected, _ = continuations(str(path), prompts)
    tensors = load_file(path / "model.safetensors")
    tensors = {
        name if "language_model" in name else name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in tensors.items()
    }
    rest = {f"{name}.weight": torch.zeros(4) for name in others}
    save_file({**_stacked(tensors), **rest}, path / "model.safetensors")
    text = json.loads((path / "config.json").read_text())
    whole = {"architectures": [architecture], "model_type": family, "text_config": text, "vision_config": {"depth": 1}}
    (path / "config.json").write_text(json.dumps(whole))
    with make_llm(str(path)) as llm:
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == expected


@pytest.mark.parametrize(
    ("field", "architecture"),
    [("llm_config", "NemotronH_Nano_Omni_Reasoning_V3"), ("text_config", "NemotronH_Omni_Reasoning_V3")],
)
def test_the_text_of_nemotron_omni(tmp_path: Path, field: str, architecture: str) -> None:
    """With the fields' name of released checkpoints, and with that of transformers."""
    path = Path(checkpoint(tmp_path, "nemotron_h"))
    prompts = make_prompts(VOCAB_SIZE, (5, 33))
    expected, _ = continuations(str(path), prompts)
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(path / "model.safetensors").items()}
    others = (
        "mlp1.0",
        "vision_model.radio_model.patch",
        "sound_encoder.encoder.norm",
        "language_model.mtp.layers.0.norm",
    )
    rest = {f"{name}.weight": torch.zeros(4) for name in others}
    save_file({**tensors, **rest}, path / "model.safetensors")
    whole = {"architectures": [architecture], field: json.loads((path / "config.json").read_text())}
    (path / "config.json").write_text(json.dumps(whole))
    with make_llm(str(path)) as llm:
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == expected


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as one tensor a matrix."""
    rest = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        one = [
            {part: tensors[f"{layer}.experts.{index}.{part}_proj.weight"] for part in ("gate", "up", "down")}
            for index in range(EXPERTS["num_experts"])
        ]
        rest[f"{layer}.experts.gate_up_proj"] = torch.stack([torch.cat([each["gate"], each["up"]]) for each in one])
        rest[f"{layer}.experts.down_proj"] = torch.stack([each["down"] for each in one])
    return rest


OF_MODULES = {
    "block_sparse_moe": "mlp", "self_attn.gate_proj": "self_attn.g_proj", ".attention.dense": ".self_attn.o_proj",
    ".attention.f_proj": ".self_attn.forget_gate.f_proj", ".attention.": ".self_attn.",
}  # fmt: skip
"""Names in checkpoints, and of transformers' modules."""
REFUSED = "|".join([
    r".*experts\.\d+\..*", r".*router\.layer", r".*(mlp|feed_forward|mixer|moe)\.(gate|router)", r".*shared_expert_gate", r".*kv_b_proj",
    r".*embed.*", r".*lm_head", r".*A_log", r".*rg_lru.*",
])  # fmt: skip


@pytest.mark.parametrize(
    ("family", "num_ranks"),
    [
        ("qwen3_next", 1),
        ("qwen3_5", 1),
        ("granitemoehybrid", 1),
        ("falcon_h1", 1),
        ("nemotron_h-latent", 1),
        ("jamba", 1),
        ("lfm2_moe", 1),
        ("lfm3", 1),
        ("kimi_linear", 1),
        ("bailing_hybrid", 1),
        ("recurrent_gemma", 1),
        ("zamba2", 1),
        ("olmo_hybrid", 1),
        ("qwen3_next", 2),
        ("jamba", 2),
    ],
)
def test_adapters_of_every_matrix(tmp_path: Path, family: str, num_ranks: int) -> None:
    """Of those that take one: rows of a matrix that lie apart in a layer's product get theirs."""
    path = Path(checkpoint(tmp_path, family))
    weights, random, pairs = load_file(path / "model.safetensors"), torch.Generator().manual_seed(1), {}
    for name, weight in list(weights.items()):
        if weight.dim() == 2 and not re.fullmatch(REFUSED, name.removesuffix(".weight")):
            a, b = (torch.randn(shape, generator=random) * 0.05 for shape in ((4, weight.shape[1]), (len(weight), 4)))
            own = name.removesuffix(".weight")
            for old, new in OF_MODULES.items():
                own = own.replace(old, new)
            pairs |= {f"base_model.model.{own}.lora_A.weight": a, f"base_model.model.{own}.lora_B.weight": b}
            weights[name] = weight + 2.0 * b @ a
    (tmp_path / "adapter").mkdir()
    save_file(pairs, tmp_path / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "target_modules": ".*"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    shutil.copytree(path, tmp_path / "merged")
    save_file(weights, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    prompts = make_prompts(VOCAB_SIZE, (5, 33))
    with make_llm(str(tmp_path / "merged")) as llm:
        expected = generate(llm, prompts, greedy(NUM_TOKENS))
    with make_llm(str(path), enable_lora=True, tensor_parallel_size=num_ranks) as llm:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        request = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
        outputs = llm.generate(given, greedy(NUM_TOKENS), use_tqdm=False, lora_request=request)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert generate(llm, prompts, greedy(NUM_TOKENS)) != expected


CONNECTOR = {"kv_connector": "shared_storage", "kv_connector_extra_config": {"shared_storage_path": "nowhere"}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_config": {"method": "ngram"}}, "a state cannot leave a rejected draft out again"),
        ({"kv_transfer_config": CONNECTOR}, "keeps what models have of each token; this one has states"),
        ({"kv_transfer_config": CONNECTOR, "disable_hybrid_kv_cache_manager": True}, "this one has states"),
        ({"speculative_config": {"model": "heads"}}, "a state cannot leave a rejected draft out again"),
        (
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
            "decode_context_parallel_size is 2, and a state has no tokens that ranks could share out",
        ),
        ({"tensor_parallel_size": 3}, "mamba_n_heads is 8, which does not divide by tensor_parallel_size 3"),
    ],
)
def test_what_a_state_does_not_go_with(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm(checkpoint(tmp_path, "bamba"), **settings)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "qwen3_5",
            {"layer_types": ["full_attention"]},
            "layer_types has 1 entries; expected one for each of 4 layers",
        ),
        (
            "lfm2",
            {"layer_types": ["conv", "linear_attention"] * 2},
            "Layer 1 is 'linear_attention' in layer_types; this model has",
        ),
        ("lfm3", {"attention_bias": True}, "attention_bias is True; this model has False"),
        ("recurrent_gemma", {"block_types": ["attention", "own"]}, "Layer 1 is 'own' in block_types; this model has"),
        (
            "zamba2",
            {"layers_block_type": ["mamba"]},
            "layers_block_type has 1 entries; expected one for each of 4 layers",
        ),
        (
            "zamba2",
            {"layers_block_type": ["mamba", "own", "hybrid", "hybrid"]},
            "layers_block_type has 'own'; this model has",
        ),
        ("zamba2", {"num_key_value_heads": 2}, "num_key_value_heads is 2 with use_shared_attention_adapter"),
        ("zamba2", {"use_long_context": True}, "use_long_context is True; this model has False"),
        ("recurrent_gemma", {"lru_width": 82}, "lru_width is 82, which num_attention_heads 4 does not divide"),
        ("recurrent_gemma", {"hidden_activation": "relu"}, "hidden_activation is 'relu'; this model has"),
        ("bailing_hybrid", {"kda_lower_bound": 0.0}, "kda_lower_bound is 0.0; a decay's logarithm is below 0"),
        ("bailing_hybrid", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; this model has 1.0"),
        (
            "nemotron_h",
            {"layers_block_type": ["moe", "own"]},
            "Layer 1 is 'own' in config.json; this model has mamba, attention",
        ),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; this model has relu2"),
        ("qwen3_5", {"linear_num_value_heads": 3}, "has 3 heads in 2 groups"),
        ("bamba", {"mamba_d_head": 20}, "mamba_n_heads is 8 and mamba_d_head 20, which do not make 128 numbers"),
    ],
)
def test_fields_that_do_not_fit(tmp_path: Path, family: str, change: dict[str, Any], message: str) -> None:
    path = Path(checkpoint(tmp_path, family))
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, **change}))
    with pytest.raises(ConfigError, match=message):
        make_llm(str(path))
