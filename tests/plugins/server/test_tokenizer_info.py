"""/tokenizer_info: what clients that tokenize through the server ask first."""

from __future__ import annotations

from types import SimpleNamespace


def test_special_tokens_and_the_template_are_told(start):
    server = start()
    server.llm.tokenizer.special_tokens = {"eos_token": "</s>", "bos_token": "<s>"}
    server.llm.tokenizer.chat_template = SimpleNamespace(source="{{ messages }}")
    found = server.client.get("/tokenizer_info").json()
    assert (found["eos_token"], found["bos_token"], found["chat_template"]) == ("</s>", "<s>", "{{ messages }}")
    assert found["model_max_length"] == 256
    server.llm.tokenizer = None
    assert server.client.get("/tokenizer_info").status_code == 400


def test_it_can_be_left_out(start):
    assert start(enable_tokenizer_info_endpoint=False).client.get("/tokenizer_info").status_code == 404
