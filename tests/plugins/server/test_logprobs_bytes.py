"""Logprobs of tokens that are parts of a character, and of special tokens: names, bytes, offsets."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pelton.outputs import CompletionOutput, Logprob, RequestOutput
from pelton.sampling_params import RequestOutputKind
from pelton.tokenizer import IncrementalDetokenizer
from pelton_plugins.loaders.text.tokenizer import BYTE_OF_CHARACTER, RustTokenizer

HEAD, TAIL, SPACE_HEAD = 256, 257, 258  # b"\xf0\x9f", b"\x98\x80", b" \xf0"; a byte's id is the byte
BOS, EOS = 259, 260
SMILE = [HEAD, TAIL]


def byte_level() -> RustTokenizer:
    spelt = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    pieces = [b"\xf0\x9f", b"\x98\x80", b" \xf0"]
    merged = {"".join(spelt[byte] for byte in piece): 256 + index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(BYTE_OF_CHARACTER | merged, [(name[0], name[1]) for name in merged]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return RustTokenizer(backend)


def sentencepiece() -> RustTokenizer:
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>"])
    return RustTokenizer(backend)


@pytest.fixture
def say(start):
    """Asks a server whose engine answers the given ids; the other candidates of each are the given ones."""

    def ask(path, body, answer, *, others=(), tokenizer=None):
        server = start()
        tokenizer = server.llm.tokenizer = tokenizer or byte_level()

        def row(token_id):
            found = {token_id: Logprob(-1.0, 2, tokenizer.token_text(token_id))}
            for rank, (other, value) in enumerate(others, start=1):
                found.setdefault(other, Logprob(value, rank, tokenizer.token_text(other)))
            return found

        async def generate(prompt, params, request_id, **_):
            ids = prompt["prompt_token_ids"]
            text = IncrementalDetokenizer(tokenizer, ids, skip_special_tokens=params.skip_special_tokens)
            parts = [CompletionOutput(0, text.step([one]), [one], logprobs=[row(one)]) for one in answer]
            if params.output_kind != RequestOutputKind.DELTA:
                rows = [part.logprobs[0] for part in parts]
                parts = [CompletionOutput(0, "".join(part.text for part in parts), answer, logprobs=rows)]
            parts[-1].finish_reason = "length"
            prompt_rows = None if params.prompt_logprobs is None else [None, *map(row, ids[1:])]
            for part in parts:
                is_last = part is parts[-1]
                yield RequestOutput(request_id, None, ids, [part], is_last, prompt_logprobs=prompt_rows)
                prompt_rows = None

        server.llm.generate = generate
        reply = server.post(path, body)
        assert reply.status_code == 200, reply.text
        return reply

    return ask


def complete(say, prompt, answer, *, tokenizer=None, others=(), **more):
    body = {"prompt": prompt, "logprobs": len(others), **more}
    return say("/v1/completions", body, answer, others=others, tokenizer=tokenizer).json()["choices"][0]


def chat(say, answer, *, others=(), **more):
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "logprobs": True,
        "top_logprobs": len(others),
        "return_token_ids": True,
        **more,
    }
    return say("/v1/chat/completions", body, answer, others=others)


def test_parts_of_a_character_are_named_by_their_bytes_and_none_is_lost(say):
    others = [(0x9F, -0.5), (0xF0, -2.0), (0x80, -3.0), (0x61, -4.0)]
    choice = complete(say, [0x61], SMILE, others=others)
    assert choice["text"] == "\U0001f600"
    found = choice["logprobs"]
    assert found["tokens"] == ["bytes:\\xf0\\x9f", "bytes:\\x98\\x80"]
    assert found["token_logprobs"] == [-1.0, -1.0]
    rest = {"bytes:\\x9f": -0.5, "bytes:\\xf0": -2.0, "bytes:\\x80": -3.0}
    assert found["top_logprobs"][0] == {"bytes:\\xf0\\x9f": -1.0, **rest}
    assert found["top_logprobs"][1] == {"bytes:\\x98\\x80": -1.0, **rest}


def test_all_bytes_of_a_token_are_escaped_and_a_real_replacement_character_is_not(say):
    tokenizer = byte_level()
    tokenizer.backend.add_tokens(["\ufffd"])
    tokenizer = RustTokenizer(tokenizer.backend)
    found = complete(say, [0x61], [SPACE_HEAD, 261], tokenizer=tokenizer)["logprobs"]
    assert found["tokens"] == ["bytes:\\x20\\xf0", "\ufffd"]


def test_of_two_tokens_with_one_text_the_likelier_stays_and_the_chosen_always(say):
    class Same(RustTokenizer):
        def token_text(self, token_id):
            return "x" if token_id in (1, 2, 3) else super().token_text(token_id)

    same = Same(byte_level().backend)
    others = [(1, -0.5), (2, -2.0), (0x61, -3.0)]
    found = complete(say, [0x61], [0x62], tokenizer=same, others=others)["logprobs"]
    assert found["top_logprobs"] == [{"x": -0.5, "b": -1.0}]
    found = complete(say, [0x61], [3], tokenizer=same, others=others)["logprobs"]
    assert found["top_logprobs"] == [{"x": -1.0}]


@pytest.mark.parametrize("as_ids", [False, True])
def test_chat_bytes_joined_are_the_content(say, as_ids):
    answer = [0x61, SPACE_HEAD, 0x9F, TAIL, *SMILE, EOS]
    others = [(0x9F, -0.5), (EOS, -2.0)]
    choice = chat(say, answer, others=others, return_tokens_as_token_ids=as_ids).json()["choices"][0]
    rows = choice["logprobs"]["content"]
    assert [len(row["bytes"]) for row in rows] == [1, 2, 1, 2, 2, 2, 0]
    assert b"".join(bytes(row["bytes"]) for row in rows).decode() == choice["message"]["content"] == "a 😀😀"
    assert [top["bytes"] for top in rows[0]["top_logprobs"]] == [[0x9F], [0x61]]
    assert rows[1]["token"] == ("token_id:258" if as_ids else "bytes:\\x20\\xf0")
    assert rows[-1]["token"] == ("token_id:260" if as_ids else "</s>")


def test_chat_bytes_of_a_special_token_that_is_shown(say):
    choice = chat(say, [0x61, EOS], skip_special_tokens=False).json()["choices"][0]
    assert bytes(choice["logprobs"]["content"][1]["bytes"]) == b"</s>"
    assert choice["message"]["content"] == "a</s>"


def test_chat_bytes_of_a_stream(say):
    reply = chat(say, SMILE, stream=True).text.split("\n\n")
    chunks = [json.loads(part.removeprefix("data: "))["choices"][0] for part in reply if part.startswith("data: {")]
    rows = [row for chunk in chunks for row in (chunk.get("logprobs") or {}).get("content", [])]
    assert b"".join(bytes(row["bytes"]) for row in rows).decode() == "😀"


def test_offsets_begin_at_0_where_an_echoed_prompt_begins_with_a_special_token(say):
    choice = complete(say, [BOS, 0x61, 0x0A], [0x0A], echo=True)
    assert choice["text"] == "a\n\n"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "\n", "\n"]


def test_offsets_count_special_tokens_that_stand_in_an_echoed_text(say):
    choice = complete(say, "a</s>b", [0x63], echo=True)
    assert choice["text"] == "a</s>bc"
    assert choice["logprobs"]["text_offset"] == [0, 1, 5, 6]


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_where_the_token_is_in_the_text(say, stream, as_ids):
    prompt, answer = [0x61, *SMILE, 0x62], [SPACE_HEAD, 0x9F, TAIL, EOS, 0x63, HEAD, 0x98, 0x80, 0x64]
    body = {
        "prompt": prompt, "logprobs": 0, "echo": True, "stream": stream, "return_tokens_as_token_ids": as_ids,
    }  # fmt: skip
    reply = say("/v1/completions", body, answer)
    if stream:
        parts = [part.removeprefix("data: ") for part in reply.text.split("\n\n") if part.startswith("data: {")]
        choices = [json.loads(part)["choices"][0] for part in parts]
    else:
        choices = reply.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "a😀b 😀c😀d"
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert offsets == [0, 1, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 7]


def test_offsets_where_the_answer_ends_a_character_of_the_prompt(say):
    choice = complete(say, [0x61, HEAD], [TAIL, 0x62])
    assert choice["text"] == "😀b"
    assert choice["logprobs"]["text_offset"] == [0, 1]
    choice = complete(say, [0x61, HEAD], [TAIL, 0x62], echo=True)
    assert choice["text"] == "a\ufffd😀b"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


def test_sentencepiece_offsets_leave_out_the_first_space(say):
    tokenizer = sentencepiece()
    word, bytes_ = tokenizer.token_id("▁a"), [tokenizer.token_id(f"<0x{byte:02X}>") for byte in "é".encode()]
    choice = complete(say, [1, word, word], [*bytes_, word], tokenizer=tokenizer, echo=True)
    assert choice["text"] == "a aé a"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 3, 3, 4]
    assert choice["logprobs"]["tokens"] == ["<s>", " a", " a", "bytes:\\xc3", "bytes:\\xa9", " a"]
