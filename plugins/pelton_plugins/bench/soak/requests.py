"""Random valid requests for a server: completions and chats, with all that a client may ask for, and what an answer must have."""

from __future__ import annotations

import math
import random
import string
from dataclasses import dataclass, field
from typing import Any

CHAT_TOKENS = 128  # room for what a chat template adds
LEAST_TOKEN_ID = 10
WORDS = [letter * 2 + other for letter in string.ascii_lowercase for other in string.ascii_lowercase]
MOST_N = 3
MOST_LOGPROBS = 5


@dataclass(frozen=True, slots=True)
class Request:
    """One request, and what becomes of it."""

    path: str
    body: dict[str, Any]
    leaves_after: float | None = None
    """The client goes away after so many chunks of a stream, or seconds of a whole answer; None: it stays."""

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def num_choices(self) -> int:
        return int(self.body.get("n", 1))

    @property
    def max_tokens(self) -> int:
        return int(self.body["max_tokens"])


@dataclass
class Source:
    """Requests without end; lengths are log-uniform, so that each order of magnitude comes as often."""

    rng: random.Random
    model: str
    max_model_len: int
    max_output_len: int = 128
    vocab_size: int = 250
    leave_fraction: float = 0.25
    max_prompt_len: int = field(default=0)
    """0: what the model takes."""

    def next(self) -> Request:
        rng = self.rng
        max_tokens = self._length(min(self.max_output_len, self.max_model_len // 2))
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens}
        longest = min(self.max_prompt_len or self.max_model_len, self.max_model_len - max_tokens)
        is_chat = rng.random() < 0.4 and longest > 2 * CHAT_TOKENS
        if is_chat:
            body["messages"] = self._messages(longest - CHAT_TOKENS)
        else:
            body["prompt"] = self._prompt(longest)
        self._sampling(body)
        self._stopping(body)
        self._logprobs(body, is_chat=is_chat)
        if rng.random() < 0.75:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        leaves_after = None
        if rng.random() < self.leave_fraction:
            # Early rather than late: an answer may end before its bound.
            leaves_after = 1.0 + int(max_tokens * rng.random() ** 3) if body.get("stream") else rng.uniform(0.0, 1.0)
        return Request("/v1/chat/completions" if is_chat else "/v1/completions", body, leaves_after)

    def short(self) -> Request:
        """A greedy one of a few tokens."""
        body = {"model": self.model, "prompt": self._text(16), "max_tokens": 2, "temperature": 0.0}
        return Request("/v1/completions", body)

    def _length(self, most: int) -> int:
        return max(1, min(most, round(math.exp(self.rng.uniform(0.0, math.log(most + 0.5))))))

    def _text(self, most: int) -> str:
        """At most `most` tokens, for no letter is more than one."""
        length = self._length(most)
        words = [self.rng.choice(WORDS) for _ in range(length // 4 + 1)]
        return " ".join(words)[:length]

    def _prompt(self, longest: int) -> str | list[int]:
        if self.rng.random() < 0.5:
            return self._text(longest)
        return [self.rng.randrange(LEAST_TOKEN_ID, self.vocab_size) for _ in range(self._length(longest))]

    def _messages(self, longest: int) -> list[dict[str, str]]:
        turns = self.rng.choice([1, 1, 3])
        roles = ["user", "assistant"] * turns
        return [{"role": role, "content": self._text(longest // turns)} for role in roles[:turns]]

    def _sampling(self, body: dict[str, Any]) -> None:
        rng = self.rng
        body["temperature"] = rng.choice([0.0, 0.0, round(rng.uniform(0.2, 1.5), 3)])
        if body["temperature"]:
            extras: dict[str, Any] = {
                "top_p": round(rng.uniform(0.1, 1.0), 3), "top_k": rng.randint(1, 200), "min_p": round(rng.random() / 2, 3),
                "seed": rng.randrange(2**31), "n": rng.randint(2, MOST_N),
            }  # fmt: skip
            self._some(body, extras, 0.35)
        penalties = {
            "presence_penalty": round(rng.uniform(-2, 2), 3), "frequency_penalty": round(rng.uniform(-2, 2), 3),
            "repetition_penalty": round(rng.uniform(0.8, 1.5), 3),
        }  # fmt: skip
        self._some(body, penalties, 0.2)
        if rng.random() < 0.15:
            ids = rng.sample(range(LEAST_TOKEN_ID, self.vocab_size), rng.randint(1, 20))
            body["logit_bias"] = {str(one): round(rng.uniform(-10, 10), 2) for one in ids}

    def _stopping(self, body: dict[str, Any]) -> None:
        rng = self.rng
        if rng.random() < 0.25:
            body["stop"] = rng.sample(WORDS + list(string.ascii_lowercase), rng.randint(1, 4))
            self._some(body, {"include_stop_str_in_output": True}, 0.3)
        ids = [rng.randrange(LEAST_TOKEN_ID, self.vocab_size)]
        self._some(body, {"ignore_eos": True}, 0.5)
        self._some(body, {"min_tokens": rng.randint(1, body["max_tokens"]), "stop_token_ids": ids}, 0.1)

    def _logprobs(self, body: dict[str, Any], *, is_chat: bool) -> None:
        rng = self.rng
        if rng.random() < 0.2:
            if is_chat:
                body |= {"logprobs": True, "top_logprobs": rng.randint(0, MOST_LOGPROBS)}
            else:
                body["logprobs"] = rng.randint(0, MOST_LOGPROBS)
        if not is_chat and rng.random() < 0.1:
            body["echo"] = True

    def _some(self, body: dict[str, Any], extras: dict[str, Any], share: float) -> None:
        body |= {name: value for name, value in extras.items() if self.rng.random() < share}


def wrong_answer(request: Request, answer: dict[str, Any]) -> str | None:
    """Return what a whole answer lacks; None when it is as asked."""
    choices = answer.get("choices", [])
    if len(choices) != request.num_choices:
        return f"{len(choices)} choices; {request.num_choices} were asked for"
    reasons = {choice.get("finish_reason") for choice in choices}
    if not reasons <= {"stop", "length"}:
        return f"finish_reason is {reasons}"
    made = answer.get("usage", {}).get("completion_tokens", 0)
    if not 1 <= made <= request.max_tokens * request.num_choices:
        return f"{made} tokens; at most {request.max_tokens * request.num_choices} were asked for"
    if request.body.get("logprobs") is not None and any(choice.get("logprobs") is None for choice in choices):
        return "logprobs are missing"
    prompt = request.body.get("prompt")
    if request.body.get("echo") and isinstance(prompt, str) and not all(c["text"].startswith(prompt) for c in choices):
        return "the prompt is not echoed"
    return None
