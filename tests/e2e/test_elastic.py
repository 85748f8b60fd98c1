"""Another number of engines while they serve: greedy ids equal transformers' float32 greedy ids before, meanwhile and afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from pelton_e2e import Reference, eventually, generate, greedy, make_llm, references_in

from pelton import AsyncLLM
from pelton.errors import EngineDeadError, EngineError, RequestError

NUM_TOKENS = 10
LENGTHS = (1, 9, 16, 33, 125, 200)  # half of the prompts go on over an end of a block


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    return references_in(tmp_path_factory, NUM_TOKENS, LENGTHS)


def engines_told_of(llm: Any) -> set[str]:
    return {metric.labels["engine"] for metric in llm.get_metrics() if "engine" in metric.labels}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        pytest.param("llama", (1, 2, 1), id="whole-models"),
        pytest.param("qwen3_moe", (1, 3, 2), id="shared-experts"),
    ],
)
def test_ids_with_each_number_of_engines(made: Callable[[str], Reference], family: str, sizes: tuple[int, ...]) -> None:
    reference = made(family)
    settings = {"data_parallel_size": sizes[0], "enable_expert_parallel": family != "llama"}
    with make_llm(
        reference.path, **settings, enable_elastic_ep=True, max_num_batched_tokens=48, disable_log_stats=False
    ) as llm:
        for size in sizes:
            llm.scale_elastic_ep(size)
            assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
            assert generate(llm, reference.prompts[-1:], greedy(NUM_TOKENS)) == reference.outputs[-1:]
            assert engines_told_of(llm) == {str(engine) for engine in range(size)}
        engines = llm.llm_engine.client._engines
        lives = {one: one.client.pid for one in (engines[-1:] if family == "llama" else engines)}
        os.kill(engines[-1].client.pid, signal.SIGKILL)
        assert eventually(lambda: all(one.client.pid != life for one, life in lives.items()))
        assert eventually(lambda: all(one.is_up and one.client.error is None for one in engines))
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        assert llm.kv_cache_usage() == 0.0


def flat(reference: Reference, **more: Any) -> AsyncLLM:
    return AsyncLLM.from_flat(
        model=reference.path, dtype="float32", skip_tokenizer_init=True, max_model_len=512, max_num_seqs=16,
        kv_cache_memory_bytes=64 * 2**20, disable_log_stats=True, enable_elastic_ep=True, **more,
    )  # fmt: skip


async def ids(llm: AsyncLLM, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    """Greedy ones; a request that comes while no engine takes any is sent again, as its error says."""
    while True:
        try:
            outputs = [output async for output in llm.generate({"prompt_token_ids": prompt}, greedy(num_tokens))]
            return list(outputs[-1].outputs[0].token_ids)
        except EngineDeadError as error:
            assert error.status == 503 and "refused" in str(error)
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("family", "sizes"), [pytest.param("llama", (2, 3, 1), id="whole-models"), pytest.param("qwen3_moe", (2, 3, 2), id="shared-experts")]
)  # fmt: skip
async def test_requests_that_run_while_the_number_changes(
    made: Callable[[str], Reference], family: str, sizes: tuple[int, ...]
) -> None:
    reference = made(family)
    async with flat(reference, data_parallel_size=sizes[0], enable_expert_parallel=family != "llama") as llm:
        for size in sizes[1:]:
            before = [asyncio.create_task(ids(llm, prompt)) for prompt in reference.prompts]
            await asyncio.sleep(0)
            changing = asyncio.create_task(llm.scale_elastic_ep(size, 60.0))
            meanwhile: list[asyncio.Task[list[int]]] = []
            while not changing.done():
                meanwhile += [asyncio.create_task(ids(llm, prompt)) for prompt in reference.prompts[:3]]
                await asyncio.wait([*meanwhile, changing], timeout=1)
            await changing
            assert [await task for task in before] == reference.outputs
            assert [await task for task in meanwhile] == reference.outputs[:3] * (len(meanwhile) // 3)
            assert [await ids(llm, prompt) for prompt in reference.prompts] == reference.outputs
        long = [asyncio.create_task(ids(llm, prompt, 400)) for prompt in reference.prompts[:2]]
        await asyncio.sleep(0.1)
        await llm.scale_elastic_ep(sizes[-1] + 1, 0.0)
        ended = await asyncio.gather(*long, return_exceptions=True)
        if family == "llama":
            assert all(isinstance(one, list) for one in ended), "those that stay notice nothing"
        for one in ended:
            if isinstance(one, BaseException):
                assert isinstance(one, EngineError) and one.status == 503 and "Send it again" in str(one)
        assert [await ids(llm, prompt) for prompt in reference.prompts] == reference.outputs


def test_a_number_that_experts_do_not_go_with_changes_nothing(made: Callable[[str], Reference]) -> None:
    """There are fewer experts than ranks: the engines that were there start again."""
    reference = made("qwen3_moe")
    with make_llm(
        reference.path, data_parallel_size=2, enable_expert_parallel=True, enable_elastic_ep=True,
        eplb_config={"enable_eplb": True, "num_redundant_experts": 2, "step_interval": 12, "window_size": 8},
    ) as llm:  # fmt: skip
        with pytest.raises(
            RequestError, match=r"1 engines did not start, and there are 2 as before.*enable_eplb is set"
        ):
            llm.scale_elastic_ep(1)
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


def test_an_engine_that_is_alone_in_this_process(made: Callable[[str], Reference]) -> None:
    with (
        make_llm(made("llama").path) as llm,
        pytest.raises(RequestError, match="with enable_elastic_ep scale_elastic_ep"),
    ):
        llm.scale_elastic_ep(2)
