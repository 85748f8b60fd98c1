"""Every way in which the CPU computes gives the same: C for each instruction set, and torch (oneDNN) where there is no C.

float32 equals transformers token for token; log-probabilities of 16 bits lie as near to the float32 model as transformers'
own in that dtype do, up to a quarter more in the mean (pelton_precision).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from pelton_e2e import (
    GapReference,
    Reference,
    gap_reference,
    generate,
    greedy,
    make_llm,
    make_prompts,
    small_pool,
)
from pelton_isas import AVAILABLE, DIFFERENT, FLOAT32_PATHS, TORCH
from pelton_precision import assert_near_float32

from pelton import SamplingParams
from pelton.testing.models import make_tiny_checkpoint
from pelton_backends.native import library
from pelton_backends.native.backend import NativeBackend
from pelton_backends.native.sampling import NativeLogprobs, NativeSample
from pelton_platforms.device.steps.step_sampler import StepSampler

BEST = AVAILABLE[-1]
PATHS = (*DIFFERENT, TORCH)


def over_paths(paths: Sequence[str], *families: str) -> pytest.MarkDecorator:
    """Llama and Gemma 3 by each path (heads alone; norms of queries and keys, windows, soft caps), others by the best one."""
    both = [(family, path) for family in ("llama", "gemma3") for path in paths]
    return pytest.mark.parametrize("family, path", both + [(family, BEST) for family in families], indirect=["path"])


@over_paths(FLOAT32_PATHS, "mistral", "qwen2", "qwen3")
def test_float32_ids_equal_transformers(references: Callable[[str], Reference], family: str, path: str) -> None:
    """In chunks, with preemption (the pool holds few of the requests), and again with prefix hits."""
    reference = references(family)
    settings = {"max_model_len": 384, "max_num_batched_tokens": 64, "num_gpu_blocks_override": small_pool(family)}
    with make_llm(reference.path, device="cpu", **settings) as llm:
        attention = llm.llm_engine.info.report.attention_backend
        assert attention == ("sdpa" if path == TORCH else "native")
        assert generate(llm, reference.prompts) == reference.outputs
        assert llm.num_preemptions() > 0
        longest = max(range(len(reference.prompts)), key=lambda i: len(reference.prompts[i]))
        for is_again in (False, True):
            prompt = {"prompt_token_ids": reference.prompts[longest]}
            output = llm.generate([prompt], greedy(), use_tqdm=False)[0]
            assert list(output.outputs[0].token_ids) == reference.outputs[longest]
            assert output.num_cached_tokens or not is_again


@pytest.mark.parametrize("family, kv_dtype", [("llama", "fp8_e4m3"), ("gemma3", "fp8_e5m2")])
def test_ids_with_a_cache_in_8_bits_equal_those_of_torchs_attention(
    references: Callable[[str], Reference], family: str, kv_dtype: str
) -> None:
    """In chunks, and again with prefix hits."""
    if library.reason_against():
        pytest.skip("no C compiler here")
    reference, found = references(family), []
    settings = {"max_model_len": 384, "max_num_batched_tokens": 64, "kv_cache_dtype": kv_dtype}
    for backend, runs in (("native", 2), ("sdpa", 1)):
        with make_llm(reference.path, device="cpu", attention_backend=backend, **settings) as llm:
            found += [generate(llm, reference.prompts) for _ in range(runs)]
    assert all(outputs == found[0] for outputs in found)


SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "num_hidden_layers": 2,
    },  # SmolLM2's heads
    "gemma3": {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
}


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], GapReference]:
    """Ten prompts that start with the same 96 tokens, and one so long that its keys are cut into spans."""

    @cache
    def get(family: str) -> GapReference:
        path = str(
            make_tiny_checkpoint(
                tmp_path_factory.mktemp(family), family, max_position_embeddings=1280, **SHAPES[family]
            )
        )
        start, *tails, long = make_prompts(320, (96, *range(1, 11), 1100))
        return gap_reference(family, path, [*(start + tail for tail in tails), long], 16, "cpu")

    return get


@over_paths(FLOAT32_PATHS)
def test_shared_prefixes_and_long_rows_give_transformers_ids(
    sharing: Callable[[str], GapReference], family: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, is_used = sharing(family), []
    plain = NativeBackend._common_prefix

    def watched(*arguments: Any) -> Any:
        is_used.append((prefix := plain(*arguments)) is not None)
        return prefix

    monkeypatch.setattr(NativeBackend, "_common_prefix", watched)
    with make_llm(reference.path, device="cpu", max_model_len=1280, max_num_batched_tokens=256) as llm:
        alone = [generate(llm, [prompt], greedy(16))[0] for prompt in (reference.prompts[0], reference.prompts[-1])]
        batched = generate(llm, reference.prompts[:-1], greedy(16))
    reference.check([*batched, alone[1]])
    assert alone[0] == batched[0] and any(is_used) == (path != TORCH)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@over_paths(PATHS, "qwen3")
def test_16_bit_logprobs_are_near_float32(
    references: Callable[[str], Reference], family: str, path: str, dtype: str
) -> None:
    reference = references(family)
    print(path, family, assert_near_float32(reference.path, reference.prompts, dtype, "cpu"))


WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 0.8, "logit_bias": {5: 4.0, 9: -7.0}, "min_p": 0.01},
    {"temperature": 2.0, "top_p": 0.8, "presence_penalty": 0.6, "frequency_penalty": 0.2, "repetition_penalty": 1.3},
    {"temperature": 1.5, "allowed_token_ids": list(range(3, 90)), "logprobs": 0},
    {"temperature": 0.0, "repetition_penalty": 1.5, "min_tokens": 9, "stop_token_ids": [7, 11]},
    {"temperature": 1.0, "logprobs": 20, "prompt_logprobs": 0},
]


def test_whatever_requests_ask_for_c_and_torch_sample_the_same(
    references: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of all kinds in one batch, that join and leave it at different steps, prompts in chunks."""
    if library.reason_against():
        pytest.skip("no C compiler here")
    reference, made = references("llama"), []
    prompts = [reference.prompts[index % len(reference.prompts)] for index in range(2 * len(WISHES))]
    params = [
        SamplingParams(**wish, seed=index, max_tokens=6 + index, ignore_eos=True)
        for index, wish in enumerate(2 * WISHES)
    ]

    def not_reached(*arguments: Any) -> None:
        raise AssertionError("torch samples where C should")

    taken = StepSampler.sample
    for where in ("C", "torch"):
        monkeypatch.setattr(StepSampler, "sample", not_reached if where == "C" else taken)
        if where == "torch":
            for op in (NativeSample, NativeLogprobs):
                monkeypatch.setattr(op, "unsupported", staticmethod(lambda needs: ["not in this test"]))
        with make_llm(
            reference.path, device="cpu", max_model_len=384, max_num_batched_tokens=24, max_num_seqs=8
        ) as llm:
            made.append(llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False))
    for one, other in zip(*made, strict=True):
        assert list(one.outputs[0].token_ids) == list(other.outputs[0].token_ids), one.request_id
        for mine, theirs in (
            (one.outputs[0].logprobs, other.outputs[0].logprobs),
            (one.prompt_logprobs, other.prompt_logprobs),
        ):
            assert (mine is None) == (theirs is None)
            for row, expected in zip(mine or [], theirs or [], strict=True):
                assert (row is None) == (expected is None)
                if row is not None:
                    assert {
                        token: (found.rank, pytest.approx(found.logprob, abs=1e-4)) for token, found in row.items()
                    } == {token: (found.rank, found.logprob) for token, found in expected.items()}
