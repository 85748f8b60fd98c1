"""`prompt_embeds` of completions: which files are read, that none of them runs anything, and the server's answers to them."""

from __future__ import annotations

import base64
import io
import json
import random
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from pelton_e2e import make_prompts, serving
from pelton_late_import import LateImport
from safetensors.torch import save

from pelton.errors import RequestError
from pelton_plugins.server.embeds_body import decode_embeds

openai = LateImport("openai")


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def saved(value: Any) -> bytes:
    """As vLLM's clients write it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


TENSOR = torch.arange(12, dtype=torch.float32).view(3, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("write", [saved, lambda tensor: save({"x": tensor})], ids=["torch", "safetensors"])
def test_both_forms_are_read(write, dtype):
    tensor = TENSOR.to(dtype)
    found = decode_embeds(encoded(write(tensor)), "prompt_embeds")
    assert (found.dtype, found.shape) == (str(dtype).removeprefix("torch."), (3, 4))
    assert torch.equal(torch.frombuffer(bytearray(found.data), dtype=dtype).view(3, 4), tensor)


def test_a_part_of_a_larger_storage_is_read():
    found = decode_embeds(encoded(saved(TENSOR[1:])), "prompt_embeds")
    assert torch.equal(torch.frombuffer(bytearray(found.data), dtype=torch.float32).view(found.shape), TENSOR[1:])
    assert decode_embeds(encoded(saved(TENSOR[None])), "prompt_embeds").shape == (3, 4)


def with_program(program: bytes) -> bytes:
    """torch.save's file with another pickle in it."""
    source, target = zipfile.ZipFile(io.BytesIO(saved(TENSOR))), io.BytesIO()
    with zipfile.ZipFile(target, "w") as file:
        for name in source.namelist():
            file.writestr(name, program if name.endswith("data.pkl") else source.read(name))
    return target.getvalue()


def compressed() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"0" * 10_000_000)
    return target.getvalue()


@pytest.mark.parametrize(
    "data, words",
    [
        (with_program(b"\x80\x02cos\nsystem\nX\x15\x00\x00\x00touch /tmp/pelton_pwn\x85R."), "cannot be read"),
        (with_program(b"\x80\x02(" + b"N" * 60_000 + b"t."), "cannot be read"),
        (with_program(b"\x80\x02N" + b"\x85" * 60_000 + b"."), "cannot be read"),
        (with_program(b"\x80\x02N" * 40_000 + b"."), "more than one tensor"),
        (saved({"a": TENSOR}), "not one plain tensor: opcode EMPTY_DICT"),
        (saved(torch.nn.Parameter(TENSOR)), "not one plain tensor"),
        (saved(TENSOR.T), "not contiguous"),
        (saved(TENSOR.to_sparse()), "not one plain tensor"),
        (saved(TENSOR.long()), "not one plain tensor of float32"),
        (saved(TENSOR.view(2, 2, 3)), "not .tokens, hidden size."),
        (compressed(), "compressed members"),
        (save({"a": TENSOR, "b": TENSOR.clone()}), "2 tensors in one file"),
        (save({"a": TENSOR.long()}), "dtype 'I64'"),
        (save({"a": TENSOR})[:-4], "offsets beyond the file"),
        (b"", "neither a safetensors nor a torch file"),
        (b"\xff" * 64, "neither a safetensors nor a torch file"),
        (b"\x02" + bytes(7) + b"[]", "cannot be read"),
    ],
)
def test_others_are_refused(data, words):
    with pytest.raises(RequestError, match=words) as caught:
        decode_embeds(encoded(data), "prompt_embeds[1]")
    assert caught.value.param == "prompt_embeds[1]"
    assert "\n" not in str(caught.value)
    assert not Path("/tmp/pelton_pwn").exists()


@pytest.mark.parametrize("text", ["\u0000", "gASV*", "é", "A"])
def test_what_is_no_base64_is_refused(text):
    with pytest.raises(RequestError, match="no base64"):
        decode_embeds(text, "prompt_embeds")


def test_changed_bytes_never_raise_anything_else():
    rng = random.Random(17)
    for good in (saved(TENSOR), save({"x": TENSOR})):
        for _ in range(300):
            data = bytearray(good)
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            try:
                found = decode_embeds(encoded(bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])), "x")
            except RequestError:
                continue
            assert len(found.shape) <= 8


# The server.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, torch.Tensor]]:
    """URL, and the model's embeddings [V, H]."""
    from transformers import AutoModelForCausalLM

    from pelton.testing.models import make_tiny_checkpoint

    path = str(make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))
    matrix = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).get_input_embeddings().weight.detach()
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ("--served-model-name", "tiny", "--dtype", "float32", "--enable-prompt-embeds", "--max-model-len", "256")
    with serving(path, *flags, log=log) as (url, _):
        yield url, matrix


def test_answers_are_those_of_the_tokens(server):
    url, matrix = server
    prompts = make_prompts(matrix.shape[0], (5, 33, 100))
    embeds = [matrix[torch.tensor(prompt)] for prompt in prompts]
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60)
    same = {
        "model": "tiny",
        "temperature": 0,
        "max_tokens": 12,
        "logprobs": 1,
        "extra_body": {"return_token_ids": True},
    }
    expected = client.completions.create(prompt=prompts, **same)
    files = [saved(embeds[0]), save({"x": embeds[1]}), saved(embeds[2])]
    extra = {"prompt_embeds": [encoded(one) for one in files[:2]], "return_token_ids": True}
    found = client.completions.create(prompt=[prompts[2]], **{**same, "extra_body": extra})
    assert [choice.token_ids for choice in found.choices] == [choice.token_ids for choice in expected.choices]
    assert [choice.prompt_token_ids for choice in found.choices] == [None, None, prompts[2]]
    assert found.usage.prompt_tokens == expected.usage.prompt_tokens == 138
    # vLLM's documents: one text of base64, without a prompt; streamed.
    stream = client.completions.create(
        prompt=None, model="tiny", temperature=0, max_tokens=12, stream=True,
        extra_body={"prompt_embeds": encoded(files[2]), "return_token_ids": True},
    )  # fmt: skip
    ids = [token_id for chunk in stream for choice in chunk.choices for token_id in choice.token_ids]
    assert ids == expected.choices[2].token_ids


@pytest.mark.parametrize(
    "more, param, words",
    [
        ({"echo": True}, "echo", "does not go with prompt_embeds"),
        ({"use_beam_search": True}, "use_beam_search", "does not go with prompt_embeds"),
        ({"truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "does not go with prompt_embeds"),
        ({"prompt_embeds": []}, "prompt", "prompt is empty"),
        ({"prompt_embeds": encoded(saved(TENSOR))}, "prompt_embeds", r"must be \[tokens, \d+\]"),
        ({"prompt_embeds": [encoded(saved(TENSOR * torch.nan))]}, "prompt_embeds[0]", r"must be \[tokens, \d+\]"),
        ({"prompt_embeds": 5}, "body.prompt_embeds", "Expected"),
        ({"prompt_embeds": "x", "n": 10**6}, "n", ""),
    ],
)
def test_wrong_ones_are_refused_and_the_server_goes_on(server, more, param, words):
    url, matrix = server
    good = encoded(saved(matrix[:4].contiguous()))
    reply = httpx.post(url + "/v1/completions", json={"prompt_embeds": good, "max_tokens": 1} | more, timeout=30)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert re.search(words, error["message"])
    assert (
        httpx.post(url + "/v1/completions", json={"prompt_embeds": good, "max_tokens": 1}, timeout=60).status_code
        == 200
    )


def test_numbers_that_are_not_finite_are_refused(server):
    url, matrix = server
    embeds = matrix[:4].clone()
    embeds[2, 1] = float("inf")
    reply = httpx.post(url + "/v1/completions", json={"prompt_embeds": encoded(saved(embeds))}, timeout=30)
    assert reply.status_code == 400
    assert "up to 10000 in size" in json.loads(reply.content)["error"]["message"]
