"""Drafts from weights of their own: the same ids in every mode, greedy or sampled, whatever the drafts are worth."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pelton_covering import in_turn
from pelton_drafts import config_of, counts, eagle, eagle3, medusa, noisy_copy, proposals, repeating, strict_blocks
from pelton_e2e import NUM_NEW_TOKENS, Reference, generate, greedy, make_llm, small_pool
from pelton_grouped import bitsandbytes_tensors
from safetensors.torch import load_file, save_file

from pelton import SamplingParams
from pelton.errors import ConfigError
from pelton.sampling_params import StructuredOutputsParams
from pelton.testing.models import make_tiny_checkpoint

K = 3
METHODS = ("medusa", "draft_model", "eagle", "eagle3")
Drafts = Callable[[str, Reference], dict[str, Any]]


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Drafts:
    """The settings of a method for a model, whose checkpoint is made once. Skips what is refused."""
    made: dict[tuple[str, str], str] = {}
    makers = {
        "medusa": medusa, "draft_model": lambda folder, model: noisy_copy(folder, model, 0.05), "eagle": eagle, "eagle3": eagle3,
    }  # fmt: skip

    def get(method: str, reference: Reference) -> dict[str, Any]:
        if (method, reference.family) == ("eagle3", "gemma3"):
            pytest.skip("no hidden states between Gemma's layers: test_eagle.py")
        key = method, reference.path
        if key not in made:
            made[key] = makers[method](tmp_path_factory.mktemp(method) / "draft", reference.path)
        return {"method": method, "model": made[key], "num_speculative_tokens": K, "min_acceptance_rate": 0}

    return get


@pytest.fixture(params=["llama", "gemma3"])  # the two shapes of caches: full attention, and windows beside it
def reference(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Reference:
    return references(request.param)


@pytest.mark.covering(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="overlap"),
        pytest.param({"max_num_batched_tokens": 16}, id="chunked"),
        pytest.param({"async_scheduling": False, "max_num_batched_tokens": 48}, id="no-overlap"),
        pytest.param({"max_num_seqs": 1, "block_size": 32}, id="alone"),
    ],
)
def test_greedy_ids_are_those_without_drafts(
    reference: Reference, drafts: Drafts, method: str, settings: dict[str, Any]
) -> None:
    with make_llm(
        reference.path, speculative_config=drafts(method, reference), disable_log_stats=False, **settings
    ) as llm:
        some = slice(7 if "max_num_seqs" in settings else None)
        assert generate(llm, reference.prompts[some]) == reference.outputs[some]
        # Once more: prompts are found in the prefix cache, with what the drafter keeps of them.
        assert generate(llm, reference.prompts[some]) == reference.outputs[some]
        found = counts(llm)
        assert llm.kv_cache_usage() == 0.0
    assert 0 < found["num_draft_tokens"] <= K * found["num_drafts"]
    assert found["num_accepted_tokens"] < found["num_draft_tokens"]
    assert found["num_accepted_tokens"] > 0 or method != "draft_model"


@pytest.mark.parametrize(
    "method, family", [("medusa", "llama"), ("draft_model", "gemma3"), ("eagle", "gemma3"), ("eagle3", "llama")]
)
def test_drafts_survive_preemption(
    references: Callable[[str], Reference], drafts: Drafts, method: str, family: str
) -> None:
    reference = references(family)
    # One full layer more beside Gemma's windows is one group more.
    more = 24 if (method, family) == ("eagle", "gemma3") else 0
    with make_llm(
        reference.path,
        speculative_config=drafts(method, reference),
        max_model_len=384,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=small_pool(reference.family) + more,
    ) as llm:
        assert generate(llm, reference.prompts) == reference.outputs
        assert llm.num_preemptions() > 0


@pytest.mark.parametrize("method", METHODS)
def test_seeded_samples_are_those_without_drafts(llama: Reference, drafts: Drafts, method: str) -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=11, max_tokens=32, ignore_eos=True, n=2)
    prompts = [{"prompt_token_ids": prompt} for prompt in llama.prompts[:8]]

    def answers(**settings: Any) -> list[list[int]]:
        with make_llm(llama.path, **settings) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(one.token_ids) for output in outputs for one in output.outputs]

    assert answers(speculative_config=drafts(method, llama)) == answers()


@pytest.mark.parametrize("method", METHODS)
def test_rows_that_ask_for_more_get_what_they_ask_for(llama: Reference, drafts: Drafts, method: str) -> None:
    """Steps with such rows have no drafts, and the drafter follows them: later drafts rest on all tokens."""
    asked = [
        greedy(12, logprobs=2), greedy(24), greedy(10, presence_penalty=1.5), greedy(24, min_tokens=4),
        greedy(9, prompt_logprobs=1), greedy(24, stop_token_ids=[llama.outputs[5][8]]),
    ]  # fmt: skip
    prompts = [{"prompt_token_ids": prompt} for prompt in llama.prompts[: len(asked)]]

    def answers(**settings: Any) -> list[Any]:
        with make_llm(llama.path, max_num_batched_tokens=32, **settings) as llm:
            outputs = llm.generate(prompts, asked, use_tqdm=False)
        return [(list(one.outputs[0].token_ids), one.outputs[0].finish_reason) for one in outputs]

    assert answers(speculative_config=drafts(method, llama)) == answers()


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_constrained_rows_beside_others(tmp_path: Path, method: str) -> None:
    """Their masks come behind the forward pass, and the drafter follows when they have sampled."""
    model = str(make_tiny_checkpoint(tmp_path / "model", "llama"))
    draft = eagle3(tmp_path / "head", model) if method == "eagle3" else noisy_copy(tmp_path / "draft", model, 0.05)
    constraint = StructuredOutputsParams(regex="[a-c]{2,9}d")
    params = [
        SamplingParams(temperature=0.0, max_tokens=14, structured_outputs=constraint),
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=4, max_tokens=14, structured_outputs=constraint),
    ]
    prompts = ["One", "Two and more of it", "Three"]

    def answers(**settings: Any) -> list[list[int]]:
        with make_llm(model, skip_tokenizer_init=False, **settings) as llm:
            return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    speculation = {"method": method, "model": draft, "min_acceptance_rate": 0}
    with proposals() as found:
        assert answers(speculative_config=speculation) == answers()
    assert found


@pytest.mark.parametrize(
    "family, settings",
    [
        ("llama", {}), ("mistral", {}), ("gemma3", {}), ("deepseek_v3", {}), ("mixtral", {}),
        ("llama", {"tensor_parallel_size": 2}), ("gemma3", {"tensor_parallel_size": 2}),
        ("qwen3", {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "ranks" if value else "",
)  # fmt: skip
def test_a_draft_model_that_is_the_model_is_always_right(
    references: Callable[[str], Reference], family: str, settings: dict[str, Any]
) -> None:
    """Its keys and values are where the model's would be: behind chunks, prefix hits and overlap."""
    reference = references(family)
    speculation = {"method": "draft_model", "model": reference.path, "num_speculative_tokens": 4}
    with make_llm(
        reference.path, speculative_config=speculation, disable_log_stats=False, max_num_batched_tokens=80, **settings
    ) as llm:
        assert generate(llm, reference.prompts) == reference.outputs
        assert generate(llm, reference.prompts) == reference.outputs
        found = counts(llm)
    assert found["num_accepted_tokens"] == found["num_draft_tokens"] > 0
    assert found["num_drafts"] < 2 * len(reference.prompts) * NUM_NEW_TOKENS / 4


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3"])
def test_ranks_make_the_drafts_of_one(llama: Reference, tmp_path: Path, method: str) -> None:
    head = repeating(tmp_path / "head", llama.path, method)
    speculation = {"method": method, "model": head, "num_speculative_tokens": K, "min_acceptance_rate": 0}
    found = []
    for size in (1, 2):
        with make_llm(
            llama.path, speculative_config=speculation, disable_log_stats=False, tensor_parallel_size=size
        ) as llm:
            assert generate(llm, llama.prompts) == llama.outputs
            found.append(counts(llm))
    assert found[0] == found[1] and found[0]["num_accepted_tokens"] > 0


@pytest.mark.parametrize("family, num_blocks", [("llama", 24), ("gemma3", 80)])
def test_it_stays_right_when_blocks_change_hands(
    references: Callable[[str], Reference], family: str, num_blocks: int
) -> None:
    """Preempted and resumed, with all blocks in use."""
    reference = references(family)
    prompts, params = reference.prompts[:11], greedy(80)
    tight = {"max_model_len": 192, "num_gpu_blocks_override": num_blocks, "max_num_batched_tokens": 64}
    with make_llm(reference.path, **tight) as llm:
        expected = generate(llm, prompts, params)
    speculation = {"method": "draft_model", "model": reference.path, "num_speculative_tokens": 4}
    with (
        strict_blocks() as passes,
        make_llm(reference.path, speculative_config=speculation, disable_log_stats=False, **tight) as llm,
    ):
        assert generate(llm, prompts, params) == expected
        assert llm.num_preemptions() > 0
        found = counts(llm)
    assert found["num_accepted_tokens"] == found["num_draft_tokens"] > 0
    assert sum(passes) >= found["num_draft_tokens"]  # of steps that came to nothing too


def test_a_draft_of_another_family(llama: Reference, references: Callable[[str], Reference]) -> None:
    """Qwen 3 has one key head of another size: the pages of its layers are smaller."""
    draft = references("qwen3")
    speculation = {"model": draft.path, "num_speculative_tokens": 2, "min_acceptance_rate": 0}
    with make_llm(llama.path, speculative_config=speculation, disable_log_stats=False) as llm:
        assert generate(llm, llama.prompts) == llama.outputs
        assert counts(llm)["num_draft_tokens"] > 0


def test_a_quantized_draft(llama: Reference, tmp_path: Path) -> None:
    """The model's own weights, rounded to 8 bits by their checkpoint: nearly always right."""
    draft = Path(noisy_copy(tmp_path / "draft", llama.path, 0.0))
    tensors = load_file(draft / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors |= bitsandbytes_tensors(name.removesuffix(".weight"), tensors.pop(name))[0]
    save_file(tensors, draft / "model.safetensors")
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": None}
    (draft / "config.json").write_text(json.dumps(config_of(llama.path) | {"quantization_config": config}))
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    with make_llm(llama.path, speculative_config=speculation, disable_log_stats=False) as llm:
        assert generate(llm, llama.prompts) == llama.outputs
        found = counts(llm)
    assert 0.8 * found["num_draft_tokens"] < found["num_accepted_tokens"] < found["num_draft_tokens"]


def test_the_demo_model_drafts_for_itself() -> None:
    """Trained weights, from a GGUF; the checkpoint says the method."""
    params, prompts = greedy(12, detokenize=True), ["The capital of France is", "1, 2, 3, 4,"]
    speculation = {"model": "smollm2", "num_speculative_tokens": 3}
    found = []
    for drafts in ({}, {"speculative_config": speculation}):
        small = {"max_num_seqs": 2, "max_num_batched_tokens": 64}  # a start of 1.7 s, not 2.5
        with make_llm("smollm2", skip_tokenizer_init=False, disable_log_stats=False, **small, **drafts) as llm:
            found.append([output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)])
            made = counts(llm)
    assert found[0] == found[1]
    assert made["num_accepted_tokens"] == made["num_draft_tokens"] > 0


def test_drafts_that_are_wrong_pause(llama: Reference, drafts: Drafts) -> None:
    speculation = drafts("medusa", llama) | {"min_acceptance_rate": 0.3}
    with make_llm(llama.path, speculative_config=speculation, disable_log_stats=False) as llm:
        assert generate(llm, llama.prompts) == llama.outputs
        found = counts(llm)
    assert found["num_pauses"] >= 1 and found["num_drafts"] < len(llama.prompts) * NUM_NEW_TOKENS / 2


@pytest.mark.parametrize("method, level", in_turn(METHODS, [1, 2]))
def test_sleep_and_wake(llama: Reference, drafts: Drafts, method: str, level: int) -> None:
    with make_llm(llama.path, speculative_config=drafts(method, llama), disable_log_stats=False) as llm:
        assert generate(llm, llama.prompts[:6]) == llama.outputs[:6]
        before = counts(llm)["num_draft_tokens"]
        llm.sleep(level)
        llm.wake_up()
        assert generate(llm, llama.prompts) == llama.outputs
        assert counts(llm)["num_draft_tokens"] > before


@pytest.mark.parametrize(
    "draft, settings, message",
    [
        ({"vocab_size": 400}, {}, "with a vocabulary of 400 tokens, and the model has 320"),
        ({"max_position_embeddings": 256}, {}, "max_model_len is 512, and the draft model .* reads 256 tokens"),
        ({}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2, and speculative_config.method 'draft_model'"),
        ({"architectures": None}, {}, "says no method; set speculative_config.method to one of .*medusa"),
    ],
)
def test_a_draft_that_does_not_fit_is_one_line(
    llama: Reference, tmp_path: Path, draft: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    path = make_tiny_checkpoint(tmp_path / "draft", "llama", with_tokenizer=False, **draft)
    if "architectures" in draft:
        (path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=message):
        make_llm(llama.path, speculative_config={"model": str(path)}, **settings)


def test_a_method_without_a_checkpoint_refuses_one(llama: Reference) -> None:
    with pytest.raises(ConfigError, match="method 'ngram' reads no checkpoint"):
        make_llm(llama.path, speculative_config={"method": "ngram", "model": llama.path})


def test_names_of_vllm(llama: Reference) -> None:
    with make_llm(llama.path, speculative_config={"model": "[ngram]", "num_speculative_tokens": 2}) as llm:
        assert generate(llm, llama.prompts[:2]) == llama.outputs[:2]
