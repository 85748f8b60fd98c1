"""How far log-probabilities in reduced precision lie from transformers' float32 model, ours and transformers' own.

All models have the same rounded weights, so what is compared is the rounding of activations, of the KV cache and of
logits; for an fp8 cache, transformers' keys and values are rounded to fp8 before attention. The tiny models are made to
be sensitive (strong sub-layers, logits far apart): bfloat16 moves their log-probabilities by some hundredths in the mean,
whoever computes.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from pelton_e2e import make_llm
from torch import Tensor

from pelton import SamplingParams

FLOAT32_TOLERANCE = 2e-3  # largest difference
MEAN_RATIO = 1.25  # of mean differences from float32, ours to transformers' in the same dtype
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def assert_near_float32(path: str, prompts: list[list[int]], dtype: str, device: str, **settings: Any) -> str:
    """Prompts' and greedy tokens' log-probabilities of the engine against transformers'; returns the figures in words."""
    params = SamplingParams(
        temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False, logprobs=5, prompt_logprobs=1
    )
    with make_llm(path, device=device, dtype=dtype, **settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    kv_dtype = FP8.get(settings.get("kv_cache_dtype", "auto"))
    ours: list[float] = []
    theirs: list[float] = []
    for output in outputs:
        completion = output.outputs[0]
        ids = (*output.prompt_token_ids, *completion.token_ids)
        expected = _logprobs(path, dtype, device, ids, is_exact=True)
        other = _logprobs(path, dtype, device, ids, kv_dtype)
        rows = [*(output.prompt_logprobs or [])[1:], *(completion.logprobs or [])]
        assert len(rows) == len(ids) - 1
        for place, row in enumerate(rows):
            for token, entry in row.items():
                ours.append(abs(entry.logprob - expected[place][token]))
                theirs.append(abs(other[place][token] - expected[place][token]))
    mean, bound = sum(ours) / len(ours), sum(theirs) / len(theirs)
    if dtype == "float32":
        assert max(ours) < FLOAT32_TOLERANCE
    else:
        assert mean < MEAN_RATIO * bound, f"mean {mean:.2e}, transformers {bound:.2e}"
    return f"mean {mean:.1e}, transformers {bound:.1e}, worst {max(ours):.1e}"


@lru_cache(maxsize=8)
def _model(path: str, dtype: str, device: str, is_exact: bool) -> Any:
    """With weights of this dtype, which it computes in float32 with where it is exact."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="eager")
    return (model.float() if is_exact else model).eval().to(device)


@lru_cache(maxsize=200)  # engines that compute in other ways mostly answer with the same tokens
def _logprobs(
    path: str,
    dtype: str,
    device: str,
    ids: tuple[int, ...],
    kv_dtype: torch.dtype | None = None,
    *,
    is_exact: bool = False,
) -> list[list[float]]:
    """kv_dtype: what keys (after rotation) and values are rounded to before attention, as by a cache of that dtype."""
    model = _model(path, dtype, device, is_exact)
    module = sys.modules[type(model).__module__]
    plain = module.eager_attention_forward

    def with_rounded_kv(layer: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return plain(layer, query, _stored(key, kv_dtype), _stored(value, kv_dtype), *args, **kwargs)

    with torch.inference_mode(), mock.patch.object(module, "eager_attention_forward", with_rounded_kv):
        logits = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]
    values: list[list[float]] = logits.float().log_softmax(-1).tolist()
    return values


def _stored(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None:
        return x
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype).to(x.dtype)
