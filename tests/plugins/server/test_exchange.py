"""What ends a request early: a client that leaves, a deadline, the server's end; and how much is written at once."""

from __future__ import annotations

import json
import socket
import time
from itertools import pairwise

import pytest

from pelton.errors import DeadlineExceededError
from pelton_plugins.server.errors import UnavailableError
from pelton_plugins.server.exchange import KEEP_ALIVE, Exchange
from pelton_plugins.server.http_metrics import HttpMetrics
from pelton_plugins.server.middleware import Middleware

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "ab", "max_tokens": 200, "ignore_eos": True}


@pytest.fixture
def slow(start):
    server = start()
    server.llm.step_s = 0.1
    return server


@pytest.fixture
def statuses(monkeypatch):
    """What is counted and logged, in order."""
    found, observe = [], HttpMetrics.observe

    def noted(self, handler, method, status, seconds, *sizes):
        found.append(status)
        observe(self, handler, method, status, seconds, *sizes)

    monkeypatch.setattr(HttpMetrics, "observe", noted)
    return found


def send_raw(server, body):
    """A request whose connection the test holds."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["ab", ["ab", "cd", "ef"]])
def test_a_client_that_leaves_aborts_its_request(slow, stream, prompt):
    connection = send_raw(slow, {**LONG, "prompt": prompt, "stream": stream})
    count = 1 if isinstance(prompt, str) else len(prompt)
    assert slow.wait_for(lambda: len(slow.llm.running) == count)
    if stream:
        connection.recv(10)
    connection.close()
    assert slow.wait_for(lambda: not slow.llm.running)
    assert len(slow.llm.aborted) == count
    assert slow.wait_for(lambda: not slow.state.exchanges)
    assert slow.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 1}).status_code == 200


def test_a_client_that_leaves_before_its_body_is_complete(slow):
    host, port = slow.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
    assert slow.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 1}).status_code == 200
    assert slow.wait_for(lambda: not slow.state.exchanges)


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_client_that_leaves_counts_as_499(slow, statuses, is_complete):
    host, port = slow.url.removeprefix("http://").split(":")
    body = json.dumps(LONG).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head % len(body) + (body if is_complete else body[:5]))
        assert slow.wait_for(
            lambda: bool(slow.llm.running) or (not is_complete and slow.state.http_metrics.num_in_progress)
        )
    assert slow.wait_for(lambda: not slow.state.http_metrics.num_in_progress)
    assert statuses == [499]
    assert 'handler="/v1/completions",method="POST",status="4xx"} 1.0' in slow.client.get("/metrics").text


def test_an_unforeseen_error_counts_as_500(slow, statuses):
    slow.llm.fail_before = ZeroDivisionError()
    assert slow.post(COMPLETIONS, LONG).status_code == 500
    assert slow.wait_for(lambda: bool(statuses))  # it is counted behind the answer
    assert statuses == [500]


async def test_an_error_that_escapes_counts_as_500_even_where_the_client_left(start, statuses):
    async def fails(scope, receive, send):
        await receive()
        raise ZeroDivisionError

    async def gone():
        return {"type": "http.disconnect"}

    middleware = Middleware(fails, start().state)
    with pytest.raises(ZeroDivisionError):
        await middleware({"type": "http", "method": "GET", "path": "/x", "headers": []}, gone, None)
    assert statuses == [500]


def test_keep_alive_connections_serve_many_requests(slow):
    slow.llm.step_s = 0
    for _ in range(30):
        assert slow.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 2}).status_code == 200
    assert slow.llm.aborted == [] and not slow.state.exchanges


def test_one_failing_prompt_ends_the_others(slow):
    reply = slow.post(COMPLETIONS, {**LONG, "prompt": [[1, 2], [1, 9999]]})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "input_tokens"
    assert slow.wait_for(lambda: not slow.llm.running)


def test_a_deadline_is_a_408(slow):
    slow.llm.fail_before = DeadlineExceededError("The request did not finish within 1 s.")
    reply = slow.post(COMPLETIONS, {**LONG, "timeout_s": 1})
    assert (reply.status_code, reply.json()["error"]["type"]) == (408, "RequestTimeoutError")


def test_requests_that_run_when_the_server_ends_get_an_error(slow):
    whole, streamed = send_raw(slow, LONG), send_raw(slow, {**LONG, "stream": True})
    assert slow.wait_for(lambda: len(slow.llm.running) == 2)
    streamed.recv(1000)
    loop_call(slow, lambda: slow.state.end_all(UnavailableError("The server shut down.")))
    for connection, expected in ((whole, b"503 Service"), (streamed, b"data: [DONE]")):
        connection.settimeout(60)
        text = b""
        while expected not in text:
            text += connection.recv(65536)
        text += connection.recv(65536) if b"The server shut down." not in text else b""
        assert b"The server shut down." in text
        connection.close()
    assert slow.wait_for(lambda: not slow.llm.running)
    assert len(slow.llm.aborted) == 2


def loop_call(server, function):
    """Run `function` on the server's event loop."""
    [loop] = {server_.get_loop() for server_ in server._server.servers}
    loop.call_soon_threadsafe(function)


def test_draining_refuses_new_requests(slow):
    slow.state.is_draining = True
    reply = slow.post(COMPLETIONS, LONG)
    assert reply.status_code == 503 and "shutting down" in reply.json()["error"]["message"]
    assert slow.client.get("/health").status_code == 503


def test_more_than_max_concurrent_requests_are_refused(start):
    server = start(max_concurrent_requests=1)
    server.llm.step_s = 0.1
    with send_raw(server, LONG):
        assert server.wait_for(lambda: len(server.llm.running) == 1)
        assert server.client.get("/load").json() == {"server_load": 1}
        reply = server.post(COMPLETIONS, LONG)
        assert reply.status_code == 503 and "max_concurrent_requests" in reply.json()["error"]["message"]
    assert server.wait_for(lambda: not server.state.exchanges)
    assert server.client.get("/load").json() == {"server_load": 0}


def test_silence_gets_a_comment_line(start, monkeypatch):
    writes, write = [], Exchange.write

    async def timed(self, events):
        writes.append((time.monotonic(), events))
        await write(self, events)

    monkeypatch.setattr(Exchange, "write", timed)
    server = start(sse_keep_alive_interval=0.05)
    server.llm.step_s = 0.12
    text = server.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 3, "stream": True}).text
    silences = [now - before for (before, _), (now, events) in pairwise(writes) if events == KEEP_ALIVE]
    assert text.count(": keep-alive\n\n") == len(silences) >= 2 and min(silences) >= 0.05
    lines = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    assert len(lines) == 4 and lines[-1] == "data: [DONE]"


def test_deltas_that_are_ready_together_are_one_write(start):
    """Four prompts whose tokens come in one loop turn: far fewer writes than chunks."""
    server = start()
    writes = []
    original = Exchange.write

    async def counted(self, events):
        writes.append(events.count(b"data: "))
        await original(self, events)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "write", counted)
        server.post(COMPLETIONS, {"prompt": ["a", "b", "c", "d"], "max_tokens": 8, "stream": True})
    assert sum(writes) == 32
    assert max(writes) >= 4


@pytest.mark.parametrize("given, expected", [("abc-1", "abc-1"), ("a b", None), ("x" * 300, None)])
def test_request_ids(start, given, expected):
    server = start(enable_request_id_headers=True)
    reply = server.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 1}, headers={"X-Request-Id": given})
    found = reply.headers["x-request-id"]
    assert reply.json()["id"] == f"cmpl-{found}"
    assert (found == given) if expected else len(found) == 32


def test_request_ids_are_not_sent_back_unasked(shared):
    assert "x-request-id" not in shared.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 1}).headers


def test_one_request_id_twice_at_once_is_fine(slow):
    first, second = (send_raw(slow, {**LONG, "request_id": "same"}) for _ in range(2))
    assert slow.wait_for(lambda: len(slow.llm.running) == 2)
    first.close()
    second.close()
    assert slow.wait_for(lambda: not slow.llm.running)
    body = {"prompt": "ab", "max_tokens": 1, "request_id": "same"}
    reply = slow.post(COMPLETIONS, body, headers={"X-Request-Id": "other"})
    assert reply.json()["id"] == "cmpl-same"
