"""`pelton generate`, `pelton chat` and `pelton backends` with a model."""

from __future__ import annotations

import builtins
import io
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pelton.cli.main import main
from pelton.errors import ConfigError
from pelton_plugins.commands.sampling import SamplingFlags

SMALL = ["--dtype", "float32", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "4M", "--log-level", "error"]
GREEDY = ["--temperature", "0", "--max-tokens", "6"]


def run(capsys, *argv: str) -> tuple[int, str, str]:
    status = main([*argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


class Terminal(io.StringIO):
    """stdin as at a terminal."""

    def isatty(self) -> bool:
        return True


# generate


def test_one_prompt_streams_the_text_that_json_has(tiny_model, capsys):
    common = ["--model", tiny_model, *SMALL, *GREEDY]
    status, text, _ = run(capsys, "generate", "The server", *common)
    assert status == 0
    status, line, _ = run(capsys, "generate", "The server", "--json", *common)
    assert status == 0
    record = json.loads(line)
    assert record["prompt"] == "The server" and record["error"] is None and record["num_prompt_tokens"] > 0
    completion = record["outputs"][0]
    assert completion["text"] + "\n" == text
    assert len(completion["token_ids"]) == 6 and completion["finish_reason"] == "length"


def test_prompts_come_from_arguments_files_and_stdin_alike(tiny_model, capsys, tmp_path, monkeypatch):
    prompts = ["One house", "Another house"]
    (tmp_path / "p.txt").write_text("\n".join(prompts) + "\n\n")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(prompts)))
    common = ["--json", "--model", tiny_model, *SMALL, *GREEDY]
    outputs = []
    for source in (prompts, ["--input-file", str(tmp_path / "p.txt")], ["--input-file", str(tmp_path / "p.jsonl")], []):
        status, out, _ = run(capsys, "generate", *source, *common)
        assert status == 0
        outputs.append(sorted(out.splitlines()))
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]
    assert [json.loads(line)["prompt"] for line in outputs[0]] == prompts


def test_several_prompts_are_headed_and_samples_counted(tiny_model, capsys):
    status, out, _ = run(capsys, "generate", "A", "B", "--sampling-params.n", "2", "--temperature", "1", "--max-tokens", "2",
                         "--seed", "1", "--model", tiny_model, *SMALL)  # fmt: skip
    assert status == 0
    assert out.count("==> A\n") == 1 and out.count("==> B\n") == 1


def test_token_ids_in_and_a_bad_prompt(tiny_model, capsys, tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text('{"prompt_token_ids": [5, 6, 7]}\n')
    status, out, _ = run(
        capsys, "generate", "--input-file", str(path), "--json", "--model", tiny_model, *SMALL, *GREEDY
    )
    assert status == 0 and json.loads(out)["num_prompt_tokens"] == 3
    path.write_text('{"prompt_token_ids": [100000]}\n')
    status, out, err = run(capsys, "generate", "--input-file", str(path), "--model", tiny_model, *SMALL)
    assert (status, out) == (1, "")
    assert err.startswith("error: Token id 100000 is not in the vocabulary")


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--input-file", "/nowhere"], "--input-file /nowhere cannot be read"),
        (["x", "--sampling-params", '{"min_q": 1}'], "Unknown sampling parameter 'min_q'. Did you mean 'min_p'?"),
        (["x", "--top-k", "many"], "--top-k is 'many'; expected a whole number"),
        (["x", "--temperature", "9", "--model", "no-such-model-anywhere"], "temperature must be"),
        (["--temperature", "9", "--input-file", "/nowhere"], "temperature must be"),
        (["x", "--model", "no-such-model-anywhere"], "No model source knows 'no-such-model-anywhere'"),
        (["x", "--device", "toaster"], "device is 'toaster'; available: cuda, rocm, cpu"),
    ],
)
def test_generate_mistakes_are_one_line(argv, message, capsys):
    status, out, err = run(capsys, "generate", *argv, "--log-level", "error")
    assert (status, out) == (2, "")
    assert message in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "lines, message", [("{", "is not valid JSON"), ('{"text": 1}', 'use an object such as {"prompt"')]
)
def test_a_bad_line_of_a_file_is_named(lines, message, capsys, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + lines)
    status, _, err = run(capsys, "generate", "--input-file", str(path))
    assert status == 2 and f"{path}:2" in err and message in err


def test_no_prompt_at_all(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    status, _, err = run(capsys, "generate")
    assert status == 2 and "There is no prompt" in err


def test_sampling_flags_keep_what_was_not_given():
    assert SamplingFlags(temperature=0.5, sampling_params={"min_p": 0.1}).given() == {"temperature": 0.5, "min_p": 0.1}
    with pytest.raises(ConfigError, match="Unknown sampling parameter 'x'"):
        SamplingFlags(sampling_params={"x": 1}).given()


# chat


def test_a_bad_flag_is_told_before_the_model_is_loaded(capsys):
    status, _, err = run(capsys, "chat", "no-such-model-anywhere", "--temperature", "9", "--log-level", "error")
    assert status == 2 and "temperature must be" in err and len(err.splitlines()) == 1


def test_a_message_from_a_pipe_gets_one_answer(tiny_model, capsys, monkeypatch):
    answers = []
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.StringIO("What is a block?\nAnd a token?\n"))
        status, out, _ = run(capsys, "chat", tiny_model, *SMALL, *GREEDY)
        assert status == 0 and out.endswith("\n") and out.strip()
        answers.append(out)
    assert answers[0] == answers[1]


def test_an_empty_pipe_is_a_mistake(tiny_model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    status, _, err = run(capsys, "chat", tiny_model, *SMALL)
    assert status == 2 and "There is no message on stdin" in err


def converse(monkeypatch, lines: list[object]) -> None:
    """Answers of `input()`, in order; an exception is raised."""
    remaining = iter(lines)

    def answer(prompt: str) -> str:
        line = next(remaining)
        if isinstance(line, BaseException):
            raise line
        return str(line)

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(builtins, "input", answer)


def test_a_conversation_remembers_until_it_is_cleared(capsys, monkeypatch, server):
    converse(monkeypatch, ["first", "second", "/clear", "third", "/what", "", EOFError()])
    status, out, _ = run(capsys, "chat", "--url", server.url, "--system", "Be brief.")
    assert status == 0
    contents = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert contents == [
        ["Be brief.", "first"],
        ["Be brief.", "first", "Hello there.", "second"],
        ["Be brief.", "third"],
    ]
    assert out.count("Hello there.") == 3 and "/clear forgets" in out


def test_a_refused_message_is_not_part_of_the_conversation(capsys, monkeypatch, server):
    converse(monkeypatch, ["refuse me", "again", "/exit"])
    status, _, err = run(capsys, "chat", "--url", server.url)
    assert status == 0
    assert "answered 400: too long" in err
    assert [m["content"] for m in server.bodies[-1]["messages"]] == ["again"]


def test_ctrl_c_at_the_prompt_ends_with_130(capsys, monkeypatch, server):
    converse(monkeypatch, [KeyboardInterrupt()])
    assert run(capsys, "chat", "--url", server.url)[0] == 130


# chat at a server


class FakeServer:
    """The least of an OpenAI server: one model, streamed answers, and what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.keys: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                outer.keys.append(self.headers.get("Authorization"))
                self._send(200, b'{"data": [{"id": "served-model"}]}')

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                last = body["messages"][-1]["content"]
                if last == "refuse me":
                    return self._send(400, b'{"error": {"message": "too long"}}')
                if last == "secret":
                    return self._send(401, b'{"error": {"message": "no key"}}')
                chunks = [
                    {"delta": {"role": "assistant", "content": ""}},
                    {"delta": {"content": "Hello "}},
                    {"delta": {"content": "there."}},
                ]
                lines = [": keep-alive", *(f"data: {json.dumps({'choices': [chunk]})}" for chunk in chunks)]
                lines.append(
                    'data: {"error": {"message": "boom"}}' if last == "break" else 'data: {"choices": [], "usage": {}}'
                )
                return self._send(200, ("\n\n".join([*lines, "data: [DONE]"]) + "\n\n").encode(), "text/event-stream")

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.http.shutdown()
    server.http.server_close()


def say(monkeypatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_chat_at_a_server_asks_for_its_model_and_sends_what_was_given(capsys, monkeypatch, server):
    monkeypatch.setenv("PELTON_API_KEY", "geheim")
    say(monkeypatch, "Hi")
    status, out, _ = run(capsys, "chat", "--url", server.url + "/v1/", "--temperature", "0.5", "--max-tokens", "9")
    assert (status, out) == (0, "Hello there.\n")
    assert server.keys == ["Bearer geheim"]
    body = server.bodies[0]
    assert body == {
        "model": "served-model", "stream": True, "temperature": 0.5, "max_tokens": 9,
        "messages": [{"role": "user", "content": "Hi"}],
    }  # fmt: skip


def test_a_named_model_is_not_asked_for(capsys, monkeypatch, server):
    say(monkeypatch, "Hi")
    assert run(capsys, "chat", "mine", "--url", server.url)[0] == 0
    assert server.bodies[0]["model"] == "mine" and server.keys == []


@pytest.mark.parametrize(
    "text, message, status",
    [
        ("refuse me", "answered 400: too long", 1),
        ("secret", "answered 401: no key Set PELTON_API_KEY.", 1),
        ("break", "error: boom", 1),
    ],
)
def test_a_servers_error_is_one_line(text, message, status, capsys, monkeypatch, server):
    say(monkeypatch, text)
    got, _, err = run(capsys, "chat", "m", "--url", server.url)
    assert got == status
    assert message in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "url, message",
    [
        ("http://127.0.0.1:1", "http://127.0.0.1:1 cannot be reached"),
        ("ftp://x", "--url is 'ftp://x'; use an address"),
        ("http://x:port", "--url is 'http://x:port'"),
    ],
)
def test_a_server_that_is_not_there(url, message, capsys, monkeypatch):
    say(monkeypatch, "Hi")
    status, _, err = run(capsys, "chat", "--url", url)
    assert status in (1, 2) and message in err and len(err.splitlines()) == 1


def test_chat_at_a_server_loads_no_engine():
    import subprocess

    code = (
        "import sys, io; sys.stdin = io.StringIO('x')\nfrom pelton.cli.main import main\n"
        "main(['chat', '--url', 'http://127.0.0.1:1'])\nprint([m for m in ('torch', 'tokenizers', 'zmq') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# backends


def test_backends_shows_winners_and_reasons(tiny_model, capsys):
    status, out, _ = run(capsys, "backends", tiny_model, "--json")
    assert status == 0
    report = json.loads(out)
    assert [row["name"] for row in report["platforms"] if row["is_chosen"]] == ["cpu"]
    assert report["model"]["architecture"] == "LlamaForCausalLM"
    [table] = report["attention"]
    assert {"native", "sdpa"} <= {row["name"] for row in table["rows"]}
    [chosen] = [row for row in table["rows"] if row["is_chosen"]]  # native where there is a compiler
    assert chosen == next(row for row in table["rows"] if row["verdict"] == "fits")
    ops = {row["op"]: row["chosen"] for row in report["ops"]}
    assert "add_norm_linear" in ops["add_norm_linear"] and "qk_norm_rope_write_kv" in ops


def test_backends_for_people(tiny_model, capsys):
    status, out, _ = run(capsys, "backends", tiny_model)
    assert status == 0
    lines = out.splitlines()
    assert any(line.split()[:1] in (["native"], ["sdpa"]) and "<- chosen: priority" in line for line in lines)
    assert any(line.split()[:1] == ["cpu"] and "<- chosen" in line for line in lines)
    assert any(line.split()[:1] == ["linear"] and ".linear" in line and "linear=64->64" in line for line in lines)


def test_backends_reports_a_refusal_with_its_reasons(tiny_model, capsys):
    status, out, _ = run(capsys, "backends", tiny_model, "--kv-cache-dtype", "float16", "--attention-backend", "native")
    assert status == 1
    assert "error: Attention backend 'native' cannot serve this model" in out and "kv dtype float16" in out


def test_backends_without_a_model_lists_what_there_is(capsys, monkeypatch):
    monkeypatch.setattr("pelton.model.resolve.resolve_model", _no_model)
    status, out, _ = run(capsys, "backends")
    assert status == 0 and "not asked: name a model" in out and "sdpa" in out


def _no_model(config, plugins):
    raise ConfigError("not here")


def test_backends_of_a_named_model_that_is_not_there(capsys):
    status, _, err = run(capsys, "backends", "no-such-model-anywhere")
    assert status == 2 and "No model source knows" in err
