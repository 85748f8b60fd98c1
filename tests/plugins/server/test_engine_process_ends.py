"""The server and an engine process of its own, whose steps take 20 ms and no model: deaths, ends, aborts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest
from pelton_e2e import eventually, gauge, serving

from pelton.testing import fake_engine

LONG = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True}
WHOLE = {**LONG, "max_tokens": 50}
"""For tests that wait for the end."""


@pytest.fixture(scope="module")
def serving_slowly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable]:
    """Starts servers over the fake executor."""
    model = fake_engine.make_model_folder(tmp_path_factory.mktemp("model"))
    site = fake_engine.install(tmp_path_factory.mktemp("site"))
    log = tmp_path_factory.mktemp("log") / "log"
    flags = [
        "--load-format", "dummy", "--distributed-executor-backend", "fake_engine",
        "--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "257",
        "--plugin-config", json.dumps({"fake_engine": {"step_s": 0.02}}),
    ]  # fmt: skip

    @contextlib.contextmanager
    def start(*more: str):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
            with serving(str(model), *flags, *more, log=log) as running:
                yield running

    start.log = log
    return start


@pytest.fixture(scope="module")
def url(serving_slowly) -> Iterator[str]:
    """Of a server that no test ends."""
    with serving_slowly() as (address, _):
        yield address


def test_a_killed_engine_is_told_within_a_second_and_comes_back(serving_slowly):
    with serving_slowly() as (url, process):
        replies: list[tuple[float, object]] = []
        has_begun = threading.Event()

        def ask(stream: bool) -> None:
            with httpx.stream("POST", url + "/v1/completions", json={**LONG, "stream": stream}, timeout=60) as reply:
                if stream:  # its status came with the first token; before that the failure would be the status
                    has_begun.set()
                text = "".join(reply.iter_text())
                replies.append((time.monotonic(), (stream, reply.status_code, text)))

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        assert eventually(lambda: gauge(url, "num_requests_running") == 2) and has_begun.wait(10)
        [engine] = psutil.Process(process.pid).children()
        killed = time.monotonic()
        os.kill(engine.pid, signal.SIGKILL)
        for thread in threads:
            thread.join(10)
        assert len(replies) == 2 and max(when for when, _ in replies) - killed < 1.0
        for _, (stream, status, text) in replies:
            assert status == (200 if stream else 500)
            assert '"type":"InternalServerError"' in text
            assert not stream or text.endswith("data: [DONE]\n\n")
        health = httpx.get(url + "/health")
        assert health.status_code == 503 and health.json()["error"]["message"]
        assert httpx.post(url + "/v1/completions", json={"prompt": "a"}).status_code == 503
        assert eventually(lambda: httpx.get(url + "/health").status_code == 200, 30)
        reply = httpx.post(url + "/v1/completions", json={"prompt": "a", "max_tokens": 4}, timeout=30)
        assert reply.status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0


def test_a_step_that_hangs_ends_its_requests_and_the_engine_comes_back(serving_slowly):
    """Meanwhile others are told to come again."""
    hanging = ("--max-step-s", "2", "--plugin-config.fake_engine.hang_at_step", "40")
    with serving_slowly(*hanging) as (url, _):
        with httpx.stream("POST", url + "/v1/completions", json={**LONG, "stream": True}, timeout=60) as reply:
            assert reply.status_code == 200
            text = "".join(reply.iter_text())
        assert "made no progress" in text and "max_step_s is 2" in text and text.endswith("data: [DONE]\n\n")
        health = httpx.get(url + "/health")
        assert health.status_code == 503 and health.json()["error"]["message"]
        refused = httpx.post(url + "/v1/completions", json={"prompt": "a", "max_tokens": 4})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert eventually(lambda: httpx.get(url + "/health").status_code == 200, 30)
        reply = httpx.post(url + "/v1/completions", json={"prompt": "a", "max_tokens": 4}, timeout=30)
        assert reply.status_code == 200
        assert gauge(url, "engine_restarts_total") == 1
        assert gauge(url, "num_requests_running") == gauge(url, "kv_cache_usage_perc") == 0


def test_sigterm_lets_requests_finish_and_leaves_no_process(serving_slowly):
    with serving_slowly() as (url, process):
        replies: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: replies.append(httpx.post(url + "/v1/completions", json=WHOLE, timeout=60))
        )
        thread.start()
        assert eventually(lambda: gauge(url, "num_requests_running") == 1)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        thread.join(30)
        assert process.wait(15) == 0
        assert replies[0].json()["usage"]["completion_tokens"] == 50
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive
    assert "Traceback" not in serving_slowly.log.read_text()


def test_a_killed_server_leaves_neither_its_engine_nor_its_folder(serving_slowly, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving_slowly() as (_, process):
        [engine] = psutil.Process(process.pid).children()
        assert list(tmp_path.glob("pelton-*"))
        process.kill()
        process.wait()
        assert not psutil.wait_procs([engine], 5)[1]
        assert eventually(lambda: not list(tmp_path.glob("pelton-*")), 2)


def test_leaving_frees_the_blocks_within_a_step_or_two(url):
    for stream in (True, False):
        body = {**LONG, "stream": stream}
        with (
            contextlib.suppress(httpx.ReadTimeout),
            httpx.Client(timeout=0.3) as client,
            client.stream("POST", url + "/v1/completions", json=body) as reply,
        ):
            texts = reply.iter_text()
            next(texts)
            assert gauge(url, "kv_cache_usage_perc") > 0
        left = time.monotonic()
        assert eventually(lambda: gauge(url, "kv_cache_usage_perc") == 0, 1.0)
        assert time.monotonic() - left < 0.3
        assert gauge(url, "num_requests_running") == 0


def test_a_deadline_ends_the_request_and_frees_it(url):
    began = time.monotonic()
    reply = httpx.post(url + "/v1/completions", json={**LONG, "timeout_s": 0.3}, timeout=30)
    assert (reply.status_code, reply.json()["error"]["type"]) == (408, "RequestTimeoutError")
    assert time.monotonic() - began < 1.0
    assert eventually(lambda: gauge(url, "kv_cache_usage_perc") == 0, 1.0)


def test_a_full_queue_is_503_and_counted(serving_slowly):
    with serving_slowly("--max-num-seqs", "1", "--max-num-queued-reqs", "1") as (url, _):
        replies: list[httpx.Response] = []

        def ask() -> None:
            replies.append(httpx.post(url + "/v1/completions", json={**LONG, "max_tokens": 30}, timeout=30))

        threads = [threading.Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join(20)
        statuses = sorted(reply.status_code for reply in replies)
        assert statuses == [200, 200, 503, 503, 503]
        [error] = {reply.json()["error"]["type"] for reply in replies if reply.status_code == 503}
        assert error == "ServiceUnavailableError"
        text = httpx.get(url + "/metrics").text
        assert re.search(r'admission_rejections_total\{.*reason="max_num_queued_reqs"\} 3\.0', text)
