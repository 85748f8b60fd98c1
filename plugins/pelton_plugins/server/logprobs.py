"""Logprobs in the two shapes of OpenAI's API.

The engine names a token by its text, which is U+FFFD for parts of a character. Their bytes come from the tokenizer; where
there is none, the engine's names are all that is known.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pelton.outputs import Logprob, PromptLogprobs, SampleLogprobs
from pelton.sampling_params import SamplingParams
from pelton.tokenizer import IncrementalDetokenizer, Tokenizer
from pelton.tokenizer.interface import REPLACEMENT
from pelton_plugins.server.protocol import ChatLogprob, ChatLogprobs, ChatTopLogprob, CompletionLogprobs

LOWEST = -9999.0  # JSON has no -inf

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


def _finite(value: float) -> float:
    return value if value > LOWEST else LOWEST


@dataclass(frozen=True, slots=True)
class TokenWriter:
    """How an answer writes its tokens."""

    tokenizer: Tokenizer | None
    skip_special_tokens: bool = True
    as_ids: bool = False

    @classmethod
    def of(cls, tokenizer: Any, params: SamplingParams, *, as_ids: bool) -> TokenWriter:
        known = tokenizer if isinstance(tokenizer, Tokenizer) else None
        return cls(known, skip_special_tokens=params.skip_special_tokens, as_ids=as_ids)

    def name(self, token_id: int, text: str | None) -> str:
        """Text of the token, or `bytes:\\xf0\\x9f` where it is not valid UTF-8 on its own."""
        if self.as_ids:
            return f"token_id:{token_id}"
        if text and REPLACEMENT in text and self.tokenizer is not None:
            raw = self.tokenizer.token_bytes(token_id)
            if not _is_utf8(raw):
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return text or ""

    def raw(self, token_id: int, text: str | None) -> list[int]:
        """Bytes of the token in the answer's text: none for a special token that is left out there."""
        if self.tokenizer is None:
            return list((text or "").encode())
        if self.skip_special_tokens and token_id in self.tokenizer.skipped_token_ids:
            return []
        return list(self.tokenizer.token_bytes(token_id))


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


class TextOffsets:
    """Where in an answer's text each generated token begins; parts of a character begin where it does."""

    def __init__(
        self, writer: TokenWriter, prompt_token_ids: Sequence[int], params: SamplingParams, start: int
    ) -> None:
        self._offset = start
        self._detokenizer = (
            None
            if writer.tokenizer is None
            else IncrementalDetokenizer(
                writer.tokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        )

    def take(self, token_ids: Sequence[int], logprobs: SampleLogprobs) -> list[int]:
        """Offsets of the next tokens."""
        found = []
        for token_id, candidates in zip(token_ids, logprobs, strict=True):
            found.append(self._offset)
            if self._detokenizer is not None:
                self._offset += len(self._detokenizer.step([token_id]))
            else:
                self._offset += len(candidates[token_id].decoded_token or "")
        return found


def prompt_offsets(writer: TokenWriter, texts: Sequence[str], token_ids: Sequence[int], prompt: str) -> list[int]:
    """Where in an echoed prompt each token begins. Special tokens may stand in it (they were typed) or not."""
    tokenizer = writer.tokenizer
    found, offset = [], 0
    decode = _utf8_decoder(errors="replace").decode
    for token_id, token_text in zip(token_ids, texts, strict=True):
        found.append(offset)
        if tokenizer is None:
            text = token_text
        elif token_id in tokenizer.skipped_token_ids:
            text = token_text if prompt.startswith(token_text, offset) else ""
        else:
            text = decode(tokenizer.token_bytes(token_id))
            if text.startswith(" ") and not prompt.startswith(" ", offset):  # SentencePiece's at the begin of a text
                text = text[1:]
        offset = min(offset + len(text), len(prompt))
    return found


def _likeliest(candidates: Mapping[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The `count` likeliest (all for -1). The chosen token is among the candidates whatever its rank."""
    ranked = sorted(candidates.items(), key=lambda item: -item[1].logprob)
    return ranked if count < 0 else ranked[:count]


def chat_logprobs(
    token_ids: Sequence[int], logprobs: SampleLogprobs, num_top: int, writer: TokenWriter
) -> ChatLogprobs:
    """The `bytes` of all tokens joined are the answer's text, but for what a stop string cut off."""
    content: list[ChatLogprob] = []
    for token_id, candidates in zip(token_ids, logprobs, strict=True):
        chosen = candidates[token_id]
        top = [
            ChatTopLogprob(
                token=writer.name(other_id, other.decoded_token),
                logprob=_finite(other.logprob),
                bytes=writer.raw(other_id, other.decoded_token),
            )
            for other_id, other in _likeliest(candidates, num_top)
        ]
        content.append(
            ChatLogprob(
                token=writer.name(token_id, chosen.decoded_token),
                logprob=_finite(chosen.logprob),
                bytes=writer.raw(token_id, chosen.decoded_token),
                top_logprobs=top,
            )
        )
    return ChatLogprobs(content=content)


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, Logprob] | None],
    text_offsets: Sequence[int],
    num_top: int,
    writer: TokenWriter,
    *,
    first_text: str = "",
) -> CompletionLogprobs:
    """A position without logprobs (the first of a prompt) has null, and is named by `first_text`."""
    found = CompletionLogprobs(text_offset=list(text_offsets))
    for token_id, candidates in zip(token_ids, logprobs, strict=True):
        if candidates is None:
            found.tokens.append(writer.name(token_id, first_text))
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
            continue
        chosen = candidates[token_id]
        name, value = writer.name(token_id, chosen.decoded_token), _finite(chosen.logprob)
        top: dict[str, float] = {}
        for other_id, other in _likeliest(candidates, num_top):  # of two with one name the likelier stays
            top.setdefault(writer.name(other_id, other.decoded_token), _finite(other.logprob))
        top[name] = value
        found.tokens.append(name)
        found.token_logprobs.append(value)
        found.top_logprobs.append(top)
    return found


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
