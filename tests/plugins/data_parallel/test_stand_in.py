"""`StandIn` between a front end and a node, all three of this process: who is taken for the node, and when it counts as lost."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from pelton_e2e import eventually, free_port

from pelton.config import EngineConfig
from pelton.engine import protocol
from pelton.errors import EngineDeadError
from pelton.model.resolved import ResolvedModel
from pelton_plugins.data_parallel import stand_in
from pelton_plugins.data_parallel.far import FarConnection
from pelton_plugins.data_parallel.secure import address, connect, read_secret

MODEL = ResolvedModel(
    name="m", path="/m", weights_format="dummy", hf_config={}, architecture="A", dtype="float32", max_model_len=8, vocab_size=8,
    eos_token_ids=[], generation_config={}, tokenizer_path=None,
)  # fmt: skip
HELLO = protocol.encode(protocol.Hello(protocol.PROTOCOL, 1))
BEAT = protocol.encode(protocol.Heartbeat(0.0))
PLACE = bytes(4)


class OfThisProcess(stand_in.StandIn):
    is_over = False

    def _check_parent(self) -> None:
        """It ends its process where there is no parent, which here ends its thread: sockets are closed by who uses them."""
        if self.is_over:
            raise EngineDeadError("the test is over")


class Stage:
    def __init__(self, folder: Path) -> None:
        key = folder / "key"
        key.write_bytes(b"x" * 40)
        key.chmod(0o600)
        self.config = EngineConfig.from_flat(
            data_parallel_size=2, data_parallel_size_local=1, data_parallel_address="127.0.0.1", data_parallel_rank=1,
            data_parallel_rpc_port=free_port() - 1, data_parallel_key_file=str(key),
        )  # fmt: skip
        self.secret, self.where = read_secret(str(key)), address(self.config, 1)
        self.folder = protocol.make_socket_dir()
        self.context: zmq.Context[Any] = zmq.Context()
        self.outputs, self.inputs = self.context.socket(zmq.PULL), self.context.socket(zmq.PUSH)
        self.outputs.bind(protocol.address(self.folder, protocol.OUTPUT_SOCKET))
        self.inputs.connect(protocol.address(self.folder, protocol.INPUT_SOCKET))
        self.error: Exception | None = None
        self._stand_in = OfThisProcess(self.folder, 1)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert isinstance(protocol.decoder_for_front_end().decode(self.told()), protocol.Hello)
        self.first = protocol.encode(protocol.Start(protocol.PROTOCOL, self.config, MODEL, "", []))
        self.inputs.send(self.first)

    def _run(self) -> None:
        try:
            self._stand_in.run()
        except Exception as error:
            self.error = error

    def told(self) -> bytes:
        assert self.outputs.poll(60_000)
        return bytes(self.outputs.recv())

    def node(self) -> zmq.Socket[bytes]:
        return connect(self.context, self.where, self.secret)

    def joined(self) -> zmq.Socket[bytes]:
        """A node that was taken."""
        node = self.node()
        node.send_multipart([PLACE, HELLO])
        assert node.poll(60_000) and node.recv() == self.first
        return node

    def end(self) -> None:
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[], Stage]]:
    made: list[Stage] = []

    def build() -> Stage:
        made.append(Stage(tmp_path))
        return made[-1]

    yield build
    for stage in made:
        stage._stand_in.is_over = True
        stage.inputs.send(protocol.encode(protocol.Shutdown()))
        stage.end()
        stage.context.destroy(0)
        stage._stand_in._context.destroy(0)
        shutil.rmtree(stage.folder, ignore_errors=True)


def test_messages_pass_and_a_node_that_ends_is_lost(make: Callable[[], Stage]) -> None:
    stage = make()
    node = stage.joined()
    node.send_multipart([PLACE, BEAT])
    assert stage.told() == BEAT
    stage.inputs.send(b"a question")
    assert node.poll(60_000) and node.recv() == b"a question"
    node.close(0)
    stage.end()
    assert isinstance(stage.error, EngineDeadError) and "the node of engine 1 is lost" in str(stage.error)


def test_a_node_is_looked_for_by_time_whatever_others_send(make: Callable[[], Stage], monkeypatch: Any) -> None:
    """Its socket may take messages for a moment longer: as many looks as there are messages would be over too soon."""
    stage = make()
    node = stage.joined()
    sent: list[float] = []
    send_far, gone = stage._stand_in._send_far, time.monotonic() + 1.0

    def send(far: zmq.Socket[bytes], data: bytes, index: int) -> None:
        sent.append(time.monotonic())
        if time.monotonic() > gone:
            raise EngineDeadError("lost at last")
        if data:
            send_far(far, data, index)

    monkeypatch.setattr(stage._stand_in, "_send_far", send)
    stage._stand_in._check_from_now()
    while stage.thread.is_alive():
        node.send_multipart([PLACE, BEAT])  # each wakes it up
        while stage.thread.is_alive() and not stage.outputs.poll(20):
            assert time.monotonic() < gone + 90
        if stage.thread.is_alive():
            assert stage.told() == BEAT
    assert str(stage.error) == "lost at last"
    assert len(sent) < 20, "it does not look with each message"


def test_a_look_that_is_late_is_made_all_the_same(make: Callable[[], Stage], monkeypatch: Any) -> None:
    """The process did not run while it should have looked."""
    looks: list[bytes] = []
    stand_in = make()._stand_in
    monkeypatch.setattr(stand_in, "_send_far", lambda far, data, index: looks.append(data))
    stand_in._peer = b"node"
    stand_in._check_from_now()
    stand_in._check_until = stand_in._check_at - 60
    for _ in range(3):
        stand_in._check_peer(None, 1)  # type: ignore[arg-type]
    assert looks == [b""]


def test_another_node_waits_while_there_is_one_and_a_life_later_it_is_taken(make: Callable[[], Stage]) -> None:
    stage = make()
    first = stage.joined()
    second = stage.node()
    second.send_multipart([PLACE, HELLO])
    second.send_multipart([PLACE, BEAT])
    assert not second.poll(500)
    first.send_multipart([PLACE, BEAT])
    assert stage.told() == BEAT and stage.thread.is_alive()
    first.close(0)
    stage.end()
    assert isinstance(stage.error, EngineDeadError)
    later = make()
    assert later.joined()


def test_a_node_that_has_gone_when_it_is_answered_is_waited_for_again(make: Callable[[], Stage]) -> None:
    stage = make()
    taken: list[bytes] = []

    class Far:
        """Knows nobody."""

        def send_multipart(self, parts: list[bytes]) -> None:
            taken.append(parts[0])
            raise zmq.ZMQError(zmq.EHOSTUNREACH)

    stage._stand_in._greet(Far(), b"gone", 1, b"start")  # type: ignore[arg-type]
    assert taken == [b"gone"] and stage._stand_in._peer is None
    assert stage.joined()


def test_an_end_before_there_is_a_node(make: Callable[[], Stage]) -> None:
    stage = make()
    node = stage.node()
    node.send_multipart([PLACE, BEAT])  # no hello
    node.send_multipart([PLACE, b"noise"])
    stage.inputs.send(protocol.encode(protocol.Shutdown()))
    stage.end()
    assert stage.error is None


def test_its_process_ends_by_itself_where_there_was_no_node(make: Callable[[], Stage]) -> None:
    stage = make()
    stage.inputs.send(protocol.encode(protocol.Shutdown()))
    stage.end()
    connection = FarConnection()
    starting = threading.Thread(target=_started, args=(connection, stage.config), daemon=True)
    starting.start()
    port = int(stage.where.rpartition(":")[2])

    def listens() -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) == 0

    assert eventually(listens)
    connection.close(60.0)
    starting.join(60)
    assert connection.process.returncode == 0


def _started(connection: FarConnection, config: EngineConfig) -> None:
    with contextlib.suppress(EngineDeadError):
        connection.start(protocol.Start(protocol.PROTOCOL, config, MODEL, "", []))
