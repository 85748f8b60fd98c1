"""`pelton serve -dp 2` over engine processes whose steps take 150 ms and no model: one port, figures by engine, and no engine that takes
the other's requests with it."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import psutil
import pytest
from pelton_e2e import eventually, processes_of
from pelton_engines import API, ENGINE, LONG, Serving, Stream, asked, starter

RUNNING = "pelton_num_requests_running"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "log"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Callable[..., AbstractContextManager[Serving]]:
    return starter(tmp_path_factory, log, "-dp", "2")


@pytest.fixture(scope="module", params=["1", None], ids=["one-api-process", "two-api-processes"])
def server(started, request) -> Iterator[Serving]:
    count = [] if request.param is None else ["--api-server-count", request.param]
    with started("--max-step-s", "4", *count) as running:
        assert len(running.children(API)) == (2 if request.param is None else 0)
        assert eventually(lambda: running.by_engine("pelton_engine_up") == {"0": 1, "1": 1})
        yield running


def streams(running: Serving) -> list[Stream]:
    """Four that run, in both engines: an API process knows what another one has sent."""
    found: list[Stream] = []
    for count in range(1, 5):
        found.append(Stream(running))
        assert found[-1].begun.wait(120)
        assert eventually(lambda count=count: sum(running.by_engine(RUNNING).values()) == count)
    return found


def test_requests_are_spread_and_counted_by_engine(server, log):
    names = "pelton_generation_tokens_total", "pelton_request_success_total"
    before = [Counter(server.by_engine(name)) for name in names]
    sent: Counter[str] = Counter()
    held, even = {}, {"0": 2, "1": 2}
    # An engine that a busy machine keeps from saying for 3 s that it lives gets no requests: then once more.
    while held != even:
        assert sent.total() < 12, f"requests are spread otherwise: {sent}"
        found = streams(server)
        held = server.by_engine(RUNNING)
        sent.update(held)
        if held == even:
            assert eventually(lambda: all(f"Engine 00{engine}: running: 2" in log.read_text() for engine in even))
        server.end(found)
        assert all(stream.is_whole for stream in found)
        assert eventually(lambda: server.by_engine(RUNNING) == {"0": 0, "1": 0})
    # An API process that takes more than 2 s to tell its figures is left out of an answer: a later one has them.
    tokens = Counter({engine: LONG * count for engine, count in sent.items()})
    assert eventually(lambda: [server.by_engine(name) for name in names] == [before[0] + tokens, before[1] + sent])


def test_a_client_that_hangs_up_frees_its_engine(server):
    for _ in range(2):
        with httpx.stream("POST", server.url + "/v1/completions", json=asked(LONG), timeout=60) as reply:
            next(reply.iter_text())
    for name in (RUNNING, "pelton_kv_cache_usage_perc"):
        assert eventually(lambda name=name: server.by_engine(name) == {"0": 0, "1": 0})


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_or_hangs_loses_its_own_requests_only(server, how):
    restarts = sum(server.by_engine("pelton_engine_restarts_total").values())
    found = streams(server)
    held = server.by_engine(RUNNING)
    first, second = server.children(ENGINE)
    second.send_signal(how)
    num_ok = 0
    while num_ok == 0 or sum(server.by_engine("pelton_engine_restarts_total").values()) == restarts:
        # The server takes requests meanwhile. One that is sent to an engine before it is known to hang is lost with it.
        assert server.healthy()
        reply = httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60)
        num_ok += reply.status_code == 200
    server.end(found)
    lost = [stream for stream in found if not stream.is_whole]
    assert len(lost) in held.values()
    for stream in lost:
        assert "which ran this request, is gone" in stream.text and stream.text.endswith("data: [DONE]\n\n")
        assert how == signal.SIGKILL or "made no progress" in stream.text
    assert num_ok > 0
    assert eventually(lambda: server.by_engine("pelton_engine_up") == {"0": 1, "1": 1})
    assert sum(server.by_engine("pelton_engine_restarts_total").values()) == restarts + 1
    assert first in server.children(ENGINE) and second not in server.children(ENGINE)
    # An API process may hear of the engine's return after it has sent one more request to the other.
    assert eventually(lambda: both_answer(server))


def both_answer(running: Serving) -> bool:
    before = running.by_engine("pelton_generation_tokens_total")
    running.end(found := [Stream(running, 20) for _ in range(4)])
    assert all(stream.is_whole for stream in found)
    after = running.by_engine("pelton_generation_tokens_total")
    return all(after[engine] > before.get(engine, 0) for engine in ("0", "1"))


def test_without_engines_the_server_says_so_and_recovers(server):
    with server.without_starts():
        for engine in server.children(ENGINE):
            engine.kill()
        assert eventually(lambda: httpx.get(server.url + "/health", timeout=60).status_code == 503)
    assert eventually(server.healthy)
    assert (
        httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60).status_code == 200
    )


def test_processes_are_those_of_the_table(started):
    """A servers, D engines, one owner: A + D + 1, and none of them is left. With ranks there are D x T more."""
    with started() as running:
        family = running.process.children(recursive=True)
        assert processes_of(running.process.pid) == {"API process": 2, "engine": 2, "server": 1}
        running.process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs([running.process, *family], 90)
        assert not alive


def test_prompts_that_begin_alike_meet_in_one_engine(started):
    flags = ["--data-parallel-routing", "prefix", "--plugin-config.data_parallel.piece_tokens", "16"]
    with started("--api-server-count", "1", *flags) as running, running.hurried():
        for number in range(12):
            text = f"{number % 3} is how this prompt begins, and then it goes on: {number}"
            reply = httpx.post(running.url + "/v1/completions", json={"prompt": text, "max_tokens": 2}, timeout=60)
            assert reply.status_code == 200
        hits, asked = (running.by_engine(f"pelton_prefix_cache_{name}_total") for name in ("hits", "queries"))
        assert sum(hits.values()) > 0.5 * sum(asked.values())
