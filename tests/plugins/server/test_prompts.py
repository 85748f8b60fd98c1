"""Prompts of a request become token ids off the event loop when they are long, alone or together."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from pelton.errors import RequestError
from pelton.sampling_params import SamplingParams
from pelton_plugins.loaders.text.tokenizer import BYTE_OF_CHARACTER, RustTokenizer
from pelton_plugins.server.params import sampling_params
from pelton_plugins.server.prompts import LONG_TEXT_CHARS, MANY_TEXTS_CHARS, read_prompts, tokenize
from pelton_plugins.server.protocol import CompletionRequest


class ThreadTokenizer:
    """One token a text: its length. Notes on which threads it ran."""

    max_token_chars: int | None = None

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
        (["x" * 100] * (MANY_TEXTS_CHARS // 100), False),
        (["x" * 100] * (MANY_TEXTS_CHARS // 100 + 1), True),
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


class NotedTokenizer:
    """One token for every ten characters. Notes on what it was given."""

    max_token_chars = 10

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        self.texts += texts
        return [list(range(-(-len(text) // 10))) for text in texts]


def noted_llm(max_model_len: int = 5000) -> SimpleNamespace:
    most = SimpleNamespace(max_model_len=max_model_len)
    return SimpleNamespace(tokenizer=NotedTokenizer(), model=most, info=most)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    llm = noted_llm()
    for prompt in ("x" * 50_001, ["x", "x" * 50_001]):
        with pytest.raises(RequestError, match=r"maximum context length is 5000 tokens.*value=50001") as found:
            asyncio.run(read_prompts(llm, CompletionRequest(prompt=prompt), SamplingParams(max_tokens=4)))
        assert found.value.param == "input_text" and "no more than 50000 can fit" in str(found.value)
    with pytest.raises(RequestError, match="value=50001"):
        asyncio.run(tokenize(llm, "x" * 50_001, add_special_tokens=False))
    assert llm.tokenizer.texts == []
    assert len(asyncio.run(tokenize(llm, "x" * 50_000, add_special_tokens=False))) == 5000


@pytest.mark.parametrize("side, kept, ids", [("right", "ax", [0, 1]), ("left", "xb", [4998, 4999])])
def test_a_text_to_truncate_is_cut_before_it_is_tokenized(side: str, kept: str, ids: list[int]) -> None:
    llm = noted_llm()
    request = CompletionRequest(prompt="a" + "x" * 90_000 + "b", truncate_prompt_tokens=2, truncation_side=side)
    [prompt] = asyncio.run(read_prompts(llm, request, SamplingParams(max_tokens=4)))
    [text] = llm.tokenizer.texts
    assert len(text) == 50_000 and text[0] + text[-1] == kept and prompt.token_ids == ids


def test_a_text_that_is_truncated_to_too_much_is_refused() -> None:
    request = CompletionRequest(prompt="x" * 90_000, truncate_prompt_tokens=5001)
    with pytest.raises(RequestError, match="value=90000"):
        asyncio.run(read_prompts(noted_llm(), request, SamplingParams(max_tokens=4)))


BYTES = {character: index for index, character in enumerate(sorted(BYTE_OF_CHARACTER))}


def byte_level(vocab: dict[str, int], normalizer: object = None) -> RustTokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    return RustTokenizer(backend)


def test_the_longest_token() -> None:
    vocab = BYTES | {"ĠĠabc": 256, "Ã©Ã©": 257}  # two spaces and abc; two e with an accent
    assert byte_level(vocab).max_token_chars == 5
    assert byte_level(vocab, normalizers.NFC()).max_token_chars == 8  # each may come as several characters
    assert byte_level(vocab, normalizers.Sequence([normalizers.NFD(), normalizers.Strip()])).max_token_chars is None
    some = {character: index for character, index in vocab.items() if BYTE_OF_CHARACTER.get(character) not in (1, 0xFF)}
    assert byte_level(some).max_token_chars == 5
    assert byte_level({"a": 0}).max_token_chars is None  # other bytes vanish
    words = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    assert RustTokenizer(words).max_token_chars is None
