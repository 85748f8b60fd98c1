"""Every way in which the CPU computes gives the same: C for each instruction set, and torch (oneDNN) where there is no C.

float32 equals transformers token for token; bfloat16 log-probabilities lie as near to the float32 model as transformers'
own in bfloat16 do, up to a quarter more in the mean (pelton_precision).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from pelton_e2e import FAMILIES, Reference, generate, greedy, make_llm, small_pool
from pelton_precision import assert_near_float32

from pelton_backends.native import library
from pelton_backends.native.build import available_sets
from pelton_backends.native.isa import ISAS

TORCH = "torch"
PATHS = (*(one.name for one in ISAS), TORCH)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == TORCH:
        monkeypatch.setattr(library, "reason_against", lambda: "no C compiler on the PATH")
        yield TORCH
        return
    if library.reason_against():
        pytest.skip("no C compiler here")
    found = next((one for one in available_sets() if one.name == request.param), None)
    if found is None:
        pytest.skip(f"no {request.param} here")
    monkeypatch.setattr(library, "_best_set", lambda: found)
    yield request.param


@pytest.mark.parametrize("family", FAMILIES)
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


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_bfloat16_logprobs_are_near_float32(references: Callable[[str], Reference], family: str, path: str) -> None:
    reference = references(family)
    print(path, family, assert_near_float32(reference.path, reference.prompts, "bfloat16", "cpu"))
