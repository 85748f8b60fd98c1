"""The server and an engine process of its own, whose steps take 150 ms and no model: deaths, ends, aborts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import psutil
import pytest
from pelton_e2e import eventually, gauge
from pelton_engines import ENGINE, Serving, starter
from pelton_engines import LONG as NUM_TOKENS

LONG = {"prompt": "abc", "max_tokens": NUM_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "log"


@pytest.fixture(scope="module")
def serving_slowly(
    tmp_path_factory: pytest.TempPathFactory, log: Path
) -> Callable[..., AbstractContextManager[Serving]]:
    return starter(tmp_path_factory, log)


@pytest.fixture(scope="module")
def url(serving_slowly) -> Iterator[str]:
    """Of a server that no test ends."""
    with serving_slowly() as running:
        yield running.url


def test_a_killed_engine_is_told_at_once_and_comes_back(serving_slowly):
    with serving_slowly() as running:
        url, process = running.url, running.process
        replies: list[tuple[bool, int, str]] = []
        has_begun = threading.Event()

        def ask(stream: bool) -> None:
            with httpx.stream("POST", url + "/v1/completions", json={**LONG, "stream": stream}, timeout=120) as reply:
                if stream:  # its status came with the first token; before that the failure would be the status
                    has_begun.set()
                text = "".join(reply.iter_text())
                replies.append((stream, reply.status_code, text))

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        assert eventually(lambda: gauge(url, "num_requests_running") == 2) and has_begun.wait(60)
        [engine] = running.children(ENGINE)
        with running.without_starts():
            os.kill(engine.pid, signal.SIGKILL)
            for thread in threads:
                thread.join(60)
            assert len(replies) == 2
            for stream, status, text in replies:
                assert status == (200 if stream else 500)
                assert '"type":"InternalServerError"' in text
                assert "was killed by SIGKILL" in text, "known by its end, not by its silence"
                assert not stream or text.endswith("data: [DONE]\n\n")
            health = httpx.get(url + "/health", timeout=60)
            assert health.status_code == 503 and health.json()["error"]["message"]
            assert httpx.post(url + "/v1/completions", json={"prompt": "a"}, timeout=60).status_code == 503
        assert eventually(lambda: httpx.get(url + "/health", timeout=60).status_code == 200)
        reply = httpx.post(url + "/v1/completions", json={"prompt": "a", "max_tokens": 4}, timeout=60)
        assert reply.status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0


def test_a_step_that_hangs_ends_its_requests_and_the_engine_comes_back(serving_slowly):
    """Meanwhile others are told to come again."""
    hanging = ("--max-step-s", "2", "--plugin-config.fake_engine.hang_at_step", "10")
    with serving_slowly(*hanging) as running:
        url = running.url
        with running.without_starts():
            with httpx.stream("POST", url + "/v1/completions", json={**LONG, "stream": True}, timeout=120) as reply:
                assert reply.status_code == 200
                text = "".join(reply.iter_text())
            assert "made no progress" in text and "max_step_s is 2" in text and text.endswith("data: [DONE]\n\n")
            health = httpx.get(url + "/health", timeout=60)
            assert health.status_code == 503 and health.json()["error"]["message"]
            refused = httpx.post(url + "/v1/completions", json={"prompt": "a", "max_tokens": 4}, timeout=60)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert eventually(lambda: httpx.get(url + "/health", timeout=60).status_code == 200)
        reply = httpx.post(url + "/v1/completions", json={"prompt": "a", "max_tokens": 4}, timeout=60)
        assert reply.status_code == 200
        assert gauge(url, "engine_restarts_total") == 1
        assert eventually(lambda: gauge(url, "num_requests_running") == gauge(url, "kv_cache_usage_perc") == 0)


def test_sigterm_lets_requests_finish_and_leaves_no_process(serving_slowly, log):
    with serving_slowly("--graceful-shutdown-s", "200") as running:
        url, process = running.url, running.process
        replies: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: replies.append(httpx.post(url + "/v1/completions", json=LONG, timeout=120))
        )
        thread.start()
        assert eventually(lambda: gauge(url, "num_requests_running") == 1)
        family = process.children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert eventually(lambda: "Shutting down; 1 requests have" in log.read_text())
        running.end([thread])
        assert process.wait(90) == 0
        assert replies[0].json()["usage"]["completion_tokens"] == NUM_TOKENS
        _, alive = psutil.wait_procs(family, timeout=90)
        assert not alive
    assert "Traceback" not in log.read_text()


def test_a_killed_server_leaves_neither_its_engine_nor_its_folder(serving_slowly, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving_slowly() as running:
        [engine] = running.children(ENGINE)
        assert list(tmp_path.glob("pelton-*"))
        running.process.kill()
        running.process.wait()
        assert not psutil.wait_procs([engine], 90)[1]
        assert eventually(lambda: not list(tmp_path.glob("pelton-*")))


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_frees_the_blocks(url, stream):
    before = gauge(url, "generation_tokens_total")
    data = json.dumps({**LONG, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode() + data)
        assert eventually(lambda: gauge(url, "kv_cache_usage_perc") > 0)
    assert eventually(lambda: gauge(url, "kv_cache_usage_perc") == 0)
    assert eventually(lambda: gauge(url, "num_requests_running") == 0)
    assert gauge(url, "generation_tokens_total") - before < NUM_TOKENS, "it ended before it was whole"


def test_a_deadline_ends_the_request_and_frees_it(url):
    before = gauge(url, "generation_tokens_total")
    reply = httpx.post(url + "/v1/completions", json={**LONG, "timeout_s": 0.3}, timeout=120)
    assert (reply.status_code, reply.json()["error"]["type"]) == (408, "RequestTimeoutError")
    assert eventually(lambda: gauge(url, "kv_cache_usage_perc") == 0)
    assert gauge(url, "generation_tokens_total") - before < NUM_TOKENS, "it ended before it was whole"


def test_a_full_queue_is_503_and_counted(serving_slowly):
    with serving_slowly("--max-num-seqs", "1", "--max-num-queued-reqs", "1") as running:
        url = running.url
        replies: list[httpx.Response] = []

        def ask() -> None:
            replies.append(httpx.post(url + "/v1/completions", json=LONG, timeout=120))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread, name in zip(threads, ("running", "waiting"), strict=True):
            thread.start()
            assert eventually(lambda name=name: gauge(url, f"num_requests_{name}") == 1)
        for _ in range(3):
            ask()
        assert [reply.status_code for reply in replies] == [503, 503, 503]
        [error] = {reply.json()["error"]["type"] for reply in replies}
        assert error == "ServiceUnavailableError"
        running.end(threads)
        assert [reply.status_code for reply in replies[3:]] == [200, 200]
        text = httpx.get(url + "/metrics", timeout=60).text
        assert re.search(r'admission_rejections_total\{.*reason="max_num_queued_reqs"\} 3\.0', text)
