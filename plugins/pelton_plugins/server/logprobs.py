"""Logprobs in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pelton.outputs import Logprob, PromptLogprobs, SampleLogprobs
from pelton_plugins.server.protocol import ChatLogprob, ChatLogprobs, ChatTopLogprob, CompletionLogprobs

LOWEST = -9999.0  # JSON has no -inf


def _finite(value: float) -> float:
    return value if value > LOWEST else LOWEST


def _name(token_id: int, logprob: Logprob, as_id: bool) -> str:
    return f"token_id:{token_id}" if as_id else logprob.decoded_token or ""


def _likeliest(candidates: Mapping[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The `count` likeliest (all for -1). The chosen token is among the candidates whatever its rank."""
    ranked = sorted(candidates.items(), key=lambda item: -item[1].logprob)
    return ranked if count < 0 else ranked[:count]


def chat_logprobs(
    token_ids: Sequence[int], logprobs: SampleLogprobs, num_top: int, *, as_ids: bool = False
) -> ChatLogprobs:
    content: list[ChatLogprob] = []
    for token_id, candidates in zip(token_ids, logprobs, strict=True):
        chosen = candidates[token_id]
        name = _name(token_id, chosen, as_ids)
        top = []
        for other_id, other in _likeliest(candidates, num_top):
            text = _name(other_id, other, as_ids)
            top.append(ChatTopLogprob(token=text, logprob=_finite(other.logprob), bytes=list(text.encode())))
        content.append(
            ChatLogprob(token=name, logprob=_finite(chosen.logprob), bytes=list(name.encode()), top_logprobs=top)
        )
    return ChatLogprobs(content=content)


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, Logprob] | None],
    num_top: int,
    *,
    text_offset: int,
    decode_first: str = "",
    as_ids: bool = False,
) -> tuple[CompletionLogprobs, int]:
    """Also the text offset after the last token. A position without logprobs (the first of a prompt) has null."""
    found = CompletionLogprobs()
    for token_id, candidates in zip(token_ids, logprobs, strict=True):
        if candidates is None:
            name = f"token_id:{token_id}" if as_ids else decode_first
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
        else:
            chosen = candidates[token_id]
            name = _name(token_id, chosen, as_ids)
            found.token_logprobs.append(_finite(chosen.logprob))
            top = dict(_likeliest(candidates, num_top))
            top.setdefault(token_id, chosen)
            found.top_logprobs.append({_name(i, p, as_ids): _finite(p.logprob) for i, p in top.items()})
        found.tokens.append(name)
        found.text_offset.append(text_offset)
        text_offset += len(name)
    return found, text_offset


def prompt_logprobs_json(prompt_logprobs: PromptLogprobs | None) -> list[dict[str, Any] | None] | None:
    """As the response field of that name has it: token id to logprob, rank and text."""
    if prompt_logprobs is None:
        return None
    return [
        None
        if candidates is None
        else {
            str(token_id): {
                "logprob": _finite(value.logprob),
                "rank": value.rank,
                "decoded_token": value.decoded_token,
            }
            for token_id, value in candidates.items()
        }
        for candidates in prompt_logprobs
    ]
