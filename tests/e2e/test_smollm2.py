"""The demo model, from its GGUF, says sensible things and says them alike in every way of asking."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pelton import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(model="smollm2", dtype="bfloat16", max_model_len=1024, max_num_seqs=8, disable_log_stats=True) as llm:
        yield llm


@pytest.mark.parametrize(
    "question, word",
    [
        pytest.param("What is the capital of France?", "Paris", id="paris"),
        pytest.param("What is the opposite of hot?", "cold", id="opposite"),
        pytest.param("How many days are in a week? Answer with a number.", "7", id="week"),
    ],
)
def test_answers_are_sensible(llm: LLM, question: str, word: str) -> None:
    [output] = llm.chat(
        [{"role": "user", "content": question}], SamplingParams(temperature=0, max_tokens=48), use_tqdm=False
    )
    text = output.outputs[0].text
    assert word in text, text
    assert "<|im_end|>" not in text
    assert output.outputs[0].finish_reason in ("stop", "length")


def test_stop_string_cuts_and_frees(llm: LLM) -> None:
    prompt = "Count: one, two, three,"
    [free] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    stop = free.outputs[0].text[10:14]
    [cut] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24, stop=[stop]), use_tqdm=False)
    assert cut.outputs[0].text == free.outputs[0].text[: free.outputs[0].text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)


def test_logprobs_of_prompt_and_output(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2)
    [output] = llm.generate("The sky is", params, use_tqdm=False)
    sampled = output.outputs[0]
    assert sampled.logprobs is not None and output.prompt_logprobs is not None
    for token_id, row in zip(sampled.token_ids, sampled.logprobs, strict=True):
        assert row[token_id].rank == 1 and row[token_id].logprob == max(lp.logprob for lp in row.values()) <= 0
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
