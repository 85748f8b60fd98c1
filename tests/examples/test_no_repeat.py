"""The example logits processor: transformers as its oracle, with everything that may happen to a batch, and over HTTP."""

from __future__ import annotations

import httpx
import pytest
import torch
from pelton_e2e import make_prompts, serving

from pelton import LLM, SamplingParams
from pelton.errors import RequestError
from pelton.testing.models import VOCAB_SIZE, load_reference, make_tiny_checkpoint

NUM_TOKENS = 40
SMALL = {"max_num_seqs": 4, "max_model_len": 128, "num_gpu_blocks_override": 64, "disable_log_stats": True}
LENGTHS = (2, 5, 17, 33)
ARGS = (2, None, 1, 3)
"""Of each prompt; None: without the processor."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama"))


@pytest.fixture(scope="module")
def prompts():
    rows = make_prompts(VOCAB_SIZE, LENGTHS)
    return [row[: len(row) // 2] * 2 + row[: len(row) % 2] for row in rows]  # with n-grams that come again


@pytest.fixture(scope="module")
def expected(llama, prompts):
    model = load_reference(llama)
    found = []
    for prompt, n in zip(prompts, ARGS, strict=True):
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False,
            no_repeat_ngram_size=n or 0, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        found.append(ids[0, len(prompt) :].tolist())
    assert all(
        model.generate(
            torch.tensor([p]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None
        )[0, len(p) :].tolist()
        != ids
        for p, n, ids in zip(prompts, ARGS, found, strict=True)
        if n is not None
    ), "the processor has something to do"
    return found


def params_of(size, **more):
    given = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **more}
    return SamplingParams(**given, logits_processor_args=None if size is None else {"no_repeat": size})


def generate(llm, prompts, params):
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="overlapped"),
        pytest.param({"async_scheduling": False, "max_num_batched_tokens": 16}, id="chunked"),
        pytest.param({"num_gpu_blocks_override": 11, "enable_prefix_caching": False}, id="preempted"),
        pytest.param({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, id="drafts-of-the-host"),
        pytest.param(
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "drafts_on_device": True}},
            id="drafts-of-the-device",
        ),
        pytest.param({"enforce_eager": True}, id="without-graphs"),
    ],
)
def test_greedy_ids_equal_transformers(installed, llama, prompts, expected, settings):
    """Rows with and without the processor in one batch, twice: the second time from the prefix cache."""
    with LLM(model=llama, **{**SMALL, **settings}) as llm:
        for _ in range(2):
            assert generate(llm, prompts, [params_of(n) for n in ARGS]) == expected


def test_random_rows_samples_and_logprobs(installed, llama, prompts):
    """Each of n samples is that of its own seed; logprobs are the model's own; others sample what they do alone."""
    random = {"temperature": 1.0, "seed": 5, "top_p": 0.9}
    plain, steered = params_of(None, **random, logprobs=3), params_of(1, **random, logprobs=3, n=2)
    with LLM(model=llama, **SMALL) as llm:
        both = llm.generate([{"prompt_token_ids": prompts[0]}] * 2, [plain, steered], use_tqdm=False)
        (alone,) = llm.generate({"prompt_token_ids": prompts[0]}, plain, use_tqdm=False)
        assert both[0].outputs[0].token_ids == alone.outputs[0].token_ids
        for sample in both[1].outputs:
            text = prompts[0] + list(sample.token_ids)
            assert len(set(text[len(prompts[0]) :])) == NUM_TOKENS, "no token occurs twice"
            (checked,) = llm.generate(
                {"prompt_token_ids": text},
                SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=3),
                use_tqdm=False,
            )
            for token, own, of_prompt in zip(
                sample.token_ids, sample.logprobs, checked.prompt_logprobs[len(prompts[0]) :], strict=True
            ):
                assert own[token].logprob == pytest.approx(of_prompt[token].logprob, abs=1e-4)
        assert both[1].outputs[0].token_ids != both[1].outputs[1].token_ids


def test_bans_hold_behind_it(installed, llama, prompts):
    """Bias, allowed tokens and penalties come after the processor, which cannot lift them."""
    params = params_of(1, allowed_token_ids=list(range(20, 20 + NUM_TOKENS)))
    with LLM(model=llama, **SMALL) as llm:
        (ids,) = generate(llm, [[5, 6]], params)
        assert sorted(ids) == list(range(20, 20 + NUM_TOKENS))
        (failed,) = llm.generate({"prompt_token_ids": [5, 6]}, params_of(1, allowed_token_ids=[20]), use_tqdm=False)
        assert "forbid all of them" in failed.error.message
        assert len(generate(llm, [prompts[0]], params_of(2))[0]) == NUM_TOKENS


@pytest.mark.usefixtures("forks")
def test_an_engine_in_another_process_has_it_too(installed, llama, prompts, expected):
    with LLM(model=llama, engine_process=True, **SMALL) as llm:
        assert generate(llm, prompts[:1], params_of(2)) == expected[:1]


def test_over_http_by_either_field(installed, llama, prompts, expected, tmp_path):
    body = {
        "prompt": prompts[0], "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    with serving(llama, "--max-num-seqs", "4", "--max-model-len", "128", log=tmp_path / "log") as (url, _):

        def ask(**more):
            return httpx.post(f"{url}/v1/completions", json={"model": llama, **body, **more}, timeout=60)

        for given in ({"logits_processor_args": {"no_repeat": 2}}, {"vllm_xargs": {"no_repeat": 2}}):
            reply = ask(**given)
            assert reply.status_code == 200, reply.text
            assert reply.json()["choices"][0]["token_ids"] == expected[0]
        bad = ask(logits_processor_args={"no_repeat": 0})
        assert bad.status_code == 400 and bad.json()["error"]["param"] == "logits_processor_args.no_repeat"
        unknown = ask(logits_processor_args={"no_repeats": 2})
        assert unknown.status_code == 400 and "Did you mean 'no_repeat'?" in unknown.json()["error"]["message"]
        assert ask(logits_processor_args={"x": "y" * 70_000}).status_code == 400


def test_without_the_package_its_name_is_unknown(llama):
    with (
        LLM(model=llama, **SMALL) as llm,
        pytest.raises(RequestError, match=r"names 'no_repeat', which no plugin here offers\. There is: none"),
    ):
        generate(llm, [[5, 6]], params_of(2))
