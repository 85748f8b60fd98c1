"""Programs that vLLM's pages show run with `pelton` in place of `vllm`; only the model and its sizes are others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pelton
from pelton import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    EngineArgs,
    LLMEngine,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from pelton.config import AttentionConfig, CUDAGraphMode, KVTransferConfig
from pelton.errors import ConfigError, RequestError
from pelton.sampling_params import GuidedDecodingParams
from pelton.testing.models import make_tiny_checkpoint

PROMPTS = ["Hello, my name is", "The president of the United States is"]
SMALL: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": 4 * 2**20}
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama"))


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[int]]:
    return answers(model)


def answers(model: str, params: SamplingParams = GREEDY, **settings: Any) -> list[list[int]]:
    with LLM(model=model, **SMALL, **settings) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_every_name_of_the_package_is_there() -> None:
    assert AsyncLLMEngine is AsyncLLM and AsyncEngineArgs is EngineArgs
    for name in pelton.__all__:
        assert getattr(pelton, name) is not None
    assert set(pelton.__all__) <= set(dir(pelton))
    with pytest.raises(AttributeError, match="no attribute 'Model'"):
        _ = pelton.Model


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"speculative_config": {
                "method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 3, "num_speculative_tokens": 3,
            }},
            id="ngram",
        ),
        pytest.param({"compilation_config": {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"}}, id="graphs"),
        pytest.param({"optimization_level": 0, "dtype": "float"}, id="O0"),
        pytest.param({"attention_config": AttentionConfig(backend="CPU_ATTN"), "swap_space": 0}, id="attention"),
    ],
)  # fmt: skip
def test_settings(model: str, expected: list[list[int]], settings: dict[str, Any]) -> None:
    assert answers(model, **settings) == expected
    assert CUDAGraphMode("FULL_AND_PIECEWISE") is CUDAGraphMode.FULL_AND_PIECEWISE


def test_prefill_and_decode_apart_over_shared_storage(model: str, expected: list[list[int]], tmp_path: Path) -> None:
    storage = {"shared_storage_path": str(tmp_path)}
    transfer = KVTransferConfig(
        kv_connector="SharedStorageConnector", kv_role="kv_both", kv_connector_extra_config=storage
    )
    answers(model, SamplingParams(temperature=0, top_p=0.95, max_tokens=1), kv_transfer_config=transfer)
    assert list(tmp_path.rglob("*.safetensors"))
    with LLM(model=model, **SMALL, kv_transfer_config=transfer) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert outputs[1].num_cached_tokens == 16  # the full block of the longer prompt


def test_guided_decoding(model: str) -> None:
    params = SamplingParams(guided_decoding=GuidedDecodingParams(choice=["Positive", "Negative"]))
    with LLM(model=model, **SMALL) as llm:
        for output in llm.generate(["This sucks", "The weather is beautiful"], params, use_tqdm=False):
            assert output.outputs[0].text in ("Positive", "Negative")


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model=model, **SMALL) as made:
        yield made


def test_typed_prompts(llm: LLM, expected: list[list[int]]) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[1])
    prompts: list[Any] = [TextPrompt(prompt=PROMPTS[0]), TokensPrompt(prompt_token_ids=ids)]
    assert [list(one.outputs[0].token_ids) for one in llm.generate(prompts, GREEDY, use_tqdm=False)] == expected


@pytest.mark.parametrize(("most", "kept"), [(2, 2), (3, 3), (200, 200), (-1, 120)])
def test_a_prompt_is_cut_to_its_end(llm: LLM, most: int, kept: int) -> None:
    prompt = [3 + number % 100 for number in range(200)]
    params = SamplingParams(temperature=0, max_tokens=8, truncate_prompt_tokens=most)
    if kept >= 128:
        with pytest.raises(RequestError, match="maximum context length is 128"):
            llm.generate([prompt], params, use_tqdm=False)
        return
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.prompt_token_ids == prompt[-kept:]
    (alone,) = llm.generate([prompt[-kept:]], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.usefixtures("forks")
def test_engine_args_make_engines(model: str, expected: list[list[int]]) -> None:
    args = EngineArgs(model=model, **SMALL)
    engine = LLMEngine.from_engine_args(args)
    try:
        engine.add_request("0", PROMPTS[0], GREEDY)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
    finally:
        engine.shutdown()
    assert list(outputs[-1].outputs[0].token_ids) == expected[0]

    async def stream() -> list[int]:
        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=model, **SMALL))
        try:
            last = None
            async for output in engine.generate(PROMPTS[0], GREEDY, request_id="0"):
                last = output
            assert last is not None
            return list(last.outputs[0].token_ids)
        finally:
            engine.shutdown()

    assert asyncio.run(stream()) == expected[0]
    with pytest.raises(ConfigError, match="Unknown setting 'max_num_seq'"):
        LLMEngine.from_engine_args(EngineArgs(model=model, max_num_seq=1))


def test_methods_of_workers_are_called_between_steps(llm: LLM, tmp_path: Path) -> None:
    llm.call("worker.start_profile", str(tmp_path))
    llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    trace = Path(llm.call("worker.stop_profile", timeout_s=300.0))
    assert trace.parent == tmp_path and trace.stat().st_size > 0
    assert llm.call("kv_cache_usage") == 0.0
    with pytest.raises(RequestError, match="has no method 'fly'"):
        llm.call("worker.fly")
