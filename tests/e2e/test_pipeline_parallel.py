"""Pipeline parallelism over processes of this host: greedy ids equal transformers' float32 greedy ids."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from pelton_e2e import Reference, generate, greedy, make_llm, references_in

from pelton import LLM, SamplingParams
from pelton.executor.interface import StepHandle
from pelton.messages.step import SchedulerOutput
from pelton.sampling_params import StructuredOutputsParams
from pelton_plugins.executors.multiproc.executor import MultiProcExecutor
from pelton_plugins.executors.multiproc.messages import StepDone

NUM_TOKENS = 10
LENGTHS = (1, 9, 16, 33, 125, 200)  # half of the prompts go on over an end of a block


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    return references_in(tmp_path_factory, NUM_TOKENS, LENGTHS, with_tokenizer=True)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Steps as the engine opens and closes them."""
    found = Steps()
    execute, settle = MultiProcExecutor.execute, MultiProcExecutor._settle

    def executes(self: MultiProcExecutor, output: SchedulerOutput) -> StepHandle:
        sampled = {slot for slot, is_last in zip(output.slots, output.samples, strict=True) if is_last}
        found.most_together = max(
            found.most_together, sum(not sampled & other for other in list(found.open.values())) + 1
        )
        found.open[output.step_id] = sampled
        return execute(self, output)

    def settles(self: MultiProcExecutor, answer: StepDone) -> None:
        found.open.pop(answer.step_id, None)
        settle(self, answer)

    monkeypatch.setattr(MultiProcExecutor, "execute", executes)
    monkeypatch.setattr(MultiProcExecutor, "_settle", settles)
    return found


class Steps:
    def __init__(self) -> None:
        self.open: dict[int, set[int]] = {}  # by step, the slots of rows that sample
        self.most_together = 0  # open steps of different requests


@pytest.mark.parametrize("family", ["cohere2", "olmo2", "glm4", "gemma4"])
def test_two_stages_answer_as_transformers(made: Callable[[str], Reference], family: str, steps: Steps) -> None:
    """Batched, with recorded steps and one in each stage; then each prompt alone, chunked, with prefix hits. cohere2: only the last stage
    has a layer without a window. olmo2: layers hand over no residual; of its four each stage has two: what the ranks hold together is
    one model, and room for twice the tokens of one rank. glm4, as gemma3: a layer's output has a norm that the next one applies.
    gemma4: the inputs of later layers too; the last six share caches."""
    reference = made(family)
    with make_llm(reference.path, pipeline_parallel_size=2, max_num_batched_tokens=48) as llm:
        staged = weights_and_blocks(llm)
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        alone = [generate(llm, [prompt], greedy(NUM_TOKENS))[0] for prompt in reference.prompts[3:]]
        assert alone == reference.outputs[3:]
        assert llm.kv_cache_usage() == 0.0
    assert steps.most_together >= 2
    if family == "olmo2":
        with make_llm(reference.path, max_num_batched_tokens=48, enforce_eager=True) as llm:
            whole = weights_and_blocks(llm)
        assert whole[0] <= staged[0] <= 1.01 * whole[0]  # the last norm is small, and everywhere
        assert staged[1] == 2 * whole[1]


def test_one_step_at_a_time(made: Callable[[str], Reference], steps: Steps) -> None:
    """With overlap off: the same ids."""
    reference = made("llama")
    with make_llm(reference.path, pipeline_parallel_size=2, async_scheduling=False) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
    assert steps.most_together == 1


REGEX = "[a-f]{4,12}[0-9]{2}"


def test_stages_answer_whatever_is_asked_as_one_device_does(made: Callable[[str], Reference], steps: Steps) -> None:
    """Logprobs of prompts and tokens, stop strings, random numbers, penalties, grammars: all at once."""
    reference = made("llama")
    settings: dict[str, Any] = {"skip_tokenizer_init": False, "max_num_batched_tokens": 48}
    plain = {"max_tokens": 12, "ignore_eos": True}
    with make_llm(reference.path, **settings) as llm:
        text = llm.generate([tokens_of(reference.prompts[3])], SamplingParams(temperature=0.0, **plain), use_tqdm=False)
        stop = text[0].outputs[0].text[4:7]
        asked = [
            SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2, **plain),
            SamplingParams(temperature=1.0, seed=3, top_k=20, logprobs=1, **plain),
            SamplingParams(temperature=0.0, structured_outputs=StructuredOutputsParams(regex=REGEX), max_tokens=30),
            SamplingParams(temperature=0.0, stop=[stop], **plain),
            SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5, **plain),
            SamplingParams(
                temperature=1.0, seed=4, structured_outputs=StructuredOutputsParams(regex=REGEX), max_tokens=30
            ),
        ]
        expected = [told(output) for output in ask(llm, reference, asked)]
    with make_llm(reference.path, pipeline_parallel_size=2, **settings) as llm:
        found = [told(output) for output in ask(llm, reference, asked)]
    assert steps.most_together >= 2
    for (text, numbers), (other_text, other_numbers) in zip(found, expected, strict=True):
        assert text == other_text
        assert numbers == pytest.approx(other_numbers, abs=1e-4)
    assert all(re.search(f"{REGEX}$", found[place][0][0]) for place in (2, 5))
    assert expected[3][0][1] == stop


def tokens_of(prompt: list[int]) -> Any:
    return {"prompt_token_ids": prompt}


def ask(llm: LLM, reference: Reference, params: list[SamplingParams]) -> list[Any]:
    return llm.generate([tokens_of(prompt) for prompt in reference.prompts], params, use_tqdm=False)


def told(output: Any) -> tuple[tuple[str, Any, list[int]], list[float]]:
    """What it says, and the logprobs that it tells."""
    assert output.error is None, output.error
    one = output.outputs[0]
    places = [*(output.prompt_logprobs or []), *(one.logprobs or [])]
    numbers = [value.logprob for place in places if place for _, value in sorted(place.items())]
    return (one.text, one.stop_reason, list(one.token_ids)), numbers


def test_stages_of_two_ranks_with_whole_experts(made: Callable[[str], Reference]) -> None:
    reference = made("deepseek_v3_moe")
    with make_llm(reference.path, pipeline_parallel_size=2, tensor_parallel_size=2, enable_expert_parallel=True) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


def test_stages_of_two_ranks_with_several_streams(made: Callable[[str], Reference]) -> None:
    """The largest gates are found over the columns of both ranks."""
    reference = made("gemma3n")
    sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    with make_llm(reference.path, **sizes, max_num_batched_tokens=48) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        assert generate(llm, reference.prompts[4:], greedy(NUM_TOKENS)) == reference.outputs[4:]  # with prefix hits


def test_unequal_stages_with_preemption_and_drafts(made: Callable[[str], Reference]) -> None:
    reference = made("llama")
    with make_llm(
        reference.path, pipeline_parallel_size=3, pipeline_layer_partition=(1, 2, 1), max_model_len=256,
        max_num_batched_tokens=64, num_gpu_blocks_override=21,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    ) as llm:  # fmt: skip
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        assert llm.num_preemptions() > 0


def weights_and_blocks(llm: LLM) -> tuple[int, int]:
    info = llm.llm_engine.info
    return info.report.weights_bytes, info.num_blocks
