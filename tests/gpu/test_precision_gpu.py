"""Log-probabilities in reduced precision lie as near to transformers' float32 model as transformers' own do in that precision,
for prompts and for generated tokens, in captured and in eager steps.

All models have the same rounded weights, so what is compared is the rounding of activations, of the KV cache and of
logits; for an fp8 cache, transformers' keys and values are rounded to fp8 before attention. These tiny models are made to
be sensitive (strong sub-layers, logits far apart): bfloat16 moves their log-probabilities by some hundredths in the mean,
whoever computes.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import pytest
import torch
from pelton_e2e import GapReference, make_llm
from torch import Tensor

from pelton import SamplingParams

pytestmark = pytest.mark.gpu

FLOAT32_TOLERANCE = 2e-3  # largest difference
MEAN_RATIO = 1.25  # of mean differences from float32, ours to transformers' in the same dtype
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

EVERYWHERE = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
CASES = [
    *((family, "float32", "auto", "FULL_AND_PIECEWISE") for family in EVERYWHERE),
    *((family, "bfloat16", "auto", mode) for family in EVERYWHERE for mode in ("NONE", "FULL_AND_PIECEWISE")),
    ("qwen3", "float16", "auto", "FULL_AND_PIECEWISE"),
    *((family, "bfloat16", "fp8", "FULL_AND_PIECEWISE") for family in ("llama", "gemma3")),
    ("llama", "bfloat16", "fp8_e5m2", "FULL_AND_PIECEWISE"),
]


@pytest.mark.parametrize("family, dtype, kv_dtype, mode", CASES)
def test_logprobs_are_near_float32(references: Any, family: str, dtype: str, kv_dtype: str, mode: str) -> None:
    reference: GapReference = references(family)
    params = SamplingParams(
        temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False, logprobs=5, prompt_logprobs=1
    )
    settings = {"device": "cuda", "dtype": dtype, "kv_cache_dtype": kv_dtype, "cudagraph_mode": mode}
    with make_llm(reference.path, **settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in reference.prompts], params, use_tqdm=False)
    exact, rounded = rounded_model(reference.path, dtype).float(), rounded_model(reference.path, dtype)
    ours: list[float] = []
    theirs: list[float] = []
    for output in outputs:
        completion = output.outputs[0]
        ids = [*output.prompt_token_ids, *completion.token_ids]
        expected, other = logprobs(exact, ids), logprobs(rounded, ids, FP8.get(kv_dtype))
        rows = [*(output.prompt_logprobs or [])[1:], *(completion.logprobs or [])]
        assert len(rows) == len(ids) - 1
        for place, row in enumerate(rows):
            for token, entry in row.items():
                ours.append(abs(entry.logprob - expected[place][token]))
                theirs.append(abs(other[place][token] - expected[place][token]))
    mean, bound = sum(ours) / len(ours), sum(theirs) / len(theirs)
    print(
        f"{reference.family} {dtype}, kv {kv_dtype}, {mode}: mean {mean:.1e}, transformers {bound:.1e}, worst {max(ours):.1e}"
    )
    if dtype == "float32":
        assert max(ours) < FLOAT32_TOLERANCE
    else:
        assert mean < MEAN_RATIO * bound


def rounded_model(path: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="eager")
    return model.eval().to("cuda")


def logprobs(model: Any, ids: list[int], kv_dtype: torch.dtype | None = None) -> list[list[float]]:
    """kv_dtype: what keys (after rotation) and values are rounded to before attention, as by a cache of that dtype."""
    module = sys.modules[type(model).__module__]
    plain = module.eager_attention_forward

    def with_rounded_kv(layer: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return plain(layer, query, stored(key, kv_dtype), stored(value, kv_dtype), *args, **kwargs)

    with torch.inference_mode(), mock.patch.object(module, "eager_attention_forward", with_rounded_kv):
        logits = model(input_ids=torch.tensor([ids], device="cuda"), use_cache=False).logits[0]
    values: list[list[float]] = logits.float().log_softmax(-1).tolist()
    return values


def stored(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None:
        return x
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype).to(x.dtype)
