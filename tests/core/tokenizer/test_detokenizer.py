"""Streamed text equals the whole decode, and never shows half a character."""

import random

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from pelton.model.source import SourceRequest
from pelton.tokenizer import IncrementalDetokenizer
from pelton_plugins.loaders.gguf.file import GGUFFile
from pelton_plugins.loaders.gguf.tokenizer import load_gguf_tokenizer
from pelton_plugins.loaders.text.tokenizer import RustTokenizer
from pelton_plugins.sources.demo import resolve

TEXTS = [
    "Hello, world!  Two spaces, a\ttab\r\nand lines.",
    "日本語と中文：你好，世界。",
    "family 👩‍👩‍👧‍👦 flag 🇯🇵 skin 👍🏽 é (combining e\u0301) नमस्ते ไทย",
    "def f(x):\n    return x ** 2  # 12345 67",
]


@pytest.fixture(scope="module")
def smollm2():
    return load_gguf_tokenizer(GGUFFile(resolve(SourceRequest(name="smollm2"))))


@pytest.fixture(scope="module")
def sentencepiece():
    """Llama 2's kind: spaces as ▁, unknown characters as bytes, a leading space that is stripped."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdehlorw",
        "▁h",
        "el",
        "▁w",
        "lo",
    ]
    merges = [("▁", "h"), ("e", "l"), ("▁", "w"), ("l", "o")]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return RustTokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def stream(tokenizer, ids, sizes=None, **options):
    """(text, deltas) of ids fed in groups of the given sizes (one by one when None)."""
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    deltas, position = [], 0
    for size in sizes or [1] * len(ids):
        deltas.append(detokenizer.step(ids[position : position + size]))
        position += size
    deltas.append(detokenizer.step(ids[position:]))
    deltas.append(detokenizer.finish())
    assert detokenizer.text == "".join(deltas)
    return detokenizer.text, deltas


@pytest.mark.parametrize("text", TEXTS)
def test_streaming_a_text_gives_it_back_without_a_broken_character(smollm2, text):
    ids = smollm2.encode(text)
    streamed, deltas = stream(smollm2, ids)
    assert streamed == text
    assert not any("\ufffd" in delta for delta in deltas)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_token_sequence_streams_to_its_full_decode(smollm2, data, skip):
    ids = data.draw(st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=40))
    sizes = data.draw(st.lists(st.integers(1, 5), max_size=20))
    streamed, _ = stream(smollm2, ids, sizes, skip_special_tokens=skip)
    assert streamed == smollm2.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60), cut=st.integers(0, 60))
def test_the_prompts_tail_is_context_for_a_character_cut_in_two(smollm2, text, cut):
    ids = smollm2.encode(text)
    assume("\ufffd" not in text and smollm2.decode(ids) == text)  # its vocabulary lacks a few bytes
    cut = min(cut, len(ids))
    streamed, _ = stream(smollm2, ids[cut:], prompt_token_ids=ids[:cut])
    shown = smollm2.decode(ids[:cut]).rstrip("\ufffd")
    assert shown + streamed == text


def test_half_a_character_is_held_back_until_it_is_whole(smollm2):
    ids = smollm2.encode("日")
    assert len(ids) == 2
    detokenizer = IncrementalDetokenizer(smollm2)
    assert detokenizer.step(ids[:1]) == ""
    assert detokenizer.step(ids[1:]) == "日"
    assert detokenizer.finish() == ""


def test_a_character_that_never_ends_comes_as_replacement_at_the_finish(smollm2):
    detokenizer = IncrementalDetokenizer(smollm2)
    half = smollm2.encode("日")[:1]
    assert detokenizer.step(half) == ""
    assert detokenizer.finish() == "\ufffd" == smollm2.decode(half)


@pytest.mark.parametrize("skip, expected", [(True, "a b"), (False, "a<|im_end|> b<|im_start|>")])
def test_special_tokens_are_left_out_or_shown(smollm2, skip, expected):
    ids = smollm2.encode("a<|im_end|> b<|im_start|>")
    assert stream(smollm2, ids, skip_special_tokens=skip)[0] == expected


def test_unknown_ids_add_nothing(smollm2):
    ids = [*smollm2.encode("a"), 10**6, *smollm2.encode(" b")]
    assert stream(smollm2, ids)[0] == "a b"
    assert smollm2.token_bytes(10**6) == b"" and smollm2.token_bytes(-1) == b""


@pytest.mark.parametrize("text", ["hello world", "hello  日本 world", "   h 👍🏽"])
def test_a_sentencepiece_text_streams_back_with_its_spaces(sentencepiece, text):
    ids = sentencepiece.encode(text)
    streamed, deltas = stream(sentencepiece, ids)
    assert streamed == sentencepiece.decode(ids) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_a_sentencepiece_continuation_keeps_the_space_before_its_first_word(sentencepiece):
    prompt, new = sentencepiece.encode("hello"), [sentencepiece.token_id("▁w"), sentencepiece.token_id("o")]
    assert stream(sentencepiece, new, prompt_token_ids=prompt)[0] == " wo"


def test_a_sentencepiece_sequence_with_invalid_bytes_goes_on_and_ends(sentencepiece):
    rng = random.Random(0)
    broken = [3 + rng.randrange(128, 256) for _ in range(200)]
    ids = [*broken, *sentencepiece.encode("hello world")]
    streamed, deltas = stream(sentencepiece, ids)
    assert streamed.endswith("hello world")
    assert sum(bool(delta) for delta in deltas[:200]) > 10  # it is not held back for ever


def test_ten_thousand_tokens_cost_the_same_each(smollm2, sentencepiece):
    """No growing window: the number of ids decoded at once stays bounded."""
    longest = 0

    class Watched(RustTokenizer):
        def decode(self, token_ids, skip_special_tokens=True):
            nonlocal longest
            longest = max(longest, len(token_ids))
            return super().decode(token_ids, skip_special_tokens)

    watched = Watched(sentencepiece.backend)
    stream(watched, sentencepiece.encode("hello world " * 1000))
    assert longest <= 16
    big = stream(smollm2, smollm2.encode("word " * 3000))[0]
    assert big == "word " * 3000
