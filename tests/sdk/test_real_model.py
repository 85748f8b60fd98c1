"""A small Llama with random weights: the same tokens in this process, in another, and through `AsyncLLM`."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pelton import LLM, AsyncLLM, SamplingParams
from pelton.engine.process_client import ProcessClient
from pelton.errors import EngineDeadError

PROMPTS = [[5, 6, 7], [9] * 40, [200, 1, 3, 17]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def real(model_folder: Path) -> dict[str, Any]:
    return {
        "model": str(model_folder), "load_format": "dummy", "max_num_seqs": 4, "kv_cache_memory_bytes": 2**20,
        "disable_log_stats": True,
    }  # fmt: skip


def test_the_layout_of_processes_does_not_change_the_tokens(real: dict[str, Any]) -> None:
    with LLM(**real) as llm:
        expected = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        assert llm.kv_cache_usage() == 0.0
    with LLM(engine_process=True, **real) as llm:
        assert [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == expected
        assert llm.kv_cache_usage() == 0.0
        process = llm.llm_engine.client._connection.process
    assert process.returncode == 0  # it has ended by itself, torch and all
    assert len({tuple(ids) for ids in expected}) == len(PROMPTS)


@pytest.mark.usefixtures("forks")
async def test_the_engine_comes_back_with_its_model(real: dict[str, Any]) -> None:
    async def ids(llm: AsyncLLM, prompt: list[int]) -> list[int]:
        async for output in llm.generate(prompt, GREEDY):
            last = list(output.outputs[0].token_ids)
        return last

    async with AsyncLLM.from_flat(**real) as llm:
        before = await asyncio.gather(*(ids(llm, prompt) for prompt in PROMPTS))
        assert isinstance(llm._client, ProcessClient)
        os.kill(llm._client.pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while llm.is_healthy:  # until the death is noticed
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError):
            await ids(llm, PROMPTS[0])
        while not llm.is_healthy and time.monotonic() < end:
            await asyncio.sleep(0.05)
        assert await asyncio.gather(*(ids(llm, prompt) for prompt in PROMPTS)) == before
