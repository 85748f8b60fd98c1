"""Beam search: the beams that transformers finds, however the engine runs."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from pelton import LLM, AsyncLLM, BeamSearchParams
from pelton.errors import DeadlineExceededError, RequestError
from pelton.outputs import CompletionOutput, Logprob, RequestOutput
from pelton.sdk.beam_search import BeamSearch
from pelton.testing.models import make_tiny_checkpoint

PROMPTS = [[5, 6, 7], [9] * 20, [200, 1, 3, 17]]
PARAMS = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("beams"), "llama")
    return {
        "model": str(path),
        "dtype": "float32",
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 2**20,
        "disable_log_stats": True,
    }


@pytest.fixture(scope="module")
def reference(settings):
    """(tokens, sum of logprobs) of each beam."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        out = model.generate(
            torch.tensor([prompt]), num_beams=3, num_return_sequences=3, max_new_tokens=6, min_new_tokens=6, do_sample=False,
            return_dict_in_generate=True, output_scores=True, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        rows = zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True)
        found.append([(ids[len(prompt) :], score * 6) for ids, score in rows])
    return found


def check(outputs, reference):
    for output, expected in zip(outputs, reference, strict=True):
        assert [beam.own_tokens for beam in output.sequences] == [tokens for tokens, _ in expected]
        for beam, (_, score) in zip(output.sequences, expected, strict=True):
            assert math.isclose(beam.cum_logprob, score, abs_tol=1e-3)
            assert beam.finish_reason == "length" and isinstance(beam.text, str)


def test_the_beams_are_those_of_transformers(settings, reference):
    with LLM(**settings) as llm:
        check(llm.beam_search(PROMPTS, PARAMS), reference)
        assert llm.kv_cache_usage() == 0.0
        long = llm.beam_search([[5] * 500], BeamSearchParams(beam_width=2, max_tokens=10_000))
        assert {len(beam.tokens) for beam in long[0].sequences} <= set(range(501, 513))
        with pytest.raises(RequestError, match="max_logprobs"):
            llm.beam_search(PROMPTS, BeamSearchParams(beam_width=11, max_tokens=2))


@pytest.mark.usefixtures("forks")
async def test_the_asynchronous_engine_finds_the_same(settings, reference):
    async with AsyncLLM.from_flat(**settings) as llm:
        check([await llm.beam_search(prompt, PARAMS) for prompt in PROMPTS], reference)


def step(*rows):
    """Outputs of one step: a row of logprobs for each live beam."""
    return [
        RequestOutput(
            "r",
            None,
            [],
            [CompletionOutput(0, "", [0], logprobs=[{t: Logprob(v, 1, None) for t, v in row.items()}])],
            True,
        )
        for row in rows
    ]


def test_an_ended_beam_waits_for_longer_ones_and_is_scored_by_its_length():
    search = BeamSearch([1], BeamSearchParams(beam_width=2, max_tokens=3, length_penalty=1.0), [0], 100)
    search.take(step({0: -0.5, 2: -0.6, 3: -3.0, 4: -9.0}))
    assert [beam.own_tokens for beam in search.live] == [[2], [3]]
    search.take(step({2: -0.1, 0: -5.0, 3: -6.0, 4: -7.0}, {2: -0.1, 3: -8.0, 4: -8.0, 5: -8.0}))
    search.take(step({2: -0.1, 3: -9.0, 4: -9.0, 5: -9.0}, {2: -0.1, 3: -9.0, 4: -9.0, 5: -9.0}))
    assert not search.live
    best, second = search.result(None).sequences
    assert (best.own_tokens, best.finish_reason) == ([2, 2, 2], "length")  # -0.8 / 3
    assert (second.own_tokens, second.finish_reason, second.stop_reason) == ([0], "stop", 0)  # -0.5 / 1


@pytest.mark.parametrize(
    "field, value", [("beam_width", 0), ("beam_width", 129), ("max_tokens", 0), ("length_penalty", math.inf)]
)
def test_bad_parameters_are_named(field, value):
    with pytest.raises(RequestError, match=field):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, field: value})


def test_vllms_import_of_the_parameters():
    from pelton.sampling_params import BeamSearchParams as at_vllms_place

    assert at_vllms_place is BeamSearchParams


def test_tokens_of_a_beams_logprobs_have_their_texts(settings):
    with LLM(**settings) as llm:
        (output,) = llm.beam_search([[5, 6, 7]], BeamSearchParams(beam_width=2, max_tokens=2, ignore_eos=True))
        tokenizer = llm.get_tokenizer()
        for beam in output.sequences:
            assert len(beam.logprobs) == 2
            for row in beam.logprobs:
                assert {token: one.decoded_token for token, one in row.items()} == {
                    token: tokenizer.token_text(token) for token in row
                }


@pytest.mark.usefixtures("forks")
async def test_the_time_limit_is_that_of_all_steps_together(settings):
    async with AsyncLLM.from_flat(**settings) as llm:
        long = BeamSearchParams(beam_width=4, max_tokens=400, ignore_eos=True)
        began = time.monotonic()
        with pytest.raises(DeadlineExceededError, match=r"time limit of 0\.1 s"):
            await llm.beam_search([5, 6, 7], long, timeout_s=0.1)
        assert time.monotonic() - began < 5  # 400 steps take longer
        with pytest.raises(RequestError, match="timeout_s must be a number of seconds"):
            await llm.beam_search([5, 6, 7], long, timeout_s=-1.0)
        while llm.num_unfinished_requests:
            await asyncio.sleep(0.01)
        assert len((await llm.beam_search([5, 6, 7], PARAMS)).sequences) == 3
