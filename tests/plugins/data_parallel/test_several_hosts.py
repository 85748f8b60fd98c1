"""Engines of another host: a node in a process group of its own, over authenticated TCP. Equality, faults, and who is refused."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from pelton_e2e import Reference, eventually, free_port, generate, greedy, greedy_reference, make_llm, make_prompts
from pelton_forked import ForkingPopen

from pelton.cli.main import main
from pelton.errors import ConfigError
from pelton.metrics.snapshot import Counter
from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint
from pelton_plugins.data_parallel.secure import connect, key_pair, listen, read_secret

NUM_TOKENS = 12
pytestmark = pytest.mark.usefixtures("forks")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    path = str(make_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama"))
    prompts = make_prompts(VOCAB_SIZE, (3, 40, 90, 17))
    return Reference("llama", path, prompts, *greedy_reference(path, prompts, NUM_TOKENS))


def key_file(folder: Path, secret: bytes | None = None) -> str:
    path = folder / "key"
    path.write_bytes(base64.b64encode(secret or os.urandom(32)))
    path.chmod(0o600)
    return str(path)


@contextlib.contextmanager
def node(model: str, log: Path, **flags: object) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        sys.executable,
        "-m",
        "pelton.cli.main",
        "serve",
        model,
        "--headless",
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    for name, value in flags.items():
        command += ["--" + name.replace("_", "-"), str(value)]
    with log.open("wb") as out:
        process = ForkingPopen(command, stdout=out, stderr=subprocess.STDOUT, process_group=0)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(90)


def engines_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [one for one in psutil.Process(process.pid).children() if "pelton.engine.process" in one.cmdline()]


def test_a_nodes_engine_answers_as_the_servers_and_comes_back(reference: Reference, tmp_path: Path) -> None:
    hosts = {
        "data_parallel_size": 2, "data_parallel_size_local": 1, "data_parallel_address": "127.0.0.1",
        "data_parallel_rpc_port": free_port() - 1, "data_parallel_key_file": key_file(tmp_path),
    }  # fmt: skip
    log = tmp_path / "log"
    with (
        node(reference.path, log, **hosts, data_parallel_start_rank=1) as process,
        make_llm(reference.path, **hosts, disable_log_stats=False) as llm,
    ):
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        counters = [metric for metric in llm.get_metrics() if isinstance(metric, Counter)]
        counted = {one.labels["engine"]: one.value for one in counters if one.name == "pelton_generation_tokens"}
        assert counted == {"0": 2 * NUM_TOKENS, "1": 2 * NUM_TOKENS}
        (engine,), second = engines_of(process), llm.llm_engine.client._engines[1]
        life = second.client.pid
        engine.send_signal(signal.SIGKILL)
        assert eventually(lambda: not second.is_up or second.client.error is not None or second.client.pid != life)
        prompts = [{"prompt_token_ids": prompt} for prompt in reference.prompts]
        outputs = llm.generate(prompts, greedy(NUM_TOKENS), use_tqdm=False)
        assert any(output.error is None for output in outputs)  # the server's own goes on
        assert eventually(lambda: second.is_up and second.client.error is None), log.read_text()
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        assert engines_of(process) and engines_of(process)[0].pid != engine.pid
        children = [*engines_of(process)]
    assert process.returncode == 0
    assert eventually(lambda: not any(child.is_running() for child in children))


def test_the_node_may_have_the_first_engines(reference: Reference, tmp_path: Path) -> None:
    """As vLLM's pages start two hosts: the headless one has rank 0, and the server the ranks behind it."""
    hosts = {
        "data_parallel_size": 2, "data_parallel_size_local": 1, "data_parallel_address": "127.0.0.1",
        "data_parallel_rpc_port": free_port(), "data_parallel_key_file": key_file(tmp_path),
    }  # fmt: skip
    with (
        node(reference.path, tmp_path / "log", **hosts, data_parallel_start_rank=0) as process,
        make_llm(reference.path, **hosts, data_parallel_start_rank=1, disable_log_stats=False) as llm,
    ):
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        counters = [metric for metric in llm.get_metrics() if isinstance(metric, Counter)]
        counted = {one.labels["engine"]: one.value for one in counters if one.name == "pelton_generation_tokens"}
        assert counted == {"0": 2 * NUM_TOKENS, "1": 2 * NUM_TOKENS}
        assert len(engines_of(process)) == 1
    assert process.returncode == 0


def test_without_the_secret_nobody_gets_through() -> None:
    secret, where = bytes(range(40)), f"tcp://127.0.0.1:{free_port()}"
    assert key_pair(secret, "head") != key_pair(secret, "node")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    head, guard = listen(context, where, secret)
    try:
        stranger, plain = connect(context, where, secret[::-1]), context.socket(zmq.DEALER)
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(where)
        for socket in (stranger, plain):
            socket.send_multipart([bytes(4), b"let me in"])
        assert not head.poll(600)
        known = connect(context, where, secret)
        known.send_multipart([bytes(4), b"it is me"])
        assert head.poll(60_000) and head.recv_multipart()[2] == b"it is me"
        known.close(0)
        stranger.close(0)
        plain.close(0)
        other: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with pytest.raises(ConfigError, match="cannot listen at"):
            listen(other, where, secret)
        other.destroy(0)
    finally:
        guard.stop()
        head.close(0)
        context.destroy(0)


@pytest.mark.parametrize(
    "content, mode, told",
    [
        pytest.param(None, 0o600, "cannot be read: No such file", id="missing"),
        pytest.param(b"short", 0o600, "has 5 bytes; use at least 32", id="short"),
        pytest.param(b"x" * 32, 0o644, "others may not read it: chmod 600", id="open"),
    ],
)
def test_the_file_of_the_secret_is_checked(tmp_path: Path, content: bytes | None, mode: int, told: str) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=told):
        read_secret(str(path))


@pytest.mark.parametrize(
    "flags, told",
    [
        (["--headless"], "--data-parallel-address"),
        (["--headless", "--data-parallel-address", "127.0.0.1"], "data_parallel_size_local is 1 of 1 engines"),
        (["--headless", "--data-parallel-address", "127.0.0.1", "-dp", "4"], "data_parallel_size_local is 4 of 4 engines"),
        (["--headless", "--data-parallel-address", "127.0.0.1", "-dp", "2", "--data-parallel-start-rank", "1",
          "--data-parallel-size-local", "1"], "data_parallel_key_file is not set"),
        (["-dp", "2", "--data-parallel-rpc-port", "70000"], "data_parallel_rpc_port is 70000"),
    ],
)  # fmt: skip
def test_what_a_node_lacks_is_named(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "nothing", *flags]) != 0
    assert told in capsys.readouterr().err
