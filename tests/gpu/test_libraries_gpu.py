"""Attention of libraries on the GPU, where their packages are installed: against the float64 oracle, and an engine's answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pelton_e2e import make_llm, make_prompts

from pelton import SamplingParams
from pelton.testing.attention import CASES, TOLERANCES, AttentionStep
from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint
from pelton_backends.libraries import flash_attn, flashinfer
from pelton_backends.libraries.flash_attn import FlashAttentionBackend
from pelton_backends.libraries.flashinfer import FlashInferBackend

pytestmark = pytest.mark.gpu

BACKENDS: dict[str, tuple[type[Any], Any]] = {
    "FLASH_ATTN": (FlashAttentionBackend, flash_attn.find_library),
    "FLASHINFER": (FlashInferBackend, flashinfer.find_library),
}
NAMES = (
    "first-token", "decodes-of-odd-lengths", "prefill-one-past-a-block", "chunk-after-context", "mixed", "mixed-padded",
    "multi-head", "blocks-of-128", "soft-cap-and-window",
)  # fmt: skip
"""One head size and two kinds of masks: each has kernels that are compiled when they are first called."""


@pytest.fixture(params=BACKENDS)
def named(request: pytest.FixtureRequest) -> str:
    found = BACKENDS[request.param][1]()
    if isinstance(found, str):
        pytest.skip(found)
    return str(request.param)


@pytest.mark.parametrize("name", NAMES)
def test_steps_match_float64(named: str, name: str) -> None:
    case = replace(CASES[name], dtype="bfloat16", head_dim=128, block_size=max(CASES[name].block_size, 16))
    backend = BACKENDS[named][0]
    reasons = backend.unsupported(case.needs(), torch.cuda.get_device_capability())
    if reasons:
        pytest.skip("; ".join(reasons))
    step = AttentionStep(backend, case, "cuda")
    step.write()
    torch.testing.assert_close(
        step.run().float().cpu(),
        step.expected().float().cpu(),
        atol=TOLERANCES["bfloat16"],
        rtol=TOLERANCES["bfloat16"],
    )


def test_an_engine_answers_as_with_tritons_kernels(named: str, tmp_path: Path) -> None:
    """Log-probabilities of prompts, in chunks, and of what is generated: the rest is rounding of bfloat16."""
    path = str(make_tiny_checkpoint(tmp_path, "llama", with_tokenizer=False, head_dim=128))
    prompts = [{"prompt_token_ids": ids} for ids in make_prompts(VOCAB_SIZE, (1, 17, 60))]
    params = SamplingParams(
        max_tokens=8, temperature=0.0, prompt_logprobs=0, logprobs=0, detokenize=False, ignore_eos=True
    )
    found = []
    for attention in (named, "TRITON_ATTN"):
        with make_llm(
            path, dtype="bfloat16", device="cuda", attention_backend=attention, max_num_batched_tokens=32
        ) as llm:
            name = llm.llm_engine.info.report.attention_backend
            assert name == attention.lower().removesuffix("_attn") or name == attention.lower()
            outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append(
            [
                step[token].logprob
                for prompt, output in zip(prompts, outputs, strict=True)
                for step, token in zip(output.prompt_logprobs[1:], prompt["prompt_token_ids"][1:], strict=True)
            ]
            + [next(iter(output.outputs[0].logprobs[0].values())).logprob for output in outputs]
        )
    apart = [abs(a - b) for a, b in zip(*found, strict=True)]
    assert sum(apart) / len(apart) < 0.03
