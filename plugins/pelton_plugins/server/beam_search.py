"""`use_beam_search`: the n likeliest continuations of each prompt, as if the engine had sampled them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pelton.lora.request import LoRARequest
from pelton.outputs import CompletionOutput, RequestOutput
from pelton.sampling_params import BeamSearchParams, SamplingParams
from pelton_plugins.server.generation import Ready
from pelton_plugins.server.prompts import Prompt, max_model_len
from pelton_plugins.server.protocol import GenerateRequest

if TYPE_CHECKING:
    from pelton.sdk.async_llm import AsyncLLM

Request = TypeVar("Request", bound=GenerateRequest)


def beam_request(request: Request) -> Request:
    """The request as sampling parameters can say it: there n samples need a temperature, which beams do not."""
    return msgspec.structs.replace(request, temperature=1.0) if request.use_beam_search else request


async def beams(
    llm: AsyncLLM | Any,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    request: GenerateRequest,
    response_id: str,
    lora_request: LoRARequest | None,
    tenant: str = "",
) -> AsyncGenerator[Ready, None]:
    """One output for each prompt, all at the end."""
    more: dict[str, Any] = {} if lora_request is None else {"lora_request": lora_request}
    if tenant:
        more["tenant"] = tenant
    unique = uuid.uuid4().hex[:12]

    async def search(index: int, prompt: Prompt) -> tuple[int, RequestOutput]:
        own_id = f"{response_id[:200]}-{index}-{unique}"
        most = max_model_len(llm) - len(prompt.token_ids)
        beam_params = BeamSearchParams(
            beam_width=params.n,
            max_tokens=most if params.max_tokens is None else min(params.max_tokens, most),
            length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
            ignore_eos=params.ignore_eos,
        )
        found = await llm.beam_search(
            {"prompt_token_ids": prompt.token_ids}, beam_params, own_id, priority=request.priority or 0,
            cache_salt=request.cache_salt, timeout_s=request.timeout_s, **more,
        )  # fmt: skip
        choices = [
            CompletionOutput(
                place,
                beam.text or "",
                beam.own_tokens,
                cumulative_logprob=beam.cum_logprob,
                logprobs=None if params.logprobs is None else [dict(row) for row in beam.logprobs],
                finish_reason=beam.finish_reason,
                stop_reason=beam.stop_reason,
            )
            for place, beam in enumerate(found.sequences)
        ]
        return index, RequestOutput(own_id, prompt.text, prompt.token_ids, choices, True)

    tasks = [asyncio.create_task(search(index, prompt)) for index, prompt in enumerate(prompts)]
    try:
        yield list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
