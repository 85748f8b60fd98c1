"""One process a rank: the ring, what crosses to the ranks, and what happens when one of them goes."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import pytest
from msgspec.structs import replace
from pelton_e2e import eventually
from pelton_forked import forked_starts

from pelton import LLM
from pelton.config import EngineConfig
from pelton.errors import ConfigError, EngineDeadError, NotSupportedError, PluginError
from pelton.executor.interface import ExecutorContext
from pelton.kv_cache.spec import FullAttentionSpec, KVCacheGroup, KVCachePlan, KVCacheTensor, MambaSpec, MLASpec
from pelton.messages.step import ModelOutput
from pelton.plugins import load_plugins
from pelton.testing.executor import ExecutorConformance, tiny_model
from pelton.testing.kv_specs import full_spec, window_spec
from pelton_plugins.executors.multiproc import messages, processes
from pelton_plugins.executors.multiproc.executor import MultiProcExecutor, usable_bytes
from pelton_plugins.executors.multiproc.messages import Prepare
from pelton_plugins.executors.multiproc.processes import RankProcess, RanksAhead
from pelton_plugins.executors.multiproc.rank import own_plan
from pelton_plugins.executors.multiproc.ring import RingReader, RingWriter, make_ring_file
from pelton_plugins.executors.multiproc.transfers import JoinedTransfers
from pelton_plugins.kv_connectors.shared_storage import SharedStorage


@pytest.fixture(scope="module")
def for_suite() -> Iterator[MultiProcExecutor]:
    """Its ranks are started by `exec`; those of the tests below are forks."""
    executor = start_executor(tensor_parallel_size=2)
    yield executor
    executor.shutdown()


class TestMultiProc(ExecutorConformance):
    """With one executor for all tests, since two processes take seconds to start. The last test shuts it down."""

    executor_class = MultiProcExecutor
    _plans: ClassVar[dict[int, KVCachePlan]] = {}

    @pytest.fixture
    def executor(self, for_suite: MultiProcExecutor) -> MultiProcExecutor:
        return for_suite

    @pytest.fixture
    def plan(self, executor: MultiProcExecutor) -> KVCachePlan:
        if id(executor) not in self._plans:
            self._plans[id(executor)] = self.make_plan(executor)
        return self._plans[id(executor)]


@pytest.fixture
def ring() -> Iterator[tuple[RingWriter, list[RingReader]]]:
    descriptor = make_ring_file(2, 64)
    writer, readers = RingWriter(descriptor, 2), [RingReader(descriptor, 2, reader) for reader in range(2)]
    os.close(descriptor)
    yield writer, readers
    for end in (writer, *readers):
        end.close()


def nap() -> None:
    time.sleep(1e-4)


def test_messages_of_any_size_reach_all_readers_in_order(ring):
    writer, readers = ring
    sent = [bytes([number % 251]) * size for number, size in enumerate([0, 1, 55, 56, 57, 64, 65, 1000, 3, 5000])]
    got: list[list[bytes]] = [[], []]

    def read(reader: int) -> None:
        for _ in sent:
            got[reader].append(readers[reader].read(nap))
            time.sleep(0.002 * reader)  # a slow one holds up the writer, not the message

    threads = [threading.Thread(target=read, args=(reader,)) for reader in range(2)]
    for thread in threads:
        thread.start()
    for message in sent:
        writer.write(message, lambda: None, nap)
    for thread in threads:
        thread.join(60)
    assert got == [sent, sent]


def test_a_full_ring_is_waited_for_by_a_call_that_may_give_up(ring):
    writer, _ = ring

    class Gone(Exception): ...

    def give_up() -> None:
        raise Gone

    writer.write(b"x" * 40, lambda: None, give_up)
    with pytest.raises(Gone):
        writer.write(b"y" * 40, lambda: None, give_up)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSpec(FullAttentionSpec):
    scales: tuple[int, ...] = (1,)


def through_msgpack(data):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(data))


def test_plans_with_specs_of_plugins_cross():
    full = OwnSpec(block_size=16, num_kv_heads=2, head_dim=8, dtype="float32", scales=(3, 4))
    state = MambaSpec(block_size=16, state_bytes=12, states=(((3,), "float32"),))
    latent = MLASpec(block_size=16, latent_dim=9, dtype="bfloat16")
    plan = KVCachePlan(
        7, (KVCacheTensor(64, ("a", "b")),), (KVCacheGroup(("a",), full, 1, (full,)), KVCacheGroup(("b", "c"), state, 0, (state, latent)))
    )  # fmt: skip
    assert messages.plan_from_data(through_msgpack(messages.plan_to_data(plan))) == plan


def test_only_specs_cross():
    with pytest.raises(PluginError, match=r"os:system is not a KVCacheSpec"):
        messages.spec_from_data({"class": "os:system", "fields": {}})
    with pytest.raises(PluginError, match="cannot cross to another process"):
        messages.spec_from_data({"class": "pelton.kv_cache.spec:MLASpec", "fields": {"block_size": "many"}})


def make_config(**settings) -> EngineConfig:
    flat = {"load_format": "dummy", "max_num_seqs": 4, "max_num_batched_tokens": 64, "device": "cpu"} | settings
    return EngineConfig.from_flat(**flat)


def make_executor(**settings) -> MultiProcExecutor:
    with forked_starts():
        return start_executor(**settings)


def start_executor(ahead: RanksAhead | None = None, **settings) -> MultiProcExecutor:
    config = make_config(**settings)
    return MultiProcExecutor(ExecutorContext(config=config, model=tiny_model(), plugins=load_plugins(), ahead=ahead))


@pytest.fixture(scope="module")
def shared() -> Iterator[MultiProcExecutor]:
    executor = make_executor(tensor_parallel_size=2)
    yield executor
    executor.shutdown()


def test_every_rank_has_its_share(shared):
    assert all(spec.num_kv_heads == 1 for spec in shared.kv_cache_specs().values()), "of 2, each rank has one"
    assert shared.report().device.startswith("2 ranks, each cpu")


def test_a_rank_s_error_keeps_its_class(shared):
    with pytest.raises(NotSupportedError, match="has no method 'fly'"):
        shared.call("fly")
    with pytest.raises(NotSupportedError, match="has no method 'fly'"):
        shared.call_beside("fly").result(60)
    shared.check_health()


def test_a_model_that_does_not_divide_is_refused_with_its_reason():
    with pytest.raises(ConfigError, match="does not divide by tensor_parallel_size 3"):
        make_executor(tensor_parallel_size=3)


def test_a_connector_that_does_not_know_of_ranks_is_refused_where_they_share_a_block(monkeypatch):
    monkeypatch.setattr(SharedStorage, "serves_ranks", False)
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        with pytest.raises(ConfigError, match=f"{name} is 2.*with the KV connector 'shared_storage'.*serves_ranks"):
            make_executor(**{name: 2}, kv_connector="shared_storage")


def told(step_id, **lists) -> ModelOutput:
    return ModelOutput(step_id=step_id, **lists)


def test_a_transfer_is_over_when_every_rank_says_so_and_a_block_is_invalid_when_one_does():
    joined = JoinedTransfers(2, telling_rank=1)
    assert joined.take(0, told(1, finished_sending=["a", "b"], invalid_block_ids=[7]), is_open=True) is None
    assert joined.take(0, told(2, finished_receiving=["c"]), is_open=True) is None
    first = joined.take(1, told(1, token_ids=[[5]], finished_sending=["b"], invalid_block_ids=[3, 7]), is_open=True)
    assert first == told(1, token_ids=[[5]], finished_sending=["b"], invalid_block_ids=[3, 7])
    second = joined.take(1, told(2, finished_sending=["a"], finished_receiving=["c"]), is_open=True)
    assert second == told(2, finished_sending=["a"], finished_receiving=["c"])


def test_what_ranks_say_with_a_step_that_failed_is_told_with_the_next():
    joined = JoinedTransfers(2, telling_rank=0)
    assert joined.take(1, told(1, finished_sending=["a"]), is_open=True) is None
    joined.forget(1)
    assert joined.take(0, told(1, finished_sending=["a"]), is_open=False) is None
    assert joined.take(0, told(2), is_open=True) is None
    assert joined.take(1, told(2), is_open=True) == told(2, finished_sending=["a"])


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "is held by a signal")]
)
def test_a_rank_that_goes_takes_the_others_and_is_named(number, said):
    executor = make_executor(tensor_parallel_size=2)
    pids = [rank.process.pid for rank in executor._ranks]
    began = time.monotonic()
    os.kill(pids[1], number)
    with pytest.raises(EngineDeadError, match=rf"Rank 1 \(pid {pids[1]}\) {said}"):
        while time.monotonic() < began + 90:
            executor.check_health()
            time.sleep(0.01)
    with pytest.raises(EngineDeadError):
        executor.call("report")
    executor._finish_step(executor._ranks[0], messages.StepDone(7, ModelOutput(step_id=7)))  # it was on its way
    executor.shutdown()
    assert eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids)), "a rank is left"


def ranks_ahead(**settings) -> RanksAhead:
    with forked_starts():
        return RanksAhead(make_config(tensor_parallel_size=2, **settings), load_plugins())


def pids_of(ahead: RanksAhead) -> list[int]:
    return [rank.process.pid for rank in ahead.processes]


def gone(pids: list[int]) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_ranks_that_run_already_are_taken_where_they_have_the_same_settings():
    ahead = ranks_ahead(max_num_batched_tokens=None)
    executor = make_executor(ahead=ahead, tensor_parallel_size=2)  # the size of steps has been found since
    assert [rank.process.pid for rank in executor._ranks] == pids_of(ahead)
    del ahead  # its ranks are the executor's
    assert executor.report().device.startswith("2 ranks")
    executor.shutdown()

    other = ranks_ahead(seed=7)
    pids = pids_of(other)
    executor = make_executor(ahead=other, tensor_parallel_size=2)
    assert gone(pids) and not set(pids) & {rank.process.pid for rank in executor._ranks}
    executor.shutdown()


def test_ranks_that_nobody_takes_end(monkeypatch):
    ahead = ranks_ahead()
    pids = pids_of(ahead)
    del ahead
    assert eventually(lambda: gone(pids))

    made: list[RankProcess] = []

    class Noted(RankProcess):
        def __init__(self, *given) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(processes, "RankProcess", Noted)
    with forked_starts(), pytest.raises(ConfigError, match="There is no /no/such"):
        LLM(model="/no/such", device="cpu", tensor_parallel_size=2)
    assert len(made) == 2, "they were started before the model was looked for"
    assert eventually(lambda: gone([rank.process.pid for rank in made]))


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "is held by a signal")]
)
def test_a_rank_that_goes_before_the_model_is_found_is_named(number, said):
    ahead = ranks_ahead()
    pids = pids_of(ahead)
    os.kill(pids[1], number)
    with pytest.raises(EngineDeadError, match=rf"Rank 1 \(pid {pids[1]}\) {said}"):
        make_executor(ahead=ahead, tensor_parallel_size=2)
    assert eventually(lambda: gone(pids)), "a rank is left"


def test_a_rank_that_cannot_prepare_itself_says_why(monkeypatch):
    found = Prepare.of
    monkeypatch.setattr(Prepare, "of", lambda *given: replace(found(*given), plugin_digest="another"))
    with pytest.raises(PluginError, match=r"Rank \d found other plugins than the engine"):
        make_executor(tensor_parallel_size=2)


def test_nothing_is_left_after_shutdown(tmp_path, monkeypatch):
    """A killed executor leaves as little: nothing of it has a name."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    executor = make_executor(tensor_parallel_size=2)
    pids = [rank.process.pid for rank in executor._ranks]
    assert not os.listdir(tmp_path)
    executor.shutdown()
    executor.shutdown()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_plan_over_all_stages_fits_in_each() -> None:
    """Layers alike: as many blocks as the stage with the least memory for a layer has. Of two kinds, which may share buffers: each
    stage has room for all."""
    one, other = full_spec(), window_spec(32)
    assert usable_bytes([600, 300], [{"a": one, "b": one}, {"c": one}]) == 900
    assert usable_bytes([600, 100], [{"a": one, "b": one}, {"c": one}]) == 300
    assert usable_bytes([600, 300], [{"a": one}, {"b": other}]) == 300


def test_a_stage_takes_its_layers_of_the_plan() -> None:
    """Groups and blocks stay, also where a group has no layer here; a buffer that none of its layers uses is left out."""
    full, window = full_spec(), window_spec(32)
    plan = KVCachePlan(
        num_blocks=7, tensors=(KVCacheTensor(70, ("f0", "w0")), KVCacheTensor(70, ("w1",))),
        groups=(KVCacheGroup(("f0",), full), KVCacheGroup(("w0", "w1"), window)),
    )  # fmt: skip
    assert own_plan(plan, {"w0": window}) == KVCachePlan(
        num_blocks=7,
        tensors=(KVCacheTensor(70, ("w0",)),),
        groups=(KVCacheGroup((), full), KVCacheGroup(("w0",), window)),
    )
