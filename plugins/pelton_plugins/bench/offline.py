"""Batches through `LLM.generate`, timed: what `latency`, `throughput` and `table` have in common."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pelton.errors import EngineError

if TYPE_CHECKING:
    from pelton import LLM

Prompt = list[int]


def open_llm(settings: dict[str, Any]) -> LLM:
    """An engine in this process. The tokenizer is not needed, unless the settings say otherwise."""
    from pelton import LLM

    return LLM(**{"skip_tokenizer_init": True, **settings})


def run_batch(
    llm: LLM, prompts: Sequence[Prompt], num_output_tokens: Sequence[int], *, temperature: float = 0.0
) -> float:
    """Seconds for all; every request makes exactly its number of tokens, and no text. Raises when one did not."""
    from pelton import SamplingParams

    params = [
        SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in num_output_tokens
    ]
    inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    began = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    took = time.perf_counter() - began
    for output, count in zip(outputs, num_output_tokens, strict=True):
        if output.error is not None:
            raise EngineError(f"Request {output.request_id} failed: {output.error.message}")
        if len(output.outputs[0].token_ids) != count:
            raise EngineError(
                f"Request {output.request_id} made {len(output.outputs[0].token_ids)} tokens; {count} were asked for."
            )
    return took
