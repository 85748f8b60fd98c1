"""Below the router: garbage, endless heads, slow heads, a path prefix."""

from __future__ import annotations

import json
import logging
import re
import socket
import struct
import time

import pytest

from pelton_plugins.server import wire


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(5)
    return connection


def read_all(connection):
    data = b""
    try:
        while part := connection.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return data


def error_of(data):
    return json.loads(data.split(b"\r\n\r\n", 1)[1])["error"]


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00", b"HELLO\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x80\x04\x95cos\nsystem\n"]
)
def test_garbage_gets_400_in_the_error_shape(shared, garbage):
    with connect(shared) as connection:
        connection.sendall(garbage)
        assert error_of(read_all(connection))["code"] == 400
    assert shared.client.get("/health").status_code == 200


def test_what_uvicorn_says_is_in_our_log_and_names_no_package_to_install(start, caplog):
    server = start()
    upgrade = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with caplog.at_level(logging.WARNING):
        with connect(server) as connection:
            connection.sendall(b"HELLO\r\n\r\n")
            read_all(connection)
        with connect(server) as connection:
            connection.sendall(upgrade)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    (record,) = caplog.records
    assert record.name.startswith("pelton.") and record.getMessage() == "Invalid HTTP request received."


@pytest.mark.parametrize("unit", [b"x-header: " + b"y" * 1000 + b"\r\n", b"z" * 1000])
def test_a_head_without_end_is_cut_off(shared, unit):
    with connect(shared) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nx-long: ")
        sent = 0
        try:
            while sent < 50 * 2**20:
                connection.sendall(unit * 16)
                sent += len(unit) * 16
        except OSError:
            pass
        assert sent < 10 * 2**20
    assert shared.client.get("/health").status_code == 200


def test_a_slow_head_is_cut_off(shared, monkeypatch):
    monkeypatch.setattr(wire, "HEAD_TIMEOUT_S", 0.2)
    for start in (b"", b"GET /health HT"):
        with connect(shared) as connection:
            connection.sendall(start)
            assert error_of(read_all(connection))["code"] == 408


def test_a_slow_second_head_is_cut_off_and_an_answer_is_not(start, monkeypatch):
    monkeypatch.setattr(wire, "HEAD_TIMEOUT_S", 0.3)
    server = start()
    server.llm.step_s = 0.05
    reply = server.post("/v1/completions", {"prompt": "ab", "max_tokens": 12})
    assert reply.status_code == 200
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in connection.recv(65536)
        connection.sendall(b"GET /hea")
        assert error_of(read_all(connection))["code"] == 408


def request(max_tokens):
    body = json.dumps({"prompt": "ab", "max_tokens": max_tokens, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("is_late", [False, True], ids=["at-once", "later"])
def test_who_sends_requests_ahead_and_leaves_is_gone_for_all_of_them(start, caplog, is_late):
    server = start()
    server.llm.step_s = 0.05
    with caplog.at_level(logging.WARNING), connect(server) as connection:
        connection.sendall(request(200) if is_late else request(200) + request(2))
        assert server.wait_for(lambda: server.llm.running)
        if is_late:
            connection.sendall(request(2))
            time.sleep(0.1)
        connection.shutdown(socket.SHUT_RDWR)
        assert server.wait_for(lambda: not server.llm.running)
    assert len(server.llm.aborted) == len(server.llm.requests) == 1
    assert not caplog.records


def test_requests_that_are_sent_ahead_are_answered_in_their_order(start, caplog):
    """Who takes the first answer and leaves gets no error logged for the others."""
    server = start()
    server.llm.step_s = 0.01
    with caplog.at_level(logging.WARNING), connect(server) as connection:
        connection.sendall(request(3) + request(2) + request(1))
        answers = b""
        while answers.count(b"text_completion") < 3:
            answers += connection.recv(65536)
        assert [int(one) for one in re.findall(rb'"completion_tokens":(\d+)', answers)] == [3, 2, 1]
        connection.sendall(request(1) + request(40) + request(1))
        while b"text_completion" not in connection.recv(65536):
            pass
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert server.wait_for(lambda: len(server.llm.requests) >= 5 and not server.llm.running)
    assert not caplog.records


def test_a_path_prefix_that_a_proxy_strips(start):
    server = start(root_path="/llm", api_key=["k"])
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/version").status_code == 401
    headers = {"Authorization": "Bearer k"}
    assert server.client.get("/version", headers=headers).status_code == 200
    assert server.client.get("/nowhere", headers=headers).status_code == 404
