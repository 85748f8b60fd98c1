"""Tensor parallelism over processes of this host: greedy ids equal transformers' float32 greedy ids, whatever happens to the batch."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from pelton_e2e import (
    Reference,
    eventually,
    generate,
    greedy,
    greedy_reference,
    make_llm,
    processes_of,
    ranks_below,
    references_in,
    serving,
)
from pelton_forked import ExecPopen
from pelton_lora import merged_checkpoint
from pelton_pages import settings

from pelton import LLM, LoRARequest, SamplingParams
from pelton.errors import ConfigError
from pelton.sampling_params import StructuredOutputsParams
from pelton.testing.models import make_tiny_checkpoint

NUM_TOKENS = 10
LENGTHS = (1, 9, 16, 33, 125, 200)  # half of the prompts go on over an end of a block
# All tokens kept and a window, latents with experts, caches that layers share. All families with the shares of two ranks:
# plugins/models/test_sharding.py.
FAMILIES = ("gemma3", "deepseek_v3_moe", "gemma4")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    return references_in(tmp_path_factory, NUM_TOKENS, LENGTHS, with_tokenizer=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_answer_as_transformers(
    made: Callable[[str], Reference], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/parallelism.md starts them: batched, with recorded steps; then each prompt alone, chunked, with prefix hits. The first
    family's ranks are started by `exec`."""
    if family == FAMILIES[0]:
        monkeypatch.setattr(subprocess, "Popen", ExecPopen)
    reference = made(family)
    with make_llm(reference.path, **settings("parallelism.md", "-tp"), max_num_batched_tokens=48) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        alone = [generate(llm, [prompt], greedy(NUM_TOKENS))[0] for prompt in reference.prompts[3:]]
        assert alone == reference.outputs[3:]
        assert llm.kv_cache_usage() == 0.0


def test_ranks_that_sample_a_share_of_the_rows_each(tmp_path: Path) -> None:
    """With as many tokens as eight rows' logits make 1 MiB of a rank. More requests, fewer, and drafts."""
    path = str(make_tiny_checkpoint(tmp_path / "model", "llama", with_tokenizer=False, vocab_size=65_536))
    prompts = [{"prompt_token_ids": [3 + number, 9, 60_000 + number, 7]} for number in range(13)]
    params = [
        SamplingParams(
            temperature=0.0 if number % 4 == 3 else 0.8, seed=number, max_tokens=4 + number, ignore_eos=True,
            top_k=50 if number % 3 == 0 else 0, top_p=0.9 if number % 2 else 1.0, logprobs=2 if number % 5 == 0 else None,
            frequency_penalty=0.5 if number % 3 == 1 else 0.0, prompt_logprobs=1 if number == 4 else None,
        )
        for number in range(13)
    ]  # fmt: skip
    found = []
    for sizes in ({}, {"tensor_parallel_size": 2}):
        with make_llm(path, **sizes, max_num_seqs=13) as llm:
            found.append([output.outputs[0] for output in llm.generate(prompts, params)])
    assert [one.token_ids for one in found[1]] == [one.token_ids for one in found[0]]
    for alone, shared in zip(*found, strict=True):
        assert (alone.logprobs is None) == (shared.logprobs is None)
        for mine, theirs in zip(alone.logprobs or (), shared.logprobs or (), strict=True):
            assert {token: one.rank for token, one in mine.items()} == {
                token: one.rank for token, one in theirs.items()
            }
            for token, one in mine.items():
                assert theirs[token].logprob == pytest.approx(one.logprob, abs=1e-3)


def test_two_ranks_with_adapters_and_asleep(made: Callable[[str], Reference], tmp_path: Path) -> None:
    """Each rank holds its part of an adapter, whose requests answer as merged weights do."""
    reference = made("llama")
    adapter, merged = merged_checkpoint(tmp_path, reference.path, seed=3, rank=8, strength=0.05)
    expected, _ = greedy_reference(merged, reference.prompts, NUM_TOKENS)
    assert expected != reference.outputs
    prompts = [{"prompt_token_ids": prompt} for prompt in reference.prompts]
    with make_llm(reference.path, tensor_parallel_size=2, enable_lora=True) as llm:
        for level in (0, 1, 2):
            if level:
                llm.sleep(level)
                llm.wake_up()
            lora = [LoRARequest("own", 1, adapter) if place % 2 else None for place in range(len(prompts))]
            outputs = llm.generate(prompts, greedy(NUM_TOKENS), use_tqdm=False, lora_request=lora)
            for place, output in enumerate(outputs):
                wanted = (expected if place % 2 else reference.outputs)[place]
                assert output.error is None and list(output.outputs[0].token_ids) == wanted


def test_ranks_with_whole_experts_answer_as_transformers(made: Callable[[str], Reference]) -> None:
    """Attention is shared as without expert parallelism. Experts that all tokens take: test_pipeline_parallel, in stages of two ranks."""
    reference = made("gpt_oss")
    with make_llm(
        reference.path, tensor_parallel_size=2, enable_expert_parallel=True, max_num_batched_tokens=48
    ) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


def test_experts_that_a_model_does_not_have_are_refused(made: Callable[[str], Reference]) -> None:
    with pytest.raises(
        ConfigError, match=r"enable_expert_parallel is set, .*LlamaForCausalLM\) has no experts: .* Leave it off"
    ):
        make_llm(made("llama").path, tensor_parallel_size=2, enable_expert_parallel=True)


def test_four_ranks_with_preemption_and_without_overlap(made: Callable[[str], Reference]) -> None:
    """Two heads of keys on four ranks: two ranks hold each."""
    reference = made("llama")
    with make_llm(
        reference.path, tensor_parallel_size=4, max_model_len=256, max_num_batched_tokens=64, num_gpu_blocks_override=21,
        async_scheduling=False, enforce_eager=True,
    ) as llm:  # fmt: skip
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        assert llm.num_preemptions() > 0


def test_all_ranks_sample_the_same(made: Callable[[str], Reference]) -> None:
    """What one rank samples by itself is what two do: with seeds, filters, penalties, logprobs, `n`, and under a grammar."""
    prompts = [{"prompt_token_ids": prompt} for prompt in made("llama").prompts]
    params = [
        SamplingParams(temperature=0.9, seed=7, top_k=20, top_p=0.9, presence_penalty=0.4, logprobs=2, n=2, max_tokens=20),
        SamplingParams(temperature=1.0, seed=3, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[a-c]{9}")),
    ]  # fmt: skip

    def answers(**settings: Any) -> list[Any]:
        with LLM(
            model=made("llama").path, dtype="float32", max_model_len=512, kv_cache_memory_bytes=2**26, **settings
        ) as llm:
            return [
                [list(one.token_ids) for one in output.outputs]
                for each in params for output in llm.generate(prompts, each, use_tqdm=False)
            ]  # fmt: skip

    assert answers(tensor_parallel_size=2) == answers()


def test_a_killed_rank_ends_its_requests_and_the_engine_comes_back(
    made: Callable[[str], Reference], tmp_path: Path
) -> None:
    reference = made("llama")
    flags = ["-tp", "2", "--dtype", "float32", "--max-model-len", "512"]
    with serving(reference.path, *flags, log=tmp_path / "log") as (url, process):
        body = {"model": reference.path, "prompt": reference.prompts[2], "max_tokens": NUM_TOKENS, "ignore_eos": True,
                "temperature": 0, "return_token_ids": True}  # fmt: skip

        def ask(**more: Any) -> httpx.Response:
            return httpx.post(f"{url}/v1/completions", json=body | more, timeout=60)

        assert ask().json()["choices"][0]["token_ids"] == reference.outputs[2]
        assert processes_of(process.pid) == {"server": 1, "engine": 1, "rank": 2}, "as docs/parallelism.md says"

        def rest_of_a_stream() -> str:
            """What comes after a rank was killed, which may be the end of all where the server has been quicker."""
            (victim, *_) = ranks_below(process.pid)
            with httpx.stream(
                "POST", f"{url}/v1/completions", json=body | {"max_tokens": 300, "stream": True}, timeout=60
            ) as stream:
                lines = stream.iter_lines()
                next(lines)
                os.kill(victim, signal.SIGKILL)
                found = "".join(lines)
            assert eventually(lambda: victim not in ranks_below(process.pid) and ask().status_code == 200)
            return found

        for _ in range(5):
            found = rest_of_a_stream()
            if "was killed by SIGKILL" in found:
                break
            assert '"error"' not in found, found
        assert "was killed by SIGKILL" in found
        assert ask().json()["choices"][0]["token_ids"] == reference.outputs[2]
