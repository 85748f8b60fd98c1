"""Log-probabilities in reduced precision lie as near to transformers' float32 model as transformers' own do in that precision,
for prompts and for generated tokens, in captured and in eager steps (pelton_precision says how they are compared).
"""

from __future__ import annotations

from typing import Any

import pytest
from pelton_e2e import GapReference
from pelton_precision import assert_near_float32

pytestmark = pytest.mark.gpu

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
    settings = {"kv_cache_dtype": kv_dtype, "cudagraph_mode": mode}
    found = assert_near_float32(reference.path, reference.prompts, dtype, "cuda", **settings)
    print(f"{reference.family} {dtype}, kv {kv_dtype}, {mode}: {found}")
