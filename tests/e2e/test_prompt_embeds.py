"""Prompts given as embeddings: the ids are those of the same prompts as tokens, whatever happens to the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pelton_e2e import Reference, generate, greedy, make_llm, small_pool

from pelton import SamplingParams
from pelton.errors import ConfigError, NotSupportedError, RequestError


def embedding_of(reference: Reference) -> torch.Tensor:
    """[V, H] float32, as transformers has it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(reference.path, dtype=torch.float32)
    return model.get_input_embeddings()(torch.arange(model.config.vocab_size)).detach()


@pytest.fixture(scope="module")
def llama_embeds(references: Callable[[str], Reference]) -> list[torch.Tensor]:
    llama = references("llama")
    matrix = embedding_of(llama)
    return [matrix[torch.tensor(prompt)] for prompt in llama.prompts]


def ids_of(llm: Any, prompts: list[Any], params: Any = None) -> list[list[int]]:
    outputs = llm.generate(prompts, params or greedy(), use_tqdm=False)
    assert not (errors := {o.error.message for o in outputs if o.error is not None}), errors
    return [list(o.outputs[0].token_ids) for o in outputs]


def given(embeds: list[torch.Tensor]) -> list[dict[str, Any]]:
    return [{"prompt_embeds": one} for one in embeds]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="batched"),
        pytest.param({"max_num_batched_tokens": 16, "async_scheduling": False}, id="chunked"),
        pytest.param({"enable_prefix_caching": False, "enforce_eager": True}, id="no-prefix-cache-no-graphs"),
        pytest.param({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, id="drafts"),
        pytest.param({"speculative_config": {"method": "draft_model", "min_acceptance_rate": 0}}, id="draft-model"),
        pytest.param({"model_impl": "transformers"}, id="transformers-modules"),
    ],
)
def test_ids_equal_those_of_tokens(
    llama: Reference, llama_embeds: list[torch.Tensor], settings: dict[str, Any]
) -> None:
    drafts = settings.get("speculative_config", {})
    if drafts.get("method") == "draft_model":  # it reads the ids of prompts, which embeddings have none of
        settings = {"speculative_config": drafts | {"model": llama.path}}
    with make_llm(llama.path, enable_prompt_embeds=True, **settings) as llm:
        assert ids_of(llm, given(llama_embeds)) == llama.outputs
        assert generate(llm, llama.prompts) == llama.outputs  # tokens, behind them and beside them
        mixed = [e if i % 2 else {"prompt_token_ids": p} for i, (e, p) in
                 enumerate(zip(given(llama_embeds), llama.prompts, strict=True))]  # fmt: skip
        assert ids_of(llm, mixed) == llama.outputs
        assert llm.kv_cache_usage() == 0.0


def test_equal_embeddings_share_blocks_and_others_do_not(llama: Reference, llama_embeds: list[torch.Tensor]) -> None:
    with make_llm(llama.path, enable_prompt_embeds=True) as llm:
        first = llm.generate(given(llama_embeds[-1:]), greedy(), use_tqdm=False)[0]
        again = llm.generate(given(llama_embeds[-1:]), greedy(), use_tqdm=False)[0]
        other = llm.generate({"prompt_embeds": llama_embeds[-1].flip(0)}, greedy(), use_tqdm=False)[0]
        # Token 0 is what stands for each of them: a prompt of it finds none of their blocks.
        zeros = llm.generate({"prompt_token_ids": [0] * len(llama_embeds[-1])}, greedy(), use_tqdm=False)[0]
    assert [o.num_cached_tokens for o in (first, again, other, zeros)] == [0, 288, 0, 0]
    assert first.outputs[0].token_ids == again.outputs[0].token_ids == llama.outputs[-1]
    assert other.outputs[0].token_ids != first.outputs[0].token_ids


def test_preemption_changes_nothing(llama: Reference, llama_embeds: list[torch.Tensor]) -> None:
    with make_llm(
        llama.path, enable_prompt_embeds=True, max_model_len=384, max_num_batched_tokens=64,
        num_gpu_blocks_override=small_pool("llama"),
    ) as llm:  # fmt: skip
        assert ids_of(llm, given(llama_embeds)) == llama.outputs
        assert llm.num_preemptions() > 0
        assert llm.kv_cache_usage() == 0.0


def test_scaled_embeddings_are_given_scaled(references: Callable[[str], Reference]) -> None:
    reference = references("gemma3")
    matrix = embedding_of(reference)
    embeds = [{"prompt_embeds": matrix[torch.tensor(prompt)]} for prompt in reference.prompts]
    with make_llm(reference.path, enable_prompt_embeds=True) as llm:
        assert ids_of(llm, embeds) == reference.outputs


def test_two_ranks(llama: Reference, llama_embeds: list[torch.Tensor]) -> None:
    with make_llm(llama.path, enable_prompt_embeds=True, tensor_parallel_size=2) as llm:
        assert ids_of(llm, given(llama_embeds[:4])) == llama.outputs[:4]


def test_a_repetition_penalty_leaves_the_stand_in_token_alone(
    llama: Reference, llama_embeds: list[torch.Tensor]
) -> None:
    """What it does to a prompt's tokens it cannot do where they are not known; token 0 was in no prompt."""
    params = greedy(1, repetition_penalty=1e6, logit_bias={0: 100.0}, logprobs=1)
    with make_llm(llama.path, enable_prompt_embeds=True) as llm:
        assert ids_of(llm, given(llama_embeds[:1]), params) == [[0]]
        assert ids_of(llm, [{"prompt_token_ids": [0, 5]}], params) != [[0]]


def test_forms_of_a_tensor(llama: Reference, llama_embeds: list[torch.Tensor]) -> None:
    one = llama_embeds[5]
    with make_llm(llama.path, enable_prompt_embeds=True) as llm:
        forms = [one.numpy(), one[None], one.T.contiguous().T, one.clone().requires_grad_()]
        assert ids_of(llm, [{"prompt_embeds": form} for form in forms]) == [llama.outputs[5]] * len(forms)
        assert llm.generate(given([one.bfloat16(), one.half()]), SamplingParams(max_tokens=1, detokenize=False))


@pytest.mark.parametrize(
    "embeds, words",
    [
        (lambda size: torch.zeros(3, size + 1), r"must be \[tokens, \d+\] of float32.*float32 \[3, \d+\]"),
        (lambda size: torch.zeros(0, size), r"must be \[tokens"),
        (lambda size: torch.zeros(size), r"must be \[tokens"),
        (lambda size: torch.zeros(2, 3, size), r"must be \[tokens"),
        (lambda size: torch.zeros(3, size, dtype=torch.int64), "float32, bfloat16, float16"),
        (lambda size: torch.zeros(3, size, dtype=torch.complex64), "dtype must be one of"),
        (lambda size: torch.full((3, size), float("nan")), "up to 10000 in size.*nan"),
        (lambda size: torch.full((3, size), float("-inf"), dtype=torch.bfloat16), "up to 10000 in size.*inf"),
        (lambda size: torch.full((3, size), 2e4, dtype=torch.float16), "up to 10000 in size.*20000"),
        (lambda size: "text", "must be a tensor"),
        (lambda size: np.zeros((600, size), np.float32), "maximum context length"),
    ],
)
def test_bad_embeddings_are_refused(llm_of_embeds: Any, embeds: Any, words: str) -> None:
    size = llm_of_embeds.llm_engine.model.hf_config["hidden_size"]
    with pytest.raises(RequestError, match=words) as caught:
        llm_of_embeds.generate({"prompt_embeds": embeds(size)}, use_tqdm=False)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def llm_of_embeds(references: Callable[[str], Reference]) -> Any:
    with make_llm(references("llama").path, enable_prompt_embeds=True) as llm:
        yield llm


def test_what_embeddings_do_not_go_with(llm_of_embeds: Any, llama_embeds: list[torch.Tensor]) -> None:
    with pytest.raises(RequestError, match="without prompt_token_ids, prompt_logprobs and truncate_prompt_tokens"):
        llm_of_embeds.generate(given(llama_embeds[:1]), SamplingParams(prompt_logprobs=1), use_tqdm=False)
    with pytest.raises(RequestError, match="without prompt_token_ids, prompt_logprobs and truncate_prompt_tokens"):
        llm_of_embeds.generate({"prompt_embeds": llama_embeds[0], "prompt_token_ids": [1]}, use_tqdm=False)


def test_they_are_off_unless_asked_for(llama: Reference, llama_embeds: list[torch.Tensor]) -> None:
    with make_llm(llama.path) as llm, pytest.raises(NotSupportedError, match="enable_prompt_embeds is off"):
        llm.generate(given(llama_embeds[:1]), use_tqdm=False)


def test_a_model_that_reads_more_than_embeddings_is_refused(references: Callable[[str], Reference]) -> None:
    with pytest.raises(ConfigError, match="read more of a token than its embedding"):
        make_llm(references("gemma3n").path, enable_prompt_embeds=True)
