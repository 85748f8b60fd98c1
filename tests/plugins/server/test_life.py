"""The server process from its first line to its exit code, over a fake engine.

Where a test says `is_forked=False` it is started by `exec`, as users do; else as a fork, which has imported all (pelton_forked.py)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pelton_e2e import eventually, free_port
from pelton_forked import AnyForkingPopen, ExecPopen

from pelton.errors import ConfigError
from pelton_plugins.server.config import ServerConfig
from pelton_plugins.server.serve import check_tls

CODE = """
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("fake_engine", {source!r})
fake = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fake)

class Engine(fake.FakeAsyncLLM):
    def __init__(self, config, **others):
        super().__init__()
        self.step_s = {step_s}
        while os.path.exists({held_by!r}):
            time.sleep(0.01)
        time.sleep({load_s})
        {fails}

    async def start(self):
        pass

    def shutdown(self):
        print("engine shut down", file=sys.stderr, flush=True)

import pelton.sdk.async_llm
pelton.sdk.async_llm.AsyncLLM = Engine
from pelton_plugins.server import command, serve
serve.start_table = lambda info, model: "  model  fake"
command.load_plugins = fake.RoutesOnly
import pelton_plugins.server.ahead
pelton_plugins.server.ahead.EngineAhead = lambda config, plugins: open("/dev/null")  # no process
{breaks}
sys.exit(command.run(sys.argv[1:]))
"""


class Process:
    def __init__(
        self, *flags: str, load_s: float = 0.0, held_by: str = "", step_s: float = 0.02, fails: str = "", breaks: str = "",
        environ: dict[str, str] | None = None, is_forked: bool = True,
    ) -> None:  # fmt: skip
        """load_s, and a file that has to be gone: before the model is loaded."""
        source = str(Path(__file__).parents[2] / "support/pelton_fake_server.py")
        code = CODE.format(
            source=source, load_s=load_s, held_by=held_by, step_s=step_s, fails=fails or "pass", breaks=breaks
        )
        self.process = (AnyForkingPopen if is_forked else ExecPopen)(
            [sys.executable, "-c", code, *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environ or {})},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.lines.append(line)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait_for(self, pattern: str, seconds: float = 90) -> re.Match[str]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := re.search(pattern, self.text):
                return found
            if self.process.poll() is not None:
                self._reader.join(60)
                if found := re.search(pattern, self.text):
                    return found
                break
            time.sleep(0.01)
        raise AssertionError(f"no {pattern!r} in:\n{self.text}")

    def wait_ready(self) -> str:
        return self.wait_for(r"serves \S+ at (http\S+) ")[1]

    def wait_end(self, seconds: float = 90) -> int:
        code = self.process.wait(seconds)
        self._reader.join(60)
        return code


@pytest.fixture
def launch() -> Iterator[type[Process]]:
    started: list[Process] = []

    def start(*flags: str, **more: object) -> Process:
        started.append(Process(*flags, **more))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def long_request(url: str, max_tokens: int) -> tuple[threading.Thread, list[httpx.Response]]:
    replies: list[httpx.Response] = []
    body = {"prompt": "ab", "max_tokens": max_tokens, "ignore_eos": True}

    def ask() -> None:
        with contextlib.suppress(httpx.RemoteProtocolError):  # the server may end without an answer
            replies.append(httpx.post(url + "/v1/completions", json=body, timeout=120))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert eventually(lambda: httpx.get(url + "/load", timeout=60).json()["server_load"] == 1)
    return thread, replies


def loading(port: int) -> httpx.Response:
    """The first answer of a server that starts."""
    replies: list[httpx.Response] = []

    def answers() -> bool:
        with contextlib.suppress(httpx.TransportError):
            replies.append(httpx.get(f"http://127.0.0.1:{port}/health", timeout=60))
        return bool(replies)

    assert eventually(answers)
    return replies[0]


def refuses(url: str) -> bool:
    try:
        httpx.get(url + "/health", timeout=60)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # it closed a connection that waited for its turn
        pass
    return False


def test_start_prints_table_and_a_curl_line_that_works(launch):
    server = launch("tiny", "--port", "0", "--served-model-name", "shown", is_forked=False)
    url = server.wait_ready()
    server.wait_for(r"-d '.*'")
    assert "model  fake" in server.text
    command = re.search(r"^  (curl .*)$", server.text, re.MULTILINE)[1]
    out = subprocess.run(["bash", "-c", command + " -s"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert json.loads(out)["choices"][0]["message"]["content"] == "Hello, world."
    assert [card["id"] for card in httpx.get(url + "/v1/models", timeout=60).json()["data"]] == ["shown"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_requests_finish_then_the_exit_code_is_0(launch, number):
    limit_s = "inf" if number == signal.SIGINT else "30"
    server = launch("--port", "0", "--graceful-shutdown-s", limit_s, is_forked=False)
    url = server.wait_ready()
    thread, replies = long_request(url, 40)
    server.process.send_signal(number)
    assert eventually(lambda: refuses(url))
    assert server.wait_end() == 0
    thread.join(60)
    assert replies[0].status_code == 200
    assert replies[0].json()["usage"]["completion_tokens"] == 40
    assert "engine shut down" in server.text
    assert "Traceback" not in server.text


def test_requests_that_run_at_the_deadline_get_an_error(launch):
    server = launch("--port", "0", "--graceful-shutdown-s", "0.4", step_s=0.5)
    url = server.wait_ready()
    thread, replies = long_request(url, 200)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_end() == 0
    thread.join(60)
    assert replies[0].status_code == 503
    assert "shut down before the request finished" in replies[0].json()["error"]["message"]


def test_a_second_signal_ends_it_at_once(launch):
    server = launch("--port", "0", step_s=0.5)
    url = server.wait_ready()
    long_request(url, 200)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("Shutting down; 1 requests have 30 s")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_end() == 128 + signal.SIGTERM


def test_health_says_503_while_the_model_loads(launch, tmp_path):
    port, held_by = free_port(), tmp_path / "held"
    held_by.touch()
    server = launch("--port", str(port), held_by=str(held_by))
    reply = loading(port)
    assert reply.status_code == 503
    assert "loading the model" in reply.json()["error"]["message"]
    held_by.unlink()
    url = server.wait_ready()
    assert httpx.get(url + "/health", timeout=60).status_code == 200


def test_a_signal_while_the_model_loads_ends_it(launch):
    port = free_port()
    server = launch("--port", str(port), load_s=600, is_forked=False)
    loading(port)
    server.process.send_signal(signal.SIGINT)
    assert server.wait_end() == 0


def test_an_engine_that_does_not_start_is_one_line_and_a_code(launch):
    fails = "from pelton.errors import ConfigError; raise ConfigError('max_model_len is 9; use more.')"
    server = launch("--port", "0", fails=fails, is_forked=False)
    assert server.wait_end() == 2
    assert "pelton serve: max_model_len is 9; use more." in server.text
    assert "Traceback" not in server.text


def test_a_taken_port_is_told_before_loading(launch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = launch("--port", str(port), load_s=600)
        assert server.wait_end() == 2
    assert f"Cannot listen on 127.0.0.1:{port}: " in server.text and "--port" in server.text


def make_key(folder: Path, name: str) -> tuple[str, str]:
    cert, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    subprocess.run([*command, "-out", cert, "-keyout", key], check=True, capture_output=True, timeout=60)
    return cert, key


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates")
def test_tls_files_are_checked_before_loading(launch, tmp_path):
    (cert, key), (_, other) = make_key(tmp_path, "one"), make_key(tmp_path, "two")
    check_tls(ServerConfig(ssl_certfile=cert, ssl_keyfile=key))
    gone, odd = str(tmp_path / "gone.pem"), str(tmp_path / "odd.pem")
    Path(odd).write_text("no PEM")
    for files, expected in [
        ((gone, key), f"ssl_certfile {gone} cannot be loaded"),
        ((odd, key), f"ssl_certfile {odd} cannot be loaded"),
        ((cert, gone), f"ssl_keyfile {gone} cannot be loaded"),
        ((cert, odd), f"ssl_keyfile {odd} cannot be loaded"),
        ((cert, other), f"ssl_keyfile {other} is not the key of ssl_certfile"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(expected)):
            check_tls(ServerConfig(ssl_certfile=files[0], ssl_keyfile=files[1]))
    server = launch("--port", "0", "--ssl-certfile", gone, "--ssl-keyfile", key, load_s=600)
    assert server.wait_end() == 2
    assert f"pelton serve: ssl_certfile {gone} cannot be loaded (No such file or directory)." in server.text
    server = launch("--port", "0", "--ssl-certfile", cert, "--ssl-keyfile", key)
    assert httpx.get(server.wait_ready() + "/health", verify=False, timeout=60).status_code == 200


def test_only_a_signal_makes_an_end_while_loading_a_success(launch):
    """Anything that ends uvicorn by itself."""
    breaks = "serve._Uvicorn.serve = None"
    server = launch("--port", "0", load_s=600, breaks=breaks)
    assert server.wait_end() == 1
    assert "The server failed while the model was loading." in server.text and "TypeError" in server.text
    assert "Stopped while loading" not in server.text


def test_the_printed_address_works_without_the_proxy(launch):
    server = launch("--port", "0", "--root-path", "/llm")
    url = server.wait_ready()
    assert "/llm" not in server.wait_for(r"curl \S+/v1/chat/completions")[0]
    assert httpx.get(url + "/v1/models", timeout=60).status_code == 200


def test_a_reachable_address_without_a_key_is_refused(launch):
    server = launch("--host", "0.0.0.0", "--port", "0", load_s=600)
    assert server.wait_end() == 2
    assert "no api_key is set" in server.text


def test_keys_come_from_flags_and_the_environment(launch):
    server = launch("--port", "0", "--api-key", "flag-key")
    url = server.wait_ready()
    assert httpx.get(url + "/v1/models", timeout=60).status_code == 401
    assert httpx.get(url + "/v1/models", headers={"Authorization": "Bearer flag-key"}, timeout=60).status_code == 200
    assert "flag-key" not in server.text
    other = launch("--port", "0", environ={"PELTON_API_KEY": "env-key"})
    url = other.wait_ready()
    assert httpx.get(url + "/v1/models", timeout=60).status_code == 401
    assert httpx.get(url + "/v1/models", headers={"Authorization": "Bearer env-key"}, timeout=60).status_code == 200


def test_an_unknown_flag_is_an_error(launch):
    server = launch("--max-num-sequences", "3")
    assert server.wait_end() == 2
    assert "max-num-sequences" in server.text
