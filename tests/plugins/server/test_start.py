"""What `pelton serve` starts before it imports the server and finds the model."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import psutil
import pytest
from pelton_e2e import eventually

from pelton.config import EngineConfig
from pelton.plugins import load_plugins
from pelton_plugins.server import ahead, command
from pelton_plugins.server.ahead import EngineAhead


def is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EngineAhead]]:
    """Those that were started; none is left after the test."""
    found: list[EngineAhead] = []

    class Noted(EngineAhead):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            found.append(self)

    monkeypatch.setattr(ahead, "EngineAhead", Noted)
    yield found
    assert not any(is_running(one.pid) for one in found)


@pytest.mark.parametrize(
    ("settings", "imports_torch"), [({}, True), ({"tensor_parallel_size": 2}, False)], ids=["one", "ranks"]
)
def test_what_the_executor_needs_is_imported_ahead(started, settings, imports_torch):
    with contextlib.closing(ahead.EngineAhead(EngineConfig.from_flat(model="m", **settings), load_plugins())) as one:
        assert is_running(one.pid)
        assert ("torch" in one.imports) == imports_torch  # ranks have processes of their own
        if not imports_torch:  # which are started, too
            assert eventually(lambda: len(psutil.Process(one.pid).children()) == 2)
            ranks = psutil.Process(one.pid).children()
        else:
            ranks = []
    assert eventually(lambda: not any(is_running(rank.pid) for rank in ranks))


def test_a_process_is_taken_once(started):
    with contextlib.closing(ahead.EngineAhead(EngineConfig.from_flat(model="m"), load_plugins())) as one:
        taken = one.take()
        assert taken.process.pid == one.pid
        assert one.take() is None
    assert is_running(one.pid)  # it is the client's now
    taken.close(0.0)


def test_no_process_is_left_where_the_server_cannot_start(started, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert command.run(["m", "--port", str(port)]) == 2
    assert f"Cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    assert len(started) == 1
