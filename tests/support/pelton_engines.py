"""`pelton serve` over engine processes whose steps take 150 ms and no model, and clients of it."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import psutil
import pytest
from pelton_e2e import eventually, serving
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from pelton.testing import fake_engine

ENGINE = "pelton.engine.process"
API = "pelton_plugins.server.processes.api_process"
LONG = 400
"""Tokens of a stream that runs until the steps are hurried: a minute, of 150 ms each. All of them are then computed and sent."""


class Serving:
    def __init__(self, url: str, process: psutil.Process, folder: Path) -> None:
        self.url, self.process, self.folder = url, process, folder
        self._hurry, self._hold_start = folder / "hurry", folder / "hold_start"

    @contextlib.contextmanager
    def hurried(self) -> Iterator[None]:
        """Steps take no time."""
        with _present(self._hurry):
            yield

    @contextlib.contextmanager
    def without_starts(self) -> Iterator[None]:
        """Engines that are started do not come up before this ends."""
        with _present(self._hold_start):
            yield

    def end(self, streams: Sequence[threading.Thread]) -> None:
        """Wait until all have ended."""
        with self.hurried():
            for stream in streams:
                stream.join(120)
            assert not any(stream.is_alive() for stream in streams)

    def children(self, program: str) -> list[psutil.Process]:
        return sorted((p for p in self.process.children() if program in _command(p)), key=lambda p: p.pid)

    def by_engine(self, name: str) -> dict[str, float]:
        """A metric's samples, summed by engine."""
        found: dict[str, float] = {}
        for sample in self.samples(name):
            engine = sample.labels["engine"]
            found[engine] = found.get(engine, 0.0) + sample.value
        return found

    def samples(self, name: str) -> list[Sample]:
        """Those of one metric: to read all of them takes longer than to answer."""
        lines = httpx.get(self.url + "/metrics", timeout=60).text.splitlines(keepends=True)
        own = "".join(line for line in lines if line.startswith(name))
        found = [sample for family in text_string_to_metric_families(own) for sample in family.samples]
        return [sample for sample in found if sample.name == name]

    def healthy(self) -> bool:
        return all(httpx.get(self.url + "/health", timeout=60).status_code == 200 for _ in range(6))


@contextlib.contextmanager
def _present(file: Path) -> Iterator[None]:
    file.touch()
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has just ended
        return []


def asked(num_tokens: int) -> dict[str, object]:
    return {"prompt": "abc", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}


class Stream(threading.Thread):
    def __init__(self, running: Serving, num_tokens: int = LONG) -> None:
        super().__init__(daemon=True)
        self.running, self.text, self.body = running, "", asked(num_tokens)
        self.begun = threading.Event()
        self.start()

    def run(self) -> None:
        url = self.running.url + "/v1/completions"
        with contextlib.suppress(httpx.HTTPError), httpx.stream("POST", url, json=self.body, timeout=120) as reply:
            for part in reply.iter_text():
                self.text += part
                self.begun.set()
        self.begun.set()

    @property
    def is_whole(self) -> bool:
        return '"finish_reason":"length"' in self.text and self.text.endswith("data: [DONE]\n\n")


def starter(folders: pytest.TempPathFactory, log: Path, *flags: str) -> Callable[..., AbstractContextManager[Serving]]:
    """What starts a server, with more flags and a script of what goes wrong in its engines."""
    model = fake_engine.make_model_folder(folders.mktemp("model"), max_position_embeddings=3 * LONG)
    site = fake_engine.install(folders.mktemp("site"))
    given = [
        "--load-format", "dummy", "--distributed-executor-backend", "fake_engine",
        "--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "8193", "--log-stats-interval-s", "0.5", *flags,
    ]  # fmt: skip
    files = folders.mktemp("files")

    @contextlib.contextmanager
    def start(*more: str, script: dict[str, object] | None = None, is_forked: bool = True) -> Iterator[Serving]:
        paths = {name: str(files / name) for name in ("hurry", "hold_start")}
        plugin_config = {"fake_engine": {"step_s": 0.15, **paths, **(script or {})}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
            every = [*given, "--plugin-config", json.dumps(plugin_config), *more]
            with serving(str(model), *every, log=log, is_forked=is_forked) as (url, process):
                running = Serving(url, psutil.Process(process.pid), files)
                if num_servers := len(running.children(API)):
                    # One is ready a moment before the others, which refuse requests until then.
                    ready = "pelton_api_processes"
                    assert eventually(lambda: [one.value for one in running.samples(ready)] == [num_servers])
                yield running

    return start
