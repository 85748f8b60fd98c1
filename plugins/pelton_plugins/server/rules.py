"""Fields that clients know and this server does not offer, by rule: refused unless they ask for nothing.

A field that would change the answer is never ignored. Fields that cannot change it (`user`, `store`, `metadata`, ...) are accepted;
names that nobody knows are accepted too, and logged at debug level. Both tables hold for a struct and those made of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from pelton.errors import RequestError
from pelton_plugins.server.anthropic_protocol import CountTokensRequest, MessagesRequest
from pelton_plugins.server.cohere_protocol import CohereChatRequest, CohereEmbedRequest
from pelton_plugins.server.pooling_protocol import EmbeddingRequest, PooledRequest, PoolingRequest, RerankRequest
from pelton_plugins.server.protocol import ChatCompletionRequest, CompletionRequest, GenerateRequest
from pelton_plugins.server.responses_protocol import ResponsesRequest
from pelton_plugins.server.token_protocol import DerenderChatRequest, DerenderCompletionRequest, TokensRequest

Rules = Mapping[str, tuple[Sequence[Any], str]]
"""field: (values that ask for nothing, beside null; what to do). A dot leads into a struct."""

TEXT_ONLY = "this server takes text and token ids"
NO_MODERATION = "use /classify with a model that was trained for it"
ALL_AT_ONCE = "tokens are made text when all are there"

NOT_OFFERED: Mapping[type[msgspec.Struct], Rules] = {
    GenerateRequest: {
        "thinking_token_budget": ((), "reasoning is bounded by the output's length alone; use max_completion_tokens"),
        "repetition_detection": ((), "use repetition_penalty or stop"),
        "watermarking": ((False,), "answers carry no watermark"),
        "logprob_token_ids": ((), "use logprobs, or logit_bias with allowed_token_ids"),
        "ec_transfer_params": ((), "there is no encoder cache to transfer"),
        "stream_interval": ((1,), "it is a setting of the server, --stream-interval"),
        "return_token_offsets": ((False,), "use return_token_ids, or logprobs with text_offset"),
        "return_weight_versions": ((False,), "weights do not change while the server runs"),
        "mm_payload": ((), TEXT_ONLY),
        "logits_processors": (([],), "name those of the server in logits_processor_args"),
        "guided_decoding_backend": (("auto",), "it is a setting of the server, --structured-outputs-backend"),
    },
    CompletionRequest: {
        "suffix": (("",), "this model does not fill in the middle; put what is to follow into the prompt"),
    },
    ChatCompletionRequest: {
        "modalities": ((["text"], []), "answers are text"),
        "audio": ((), "answers are text"),
        "prediction": ((), "use --speculative-config on the server"),
        "functions": (([],), "use tools"),
        "moderation": ((), NO_MODERATION),
        "function_call": (("none",), "use tool_choice"),
        "web_search_options": ((), "the server searches nothing; offer a tool"),
        "verbosity": (("medium",), "ask for it in the messages"),
        "media_io_kwargs": (({},), TEXT_ONLY),
        "mm_processor_kwargs": (({},), TEXT_ONLY),
    },
    ResponsesRequest: {
        "prompt": ((), "this server keeps no prompts"),
        "conversation": ((), "this server keeps no conversations; use previous_response_id"),
        "context_management": (([],), "send what the model is to read"),
        "image": (({},), TEXT_ONLY),
        "moderation": ((), NO_MODERATION),
        "max_tool_calls": ((), "tools are called by the client"),
        "truncation": (("disabled",), "send what fits; too long an input is refused"),
        "text.verbosity": (("medium",), "ask for it in the messages"),
        "reasoning.summary": (("auto",), "the reasoning itself is returned"),
        "reasoning.generate_summary": (("auto",), "the reasoning itself is returned"),
    },
    MessagesRequest: {
        "container": ((), "this server runs no code"),
        "mcp_servers": (([],), "tools are called by the client"),
        "context_management": (({}, []), "send what the model is to read"),
        "diagnostics": (({},), "usage says how many tokens were cached"),
    },
    CohereChatRequest: {
        "documents": (([],), "put them into the messages"),
        "logprobs": ((False,), "use /v1/chat/completions"),
        "citation_options": (({},), "answers carry no citations"),
        "safety_mode": (("OFF", "NONE"), "put what the model has to heed into a system message"),
        "thinking": ((), "the model's own template decides"),
    },
    CohereEmbedRequest: {
        "images": (([],), TEXT_ONLY),
        "inputs": (([],), "send texts"),
    },
    TokensRequest: {"features": ((), TEXT_ONLY)},
    DerenderChatRequest: {"stream": ((False,), ALL_AT_ONCE)},
    DerenderCompletionRequest: {"stream": ((False,), ALL_AT_ONCE)},
    RerankRequest: {"relevant_spans": ((False,), "documents are scored as a whole")},
    PooledRequest: {"mm_processor_kwargs": (({},), TEXT_ONLY)},
    EmbeddingRequest: {
        "embed_dtype": (("float32",), "numbers are float32; convert them"),
        "endianness": (("little", "native"), "base64 is of little-endian numbers"),
    },
    PoolingRequest: {
        "embed_dtype": (("float32",), "numbers are float32; convert them"),
        "endianness": (("little", "native"), "base64 is of little-endian numbers"),
    },
}  # fmt: skip

ABOUT_THE_REQUEST = (
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "session_id",
)  # fmt: skip
OF_NO_EFFECT: Mapping[type[msgspec.Struct], Sequence[str]] = {
    GenerateRequest: ABOUT_THE_REQUEST,
    ResponsesRequest: (
        *(name for name in ABOUT_THE_REQUEST if name not in ("store", "session_id")),
        "stream_options",
        "access_programs",
        "background_options",
    ),
    # `thinking` has none on the count; an answer leaves its reasoning out where it is disabled.
    CountTokensRequest: ("thinking", "cache_control", "speed", "user_profile_id", "workspace_id"),
    MessagesRequest: ("metadata", "service_tier", "inference_geo"),
    CohereEmbedRequest: ("input_type",),  # a prompt of that kind is the model's own matter
    PooledRequest: ("user",),
}
"""Accepted: they say something about the request, and nothing about its answer."""

WITHIN_OF_NO_EFFECT: Mapping[str, tuple[Sequence[str], str]] = {
    "response_format.json_schema": (("name", "description", "strict"), "an answer keeps to its schema in any case"),
    "text.format": (("name", "description", "strict"), "an answer keeps to its schema in any case"),
    "thinking": (("budget_tokens", "display"), "reasoning is bounded by max_tokens alone, and returned as it is"),
    "stream_options of responses": (("include_obfuscation",), "streams are not padded"),
}
"""Accepted in the same way: place to names, and why."""

NOT_WITH_BEAMS = (
    "stream", "stop", "stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "bad_words", "min_tokens", "top_k", "top_p", "min_p", "response_format", "structured_outputs",
    "prompt_logprobs", "tools", "best_of",
)  # fmt: skip
"""Beams are chosen by the model's own distribution, to the end."""


def rules_of(struct: type[msgspec.Struct]) -> Rules:
    """Return the fields of a request that are refused, those of the structs that it is made of included."""
    return {name: rule for base in struct.__mro__ for name, rule in NOT_OFFERED.get(base, {}).items()}


@cache
def _paths_of(struct: type[msgspec.Struct]) -> list[tuple[str, list[str], Sequence[Any], str]]:
    return [(name, name.split("."), *rule) for name, rule in rules_of(struct).items()]


def check_offered(request: msgspec.Struct) -> None:
    """Raises `RequestError` that names the field and what to do."""
    for name, path, neutral, advice in _paths_of(type(request)):
        value: Any = request
        for part in path:
            value = getattr(value, part, None)
        if value is not None and value not in neutral:
            raise RequestError(f"{name} is not offered: {advice}.", param=name)


def check_rules(request: GenerateRequest) -> None:
    """As `check_offered`; and what goes with beams."""
    check_offered(request)
    if not request.use_beam_search:
        if request.length_penalty not in (None, 1.0):
            raise RequestError("length_penalty belongs to use_beam_search.", param="length_penalty")
        return
    for name in NOT_WITH_BEAMS:
        if getattr(request, name, None):
            raise RequestError(f"{name} does not go with use_beam_search; leave one of them out.", param=name)
