"""From request fields to `SamplingParams`, and the refusals that need no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pelton import limits
from pelton.errors import RequestError
from pelton.sampling_params import MODEL_DEFAULTS, RequestOutputKind, SamplingParams
from pelton_plugins.server.protocol import ChatCompletionRequest, CompletionRequest, GenerateRequest, TokenizeRequest
from pelton_plugins.server.rules import check_rules
from pelton_plugins.server.structured_outputs import structured_outputs
from pelton_plugins.server.tools import Offer, check_tools

SAME_NAME = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in GenerateRequest.__struct_fields__ and name != "structured_outputs"
)
"""Fields that a request and `SamplingParams` call alike."""


def sampling_params(
    request: GenerateRequest,
    model_defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Raises `RequestError` naming the field."""
    values: dict[str, Any] = {
        name: model_defaults[name]
        for name in MODEL_DEFAULTS
        if name in SAME_NAME and model_defaults.get(name) is not None
    }
    for name in SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            values[name] = value
    if prompt_logprobs is not None:
        asked = (prompt_logprobs, values.get("prompt_logprobs", 0))
        values["prompt_logprobs"] = -1 if -1 in asked else max(asked)  # -1: all of the vocabulary
    return SamplingParams(
        **values,
        max_tokens=max_tokens,
        logprobs=logprobs,
        structured_outputs=structured_outputs(request),
        extra_args=request.vllm_xargs,
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
    )


def check_common(request: GenerateRequest) -> None:
    """Fields that contradict each other, are out of bounds, or ask for what is not here."""
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream=true", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs", value=request.prompt_logprobs)
    for name, most in (("cache_salt", limits.MAX_CACHE_SALT_CHARS), ("request_id", limits.MAX_REQUEST_ID_CHARS)):
        text = getattr(request, name)
        if text is not None and not 1 <= len(text) <= most:
            raise RequestError(f"{name} has {len(text)} characters; give 1 to {most}", param=name)
    if request.priority is not None and abs(request.priority) > limits.MAX_ABS_PRIORITY:
        raise RequestError(
            f"priority must be within {limits.MAX_ABS_PRIORITY} of 0", param="priority", value=request.priority
        )
    if request.timeout_s is not None and not 0 < request.timeout_s <= limits.MAX_TIMEOUT_S:
        raise RequestError(
            f"timeout_s must be above 0 and at most {limits.MAX_TIMEOUT_S:g}",
            param="timeout_s",
            value=request.timeout_s,
        )
    cut = request.truncate_prompt_tokens
    if cut is not None and cut != -1 and cut < 1:
        raise RequestError("truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens", value=cut)
    for name in ("vllm_xargs", "logits_processor_args"):
        given = getattr(request, name)
        if given is not None and _json_size(name, given) > limits.MAX_EXTRA_ARGS_BYTES:
            raise RequestError(f"{name} is longer than {limits.MAX_EXTRA_ARGS_BYTES} bytes of JSON", param=name)
    check_rules(request)


def _json_size(name: str, value: dict[str, Any]) -> int:
    try:
        return len(msgspec.json.encode(value))
    except RecursionError:  # it may be decoded at a depth of the stack, and not encoded at another
        raise RequestError(f"{name} is nested too deeply", param=name) from None


NOT_WITH_EMBEDS = ("echo", "prompt_logprobs", "truncate_prompt_tokens", "use_beam_search")
"""They are of a prompt's tokens, which are not known."""


def check_completion(request: CompletionRequest) -> None:
    check_common(request)
    if request.prompt_embeds is not None:
        for name in NOT_WITH_EMBEDS:
            if getattr(request, name):
                raise RequestError(f"{name} does not go with prompt_embeds; leave one of them out.", param=name)
    if request.best_of is not None:
        n = 1 if request.n is None else request.n
        if not max(n, 1) <= request.best_of <= limits.MAX_N:
            raise RequestError(
                f"best_of must be from n ({n}) to {limits.MAX_N}", param="best_of", value=request.best_of
            )
        if request.stream and request.best_of > n:
            raise RequestError("best_of cannot be streamed: the best are known at the end.", param="best_of")
    if request.max_tokens == 0 and not request.echo:
        raise RequestError("max_tokens must be at least 1 without echo", param="max_tokens", value=0)


def check_chat(request: ChatCompletionRequest, *, trust_template: bool) -> Offer:
    """Return the tools that the model may call."""
    check_common(request)
    if not request.messages:
        raise RequestError("messages is empty; send at least one message.", param="messages")
    if len(request.messages) > limits.MAX_MESSAGES:
        raise RequestError(
            f"messages has {len(request.messages)} entries; at most {limits.MAX_MESSAGES}", param="messages"
        )
    if request.top_logprobs is not None and not request.logprobs and request.top_logprobs != 0:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs", value=request.top_logprobs)
    if request.top_logprobs is not None and request.top_logprobs < -1:
        raise RequestError("top_logprobs must be at least 0", param="top_logprobs", value=request.top_logprobs)
    if request.max_completion_tokens is not None and request.max_completion_tokens < 1:
        raise RequestError(
            "max_completion_tokens must be at least 1",
            param="max_completion_tokens",
            value=request.max_completion_tokens,
        )
    offer = check_tools(request.tools, request.tool_choice)
    check_template(request, trust_template=trust_template)
    return offer


RESERVED_TEMPLATE_NAMES = frozenset(
    {"chat_template", "tokenize", "messages", "conversation", "tools", "documents", "add_generation_prompt",
     "continue_final_message", "return_tensors", "return_dict", "tokenizer"}
)  # fmt: skip


def check_template(request: ChatCompletionRequest | TokenizeRequest, *, trust_template: bool) -> None:
    """Check what a request says of the chat template and how to render it."""
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt contradict each other; set one.",
            param="continue_final_message",
        )
    template = request.chat_template
    if template is not None and not trust_template:
        raise RequestError(
            "This server takes no chat templates from requests (trust_request_chat_template is off).",
            param="chat_template",
        )
    if template is not None and len(template) > limits.MAX_CHAT_TEMPLATE_CHARS:
        raise RequestError(
            f"chat_template has {len(template)} characters; at most {limits.MAX_CHAT_TEMPLATE_CHARS}",
            param="chat_template",
        )
    reserved = sorted(RESERVED_TEMPLATE_NAMES & set(request.chat_template_kwargs or ()))
    if reserved:
        raise RequestError(
            f"chat_template_kwargs may not set {', '.join(reserved)}.", param=f"chat_template_kwargs.{reserved[0]}"
        )
