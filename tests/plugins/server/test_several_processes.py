"""Several API processes over one engine: one port, one set of figures, and none that takes the others with it."""

from __future__ import annotations

import contextlib
import http.server
import signal
import socket
import threading
from collections.abc import Iterator

import httpx
import psutil
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from pelton_e2e import eventually
from pelton_engines import API, asked, starter
from pelton_engines import LONG as NUM_TOKENS
from pelton_engines import Serving as AnyServing

pytestmark = pytest.mark.usefixtures("forks")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


class Serving(AnyServing):
    def api_processes(self) -> list[psutil.Process]:
        return sorted((p for p in self.process.children() if API in p.cmdline()), key=lambda p: p.pid)

    def engine(self) -> psutil.Process:
        return next(p for p in self.process.children() if "pelton.engine.process" in p.cmdline())

    def sample(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        return sum(sample.value for sample in self.samples(name) if labels.items() <= sample.labels.items())


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[contextlib.AbstractContextManager[Serving]]:
    log = tmp_path_factory.mktemp("log") / "log"
    start_any = starter(tmp_path_factory, log, "--api-server-count", "2")

    @contextlib.contextmanager
    def start(*more: str, **options: bool) -> Iterator[Serving]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # ms between two messages to a collector
            with start_any(*more, **options) as found:
                yield Serving(found.url, found.process, found.folder)

    start.log = log
    return start


class Collector(http.server.ThreadingHTTPServer):
    """Takes spans of OpenTelemetry."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Takes)
        self.spans: list[Span] = []
        self.endpoint = f"http://127.0.0.1:{self.server_port}/v1/traces"


class _Takes(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        self.server.spans += [s for r in body.resource_spans for scope in r.scope_spans for s in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture(scope="module")
def server(started, collector) -> Iterator[Serving]:
    flags = [
        "--enable-request-id-headers", "--max-stored-responses", "50", "--chat-template", TEMPLATE, "--log-requests",
        "--otlp-traces-endpoint", collector.endpoint,
    ]  # fmt: skip
    with started(*flags) as running:
        yield running


def owner_of(running: Serving, port: int) -> int:
    """Process id at the server's end of a connection from `port`."""
    for process in running.api_processes():
        for connection in process.net_connections("tcp"):
            if connection.raddr and connection.raddr.port == port:
                return process.pid
    raise AssertionError("nobody has the connection")


class Stream(threading.Thread):
    """One streamed request over a connection of its own."""

    def __init__(self, running: Serving, **more: object) -> None:
        super().__init__(daemon=True)
        self.running = running
        self.body = asked(NUM_TOKENS) | more
        self.text = ""
        self.error: Exception | None = None
        self.pid = 0
        self.begun = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.running.url + "/v1/completions", json=self.body, timeout=600) as reply:
                port = reply.extensions["network_stream"].get_extra_info("socket").getsockname()[1]
                self.pid = owner_of(self.running, port)
                for part in reply.iter_text():
                    self.text += part
                    self.begun.set()
        except httpx.HTTPError as error:
            self.error = error
        finally:
            self.begun.set()

    @property
    def is_whole(self) -> bool:
        return self.error is None and '"finish_reason":"length"' in self.text and self.text.endswith("data: [DONE]\n\n")


def streams_on_each(running: Serving, **more: object) -> list[Stream]:
    """Running streams, which end when the server hurries; one at least on each process."""
    streams: list[Stream] = []
    pids = {process.pid for process in running.api_processes()}
    while {stream.pid for stream in streams} != pids:
        assert len(streams) < 40
        streams.append(Stream(running, **more))
        assert streams[-1].begun.wait(60)
    return streams


def test_figures_are_those_of_all_processes(server):
    before = server.sample("pelton_request_success_total")
    ids, pids = set(), set()
    for _ in range(24):
        with server.hurried(), httpx.Client() as client:
            reply = client.post(server.url + "/v1/completions", json={"prompt": "ab", "max_tokens": 3}, timeout=60)
            assert reply.status_code == 200
            ids.add(reply.json()["id"])
            port = reply.extensions["network_stream"].get_extra_info("socket").getsockname()[1]
            pids.add(owner_of(server, port))
    assert len(ids) == 24 and len(pids) == 2
    assert eventually(lambda: server.sample("pelton_request_success_total") - before == 24)
    assert eventually(lambda: server.sample("http_requests_total", handler="/v1/completions", status="2xx") == 24)
    assert server.sample("pelton_e2e_request_latency_seconds_count") == before + 24
    assert server.sample("http_request_size_bytes_count", handler="/v1/completions") == 24
    assert server.sample("pelton_api_processes") == 2
    assert server.sample("process_resident_memory_bytes", process="api-1") > 0


def test_spans_of_all_processes_reach_the_collector_and_the_log_says_nothing_of_what_was_said(
    server, collector, started
):
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    pids = set()
    while len(pids) < 2:
        with httpx.Client() as client:
            body = {"prompt": "a s3cret", "max_tokens": 3}
            reply = client.post(server.url + "/v1/completions", json=body, headers=headers, timeout=60)
            pids.add(owner_of(server, reply.extensions["network_stream"].get_extra_info("socket").getsockname()[1]))

    def spans() -> list[Span]:
        return [
            span for span in collector.spans if span.trace_id.hex() == trace and span.name.startswith("llm_request")
        ]

    assert eventually(lambda: len(spans()) >= 2)
    found = {attribute.key: attribute.value for attribute in spans()[0].attributes}
    assert found["gen_ai.usage.completion_tokens"].int_value == 3
    assert 0 < found["gen_ai.latency.time_in_model_decode"].double_value < found["gen_ai.latency.e2e"].double_value
    assert eventually(lambda: {span.name for span in collector.spans} >= {"queue", "prefill", "decode"})
    assert "s3cret" not in str(collector.spans)
    log = started.log.read_text()
    assert '"max_tokens":3' in log and "s3cret" not in log


def test_open_requests_are_counted_over_all(server):
    streams = streams_on_each(server)
    assert httpx.get(server.url + "/load", timeout=60).json()["server_load"] == len(streams)
    server.end(streams)
    assert all(stream.is_whole for stream in streams)
    assert eventually(lambda: httpx.get(server.url + "/load", timeout=60).json()["server_load"] == 0)


def test_one_request_id_on_both_processes_is_as_many_requests(server):
    """The engine knows each by an id of its own."""
    streams: list[Stream] = []
    while len({stream.pid for stream in streams}) < 2:
        assert len(streams) < 40
        streams.append(Stream(server, request_id="mine", prompt=f"abc{len(streams)}"))
        assert streams[-1].begun.wait(60)
    server.end(streams)
    assert all(stream.is_whole and '"id":"cmpl-mine"' in stream.text for stream in streams)
    assert eventually(lambda: server.sample("pelton_num_requests_running") == 0)


def test_a_response_is_found_whichever_process_keeps_it(server):
    """Every call has a connection of its own: the kernel deals them out to the processes."""

    def call(method: str, path: str, body: object = None) -> httpx.Response:
        return httpx.request(method, f"{server.url}/v1/responses{path}", json=body, timeout=60)

    def keepers() -> set[str]:
        return {one["id"].split("-")[0] for one in made}

    made: list[dict] = []
    with server.hurried():
        while len(made) < 8 or (len(made) < 64 and len(keepers()) < 2):
            made.append(call("POST", "", {"input": f"say {len(made)}", "max_output_tokens": 2}).json())
    assert keepers() == {"resp_0", "resp_1"}
    made = [next(one for one in made if one["id"].startswith(keeper)) for keeper in sorted(keepers())] + made[:6]
    for one in made:
        assert {call("GET", f"/{one['id']}").json()["output"][0]["id"] for _ in range(6)} == {one["output"][0]["id"]}
    for one in made:
        follows = {"input": "go on", "previous_response_id": one["id"], "max_output_tokens": 2}
        with server.hurried():
            replies = [call("POST", "", follows).json() for _ in range(3)]
        assert all(reply["usage"]["input_tokens"] > one["usage"]["input_tokens"] for reply in replies)
    later = call("POST", "", {"input": "long", "max_output_tokens": 1000, "background": True}).json()
    replies = [call("POST", f"/{later['id']}/cancel") for _ in range(4)]
    assert {reply.json()["status"] for reply in replies} == {"cancelled"}
    assert {call("POST", f"/{made[0]['id']}/cancel").status_code for _ in range(4)} == {400}
    assert call("DELETE", f"/{made[0]['id']}").json()["deleted"] is True
    for wrong in (made[0]["id"], "resp_1-no", "resp_9-no", "resp_no"):
        replies = [call("GET", f"/{wrong}") for _ in range(4)]
        assert {(reply.status_code, reply.json()["error"]["type"]) for reply in replies} == {(404, "NotFoundError")}


def test_a_killed_api_process_takes_its_own_streams_only(server):
    streams = streams_on_each(server)
    first, second = server.api_processes()
    first.kill()
    server.end(streams)
    assert all(stream.is_whole for stream in streams if stream.pid == second.pid)
    assert all(stream.error is not None for stream in streams if stream.pid == first.pid)
    assert eventually(lambda: len(server.api_processes()) == 2 and first not in server.api_processes())
    assert second in server.api_processes()
    # What the dead one had asked for has left the engine, and connections to its socket waited for the next.
    assert all(httpx.get(server.url + "/health", timeout=60).status_code == 200 for _ in range(8))
    assert eventually(lambda: server.sample("pelton_api_processes") == 2)
    assert eventually(lambda: server.sample("pelton_num_requests_running") == 0)
    assert eventually(lambda: server.sample("pelton_kv_cache_usage_perc") == 0)
    assert server.sample("pelton_api_process_restarts_total") == 1
    assert server.sample("pelton_request_success_total") >= 24  # of the dead one too


def test_a_killed_engine_fails_all_streams_and_comes_back(server):
    streams = streams_on_each(server)
    server.engine().kill()
    for stream in streams:
        stream.join(60)
    assert all("was killed by SIGKILL" in s.text and s.text.endswith("data: [DONE]\n\n") for s in streams)
    assert eventually(server.healthy)
    again = streams_on_each(server)
    server.end(again)
    assert all(stream.is_whole for stream in again)


def test_sigterm_lets_streams_finish_and_leaves_nothing(started, tmp_path, monkeypatch):
    """All of these processes are started by `exec`."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with started("--graceful-shutdown-s", "200", is_forked=False) as running:
        port = int(running.url.rsplit(":", 1)[1])
        with socket.socket() as other, pytest.raises(OSError):
            other.bind(("127.0.0.1", port))
        streams = streams_on_each(running)
        family = [running.process, *running.process.children(recursive=True)]
        assert list(tmp_path.glob("pelton-*"))
        running.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: refuses_connections(running))
        running.end(streams)
        assert [(stream.error, stream.text[-300:]) for stream in streams if not stream.is_whole] == []
        _, alive = psutil.wait_procs(family, 90)
        assert not alive
        assert not list(tmp_path.glob("pelton-*"))


def refuses_connections(running: Serving) -> bool:
    try:
        httpx.get(running.url + "/health", timeout=60)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # it closed a connection that waited for its turn
        pass
    return False


def test_a_port_of_another_server_is_refused_before_loading(started, server):
    import subprocess
    import sys

    port = server.url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "pelton.cli.main", "serve", "nothing", "--port", port, "--api-server-count", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and f"Cannot listen on 127.0.0.1:{port}" in done.stderr


def test_adapters_at_run_time_need_one_process(started):
    import subprocess
    import sys

    flags = ["--enable-lora", "--allow-runtime-lora-updating", "--api-server-count", "2", "--port", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "pelton.cli.main", "serve", "nothing", *flags],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 2 and "allow_runtime_lora_updating" in done.stderr
