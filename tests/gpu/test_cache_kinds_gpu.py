"""Caches of latents, caches that layers share, and mixtures of experts on the GPU: greedy ids equal transformers' float32 ids,
captured and not."""

from __future__ import annotations

from typing import Any

import pytest
from pelton_e2e import GapReference, gap_reference, generate, greedy, make_llm, make_prompts

from pelton.config import CUDAGraphMode
from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint

pytestmark = pytest.mark.gpu

NUM_TOKENS = 48
FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {},
    "deepseek_v3": {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "head_dim": 32},
    "gemma4": {"head_dim": 64, "global_head_dim": 128},
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {"num_experts": 32, "num_experts_per_tok": 4},
    "glm4_moe": {},
    "deepseek_v2_moe": {},
    "deepseek_v3_moe": {},
    "gpt_oss": {},
    "deepseek_v32": {"index_topk": 48},
    "glm_moe_dsa": {"index_topk": 48},
}


@pytest.fixture(scope="module", params=FIELDS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GapReference:
    folder = tmp_path_factory.mktemp(request.param)
    path = make_tiny_checkpoint(folder, request.param, with_tokenizer=False, **FIELDS[request.param])
    prompts = make_prompts(VOCAB_SIZE, (1, 2, 16, 17, 48, 129, 200, 300))
    return gap_reference(request.param, str(path), prompts, NUM_TOKENS, "cuda")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE}, id="captured"),
        pytest.param({"enforce_eager": True, "max_num_batched_tokens": 32}, id="eager-chunked"),
    ],
)
def test_ids_equal_transformers(reference: GapReference, settings: dict[str, Any]) -> None:
    with make_llm(reference.path, device="cuda", **settings) as llm:
        params, prompts = greedy(NUM_TOKENS), reference.prompts
        reference.check(generate(llm, prompts, params))
        again = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        reference.check([list(output.outputs[0].token_ids) for output in again])
        assert sum(output.num_cached_tokens or 0 for output in again) >= 512
        longer = [prompt + output[:20] for prompt, output in zip(prompts, reference.outputs, strict=True)]
        reference.check(generate(llm, longer, greedy(NUM_TOKENS - 20)), start=20)
