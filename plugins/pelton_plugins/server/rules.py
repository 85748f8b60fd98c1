"""Fields that clients know and this server does not offer, by rule: refused unless they ask for nothing.

A field that would change the answer is never ignored. Fields that cannot change it (`user`, `store`, `metadata`, ...) are accepted;
names that nobody knows are accepted too, and logged at debug level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pelton.errors import RequestError
from pelton_plugins.server.protocol import GenerateRequest

NOT_OFFERED: Mapping[str, tuple[Sequence[Any], str]] = {
    # field: (values that ask for nothing, beside null; what to do)
    "thinking_token_budget": ((), "reasoning is bounded by the output's length alone; use max_completion_tokens"),
    "repetition_detection": ((), "use repetition_penalty or stop"),
    "watermarking": ((False,), "answers carry no watermark"),
    "logprob_token_ids": ((), "use logprobs, or logit_bias with allowed_token_ids"),
    "ec_transfer_params": ((), "there is no encoder cache to transfer"),
    "stream_interval": ((1,), "it is a setting of the server, --stream-interval"),
    "return_token_offsets": ((False,), "use return_token_ids, or logprobs with text_offset"),
    "return_weight_versions": ((False,), "weights do not change while the server runs"),
    "mm_payload": ((), "this server takes text and token ids"),
    "modalities": ((["text"], []), "answers are text"),
    "audio": ((), "answers are text"),
    "prediction": ((), "use --speculative-config on the server"),
    "functions": (([],), "use tools"),
    "function_call": (("none",), "use tool_choice"),
    "web_search_options": ((), "the server searches nothing; offer a tool"),
    "verbosity": (("medium",), "ask for it in the messages"),
    "media_io_kwargs": (({},), "this server takes text and token ids"),
    "mm_processor_kwargs": (({},), "this server takes text and token ids"),
}

OF_NO_EFFECT = (
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "session_id",
)  # fmt: skip
"""Accepted: they say something about the request, and nothing about its answer."""

NOT_WITH_BEAMS = (
    "stream", "stop", "stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "bad_words", "min_tokens", "top_k", "top_p", "min_p", "response_format", "structured_outputs",
    "prompt_logprobs", "tools", "best_of",
)  # fmt: skip
"""Beams are chosen by the model's own distribution, to the end."""


def check_rules(request: GenerateRequest) -> None:
    """Raises `RequestError` that names the field and what to do."""
    for name, (neutral, advice) in NOT_OFFERED.items():
        value = getattr(request, name, None)
        if value is not None and value not in neutral:
            raise RequestError(f"{name} is not offered: {advice}.", param=name)
    if not request.use_beam_search:
        if request.length_penalty not in (None, 1.0):
            raise RequestError("length_penalty belongs to use_beam_search.", param="length_penalty")
        return
    for name in NOT_WITH_BEAMS:
        if getattr(request, name, None):
            raise RequestError(f"{name} does not go with use_beam_search; leave one of them out.", param=name)
