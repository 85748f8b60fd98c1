"""Requests from a ShareGPT file: the first question and answer of each conversation."""

from __future__ import annotations

import json
import random
from typing import Any

from pelton.errors import ConfigError

MIN_TOKENS = 4
MAX_PROMPT_TOKENS = 1024
MAX_TOTAL_TOKENS = 2048


def sharegpt_requests(
    path: str, num: int, tokenizer: Any, rng: random.Random, *, max_tokens: int, output_len: int | None = None
) -> list[tuple[str, int]]:
    """(prompt, output tokens) of `num` conversations in random order; `output_len` in place of the answers' lengths.

    Left out, as is the custom: questions or answers under 4 tokens, questions above 1,024, both together above 2,048 or
    `max_tokens`. Raises `ConfigError` when the file has too few, or is not such a file.
    """
    pairs = _read_pairs(path)
    rng.shuffle(pairs)
    requests: list[tuple[str, int]] = []
    for question, answer in pairs:
        if len(requests) == num:
            break
        num_in = len(tokenizer.encode(question))
        num_out = output_len or len(tokenizer.encode(answer))
        if (
            MIN_TOKENS <= num_in <= MAX_PROMPT_TOKENS
            and (output_len is not None or num_out >= MIN_TOKENS)
            and num_in + num_out <= min(MAX_TOTAL_TOKENS, max_tokens)
        ):
            requests.append((question, num_out))
    if len(requests) < num:
        raise ConfigError(
            f"--dataset-path {path} has {len(requests)} usable conversations; --num-prompts asks for {num}."
        )
    return requests


def _read_pairs(path: str) -> list[tuple[str, str]]:
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error}.") from error
    try:
        talks = [record.get("conversations", record.get("conversation", [])) for record in data]
        return [(talk[0]["value"], talk[1]["value"]) for talk in talks if len(talk) >= 2]
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f'--dataset-path {path} is not a ShareGPT file: a list of objects with "conversations", each with a "value".'
        ) from error
