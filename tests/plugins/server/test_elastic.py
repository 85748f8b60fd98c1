"""`/scale_elastic_ep` over engine processes whose steps take 150 ms and no model: what clients see while engines come and leave."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pelton_e2e import eventually
from pelton_engines import API, ENGINE, LONG, Serving, Stream, starter

Start = Callable[..., AbstractContextManager[Serving]]
RUNNING = "pelton_num_requests_running"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "log"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Start:
    return starter(tmp_path_factory, log)


@pytest.fixture(scope="module", params=["1", "3"], ids=["one-api-process", "three-api-processes"])
def server(start: Start, request: pytest.FixtureRequest) -> Iterator[Serving]:
    with start("--enable-elastic-ep", "--api-server-count", request.param) as running:
        assert len(running.children(API)) == (0 if request.param == "1" else 3)
        yield running


def scaled(running: Serving, num_engines: Any, **more: Any) -> httpx.Response:
    body = {"new_data_parallel_size": num_engines} | more
    return httpx.post(running.url + "/scale_elastic_ep", json=body, timeout=240)


def is_scaling(running: Serving) -> bool:
    reply = httpx.post(running.url + "/is_scaling_elastic_ep", timeout=60)
    assert reply.status_code == 200, reply.text
    return bool(reply.json()["is_scaling_elastic_ep"])


def ups(running: Serving) -> dict[str, float]:
    return running.by_engine("pelton_engine_up")


def to_one(running: Serving) -> None:
    assert scaled(running, 1, drain_timeout=0).status_code == 200
    assert eventually(lambda: ups(running) == {"0": 1})


def streams_in(running: Serving, num_engines: int, num_others: int = 0) -> list[Stream]:
    """Some in each engine, beside those that run. API processes may pick the same one before they hear of each other."""
    found: list[Stream] = []
    while len(found) < num_engines or not all(
        running.by_engine(RUNNING).get(str(engine)) for engine in range(num_engines)
    ):
        assert len(found) < 60
        found.append(Stream(running, LONG))
        assert found[-1].begun.wait(120)
        assert eventually(lambda: sum(running.by_engine(RUNNING).values()) == num_others + len(found))
    return found


def test_engines_come_and_leave_and_every_request_ends_whole(server: Serving) -> None:
    assert ups(server) == {"0": 1} and len(server.children(ENGINE)) == 1
    first = [Stream(server)]
    assert first[0].begun.wait(120)
    reply = scaled(server, 3)
    assert (reply.status_code, reply.json()) == (200, {"message": "Scaled to 3 data parallel engines"})
    assert len(server.children(ENGINE)) == 3
    told = httpx.get(server.url + "/server_info", timeout=60).json()["engine_config"]["parallel"]
    assert told["data_parallel_size"] == 3
    assert eventually(lambda: ups(server) == {"0": 1, "1": 1, "2": 1})
    found = first + streams_in(server, 3, len(first))
    leaving = threading.Thread(target=lambda: replies.append(scaled(server, 1, drain_timeout=240)), daemon=True)
    replies: list[httpx.Response] = []
    leaving.start()
    assert eventually(lambda: is_scaling(server))
    before = server.by_engine("pelton_generation_tokens_total")
    found += [Stream(server, 20) for _ in range(4)]
    for _ in range(3):  # requests are answered meanwhile
        assert httpx.get(server.url + "/health", timeout=60).status_code == 200
        body = {"prompt": "a", "max_tokens": 2}
        assert httpx.post(server.url + "/v1/completions", json=body, timeout=60).status_code == 200
    assert leaving.is_alive() and is_scaling(server)
    server.end([*found, leaving])
    assert replies[0].status_code == 200 and not is_scaling(server)
    assert all(stream.is_whole for stream in found)
    assert set(before) == {"0", "1", "2"}
    assert eventually(lambda: ups(server) == {"0": 1})
    for name in ("pelton_generation_tokens_total", RUNNING, "pelton_request_success_total"):
        assert set(server.by_engine(name)) == {"0"}, "figures go with their engine"
    assert len(server.children(ENGINE)) == 1


def test_what_does_not_finish_in_time_ends_with_503(server: Serving) -> None:
    assert scaled(server, 2).status_code == 200
    found = streams_in(server, 2)
    held = server.by_engine(RUNNING)
    assert scaled(server, 1, drain_timeout=0.2).status_code == 200
    server.end(found)
    lost = [stream for stream in found if not stream.is_whole]
    assert len(lost) == held["1"]
    for stream in lost:
        assert "did not finish within 0.2 s. Send it again." in stream.text and '"code":503' in stream.text
    to_one(server)


def test_an_engine_that_came_later_is_started_again_when_it_is_killed(server: Serving) -> None:
    assert scaled(server, 2).status_code == 200
    first, second = server.children(ENGINE)
    second.send_signal(signal.SIGKILL)
    assert eventually(lambda: second not in server.children(ENGINE) and len(server.children(ENGINE)) == 2)
    assert eventually(lambda: ups(server) == {"0": 1, "1": 1})
    assert first in server.children(ENGINE)
    server.end(found := streams_in(server, 2))
    assert all(stream.is_whole for stream in found)
    to_one(server)


def test_an_api_process_that_is_replaced_knows_the_engines_of_now(server: Serving) -> None:
    if not server.children(API):
        pytest.skip("one process serves")
    assert scaled(server, 2).status_code == 200
    for process in server.children(API):
        process.kill()
    assert eventually(lambda: len(server.children(API)) == 3 and server.healthy())
    server.end(found := streams_in(server, 2))
    assert all(stream.is_whole for stream in found)
    to_one(server)
    assert (
        httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60).status_code == 200
    )


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"new_data_parallel_size": 0}, "Use a whole number of engines, 1 to 1024"),
        ({"new_data_parallel_size": 5000}, "1 to 1024"),
        ({"new_data_parallel_size": "two"}, "new_data_parallel_size"),
        ({"new_data_parallel_size": 1.5}, "new_data_parallel_size"),
        ({}, "new_data_parallel_size"),
        ({"new_data_parallel_size": 1, "drain_timeout": -1}, "drain_timeout"),
        ({"new_data_parallel_size": 1, "drain_timeout": "soon"}, "drain_timeout"),
        ({"new_data_parallel_size": 1, "timeout": 3}, "timeout"),
    ],
)
def test_wrong_bodies_are_named(server: Serving, body: dict[str, Any], why: str) -> None:
    reply = httpx.post(server.url + "/scale_elastic_ep", json=body, timeout=60)
    assert reply.status_code == 400 and why in reply.json()["error"]["message"]
    assert not is_scaling(server)


def test_one_change_at_a_time(server: Serving) -> None:
    assert scaled(server, 2).status_code == 200
    found = streams_in(server, 2)
    leaving = threading.Thread(target=lambda: scaled(server, 1, drain_timeout=240), daemon=True)
    leaving.start()
    assert eventually(lambda: is_scaling(server))
    reply = scaled(server, 3)
    assert reply.status_code == 409 and reply.json()["error"]["type"] == "ConflictError"
    assert "being changed already" in reply.json()["error"]["message"]
    server.end([*found, leaving])
    assert len(server.children(ENGINE)) == 1
    to_one(server)


@pytest.mark.parametrize("num_servers", ["1", "3"])
def test_engines_that_share_experts_start_anew_and_clients_are_told_to_come_again(
    start: Start, num_servers: str
) -> None:
    with start(
        "-dp", "2", "--enable-expert-parallel", "--enable-elastic-ep", "--api-server-count", num_servers
    ) as running:
        before = running.children(ENGINE)
        found = streams_in(running, 2)
        replies: list[httpx.Response] = []
        changing = threading.Thread(target=lambda: replies.append(scaled(running, 3, drain_timeout=240)), daemon=True)
        changing.start()
        refused: list[httpx.Response] = []
        with contextlib.ExitStack() as stack:
            while changing.is_alive():
                reply = httpx.post(running.url + "/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60)
                assert reply.status_code in (200, 503), reply.text
                if reply.status_code == 503:
                    if not refused:
                        stack.enter_context(running.hurried())
                    refused.append(reply)
                changing.join(0.1)
        assert replies[0].status_code == 200, replies[0].text
        assert refused and all(reply.headers["retry-after"] for reply in refused)
        assert any("experts become 3" in reply.text or "is being changed" in reply.text for reply in refused)
        running.end(found)
        assert all(stream.is_whole for stream in found), "they had the time"
        now = running.children(ENGINE)
        assert len(now) == 3 and not set(now) & set(before)
        assert eventually(lambda: ups(running) == {"0": 1, "1": 1, "2": 1} and running.healthy())
        now[0].kill()  # the others go along
        assert eventually(lambda: not set(now) & set(running.children(ENGINE)))
        assert eventually(lambda: ups(running) == {"0": 1, "1": 1, "2": 1} and running.healthy())
        found = streams_in(running, 3)
        assert scaled(running, 1, drain_timeout=0).status_code == 200
        running.end(found)
        assert all('"code":503' in stream.text for stream in found if not stream.is_whole)
        assert eventually(lambda: ups(running) == {"0": 1} and running.healthy())
        assert (
            httpx.post(running.url + "/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60).status_code
            == 200
        )


def test_engines_that_do_not_start_leave_those_that_serve(start: Start) -> None:
    with start("--enable-elastic-ep", script={"fail_start": "no device 1", "fail_from_engine": 1}) as running:
        reply = scaled(running, 2)
        assert reply.status_code == 400, reply.text
        assert "2 engines did not start, and there are 1 as before. no device 1" in reply.json()["error"]["message"]
        assert running.healthy() and ups(running) == {"0": 1} and len(running.children(ENGINE)) == 1


def test_it_is_off_unless_it_is_allowed(start: Start) -> None:
    with start("-dp", "2", "--api-server-count", "1") as running:
        for path in ("/scale_elastic_ep", "/is_scaling_elastic_ep"):
            reply = httpx.post(running.url + path, json={"new_data_parallel_size": 1}, timeout=60)
            assert reply.status_code == 403 and "--enable-elastic-ep" in reply.json()["error"]["message"]
        assert len(running.children(ENGINE)) == 2
