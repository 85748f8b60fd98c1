"""Prompts of a request become token ids off the event loop when they are long, alone or together."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from pelton.sampling_params import SamplingParams
from pelton_plugins.server.params import sampling_params
from pelton_plugins.server.prompts import LONG_TEXT_CHARS, read_prompts
from pelton_plugins.server.protocol import CompletionRequest


class ThreadTokenizer:
    """One token a text: its length. Notes on which threads it ran."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.threads.add(threading.get_ident())
        return [len(text)]

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]


@pytest.mark.parametrize(
    "prompt, is_long",
    [
        ("x" * LONG_TEXT_CHARS, False),
        ("x" * (LONG_TEXT_CHARS + 1), True),
        (["x" * 100] * (LONG_TEXT_CHARS // 100), False),
        (["x" * 100] * (LONG_TEXT_CHARS // 100 + 1), True),
    ],
)
def test_long_texts_and_many_texts_are_tokenized_on_a_thread(prompt: str | list[str], is_long: bool) -> None:
    tokenizer, most = ThreadTokenizer(), SimpleNamespace(max_model_len=100)
    llm = SimpleNamespace(tokenizer=tokenizer, model=most, info=most)
    request = CompletionRequest(prompt=prompt, max_tokens=4)
    prompts = asyncio.run(read_prompts(llm, request, SamplingParams(max_tokens=4)))
    texts = [prompt] if isinstance(prompt, str) else prompt
    assert [(found.token_ids, found.text) for found in prompts] == [([len(text)], text) for text in texts]
    assert (threading.get_ident() in tokenizer.threads) is not is_long


@pytest.mark.parametrize("own, logprobs, expected", [(-1, 2, -1), (3, 2, 3), (1, 2, 2), (None, 2, 2)])
def test_the_larger_of_two_prompt_logprobs_counts_and_all_is_the_largest(
    own: int | None, logprobs: int, expected: int
) -> None:
    request = CompletionRequest(prompt="x", prompt_logprobs=own)
    params = sampling_params(request, max_tokens=1, logprobs=logprobs, model_defaults={}, prompt_logprobs=logprobs)
    assert params.prompt_logprobs == expected
