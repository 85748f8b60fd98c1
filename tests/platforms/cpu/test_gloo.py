"""Collectives over gloo and shared memory: the suite, and a model that is shared by two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pelton_forked import AnyForkingPopen

from pelton import hookimpl
from pelton.entries import Entry
from pelton.errors import ConfigError, PluginError
from pelton.parallel.communicator import CommunicatorContext, GroupContext, make_communicator
from pelton.plugins import load_plugins, register
from pelton.testing.communicator import CommunicatorConformance
from pelton.testing.model_driver import ModelDriver
from pelton.testing.models import make_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("forks")
TOKENS = list(range(5, 40))
RANK = """
import sys, torch
from pathlib import Path
from test_gloo import logits_of
from pelton.parallel.communicator import CommunicatorContext, GroupContext, make_communicator
from pelton.plugins import load_plugins

rank, path, store, out = int(sys.argv[1]), *sys.argv[2:]
plugins = load_plugins(only=[])
context = CommunicatorContext(rank=rank, size=2, device=torch.device("cpu"), store=store)
group = GroupContext(make_communicator(plugins, context, "cpu"))
torch.save(logits_of(path, group), out)
"""


class TestGloo(CommunicatorConformance):
    load = "pelton_platforms.cpu.gloo:GlooCommunicator"


class TestShared(CommunicatorConformance):
    load = "pelton_platforms.cpu.shared:SharedMemoryCommunicator"
    size = 3


HALTING = """
import time

class Halting:
    def __init__(self, context):
        if context.rank == 1:
            raise ValueError("no memory")
        time.sleep(1000)
"""


def test_the_suite_names_a_rank_that_fails_and_waits_for_nobody_then(tmp_path, monkeypatch):
    (tmp_path / "halting.py").write_text(HALTING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    suite = type("Suite", (CommunicatorConformance,), {"load": "halting:Halting"})()
    with pytest.raises(AssertionError, match=r"(?s)rank 1 ended with status 1: .*no memory"):
        suite._run()


def logits_of(path, parallel=None):
    driver = ModelDriver(path, plugins=load_plugins(only=[]), parallel=parallel)
    return torch.cat([driver.step({"a": part})["a"] for part in (TOKENS[:30], TOKENS[30:31], TOKENS[31:])])


def test_two_processes_share_a_model(tmp_path):
    path = make_tiny_checkpoint(tmp_path / "model", "llama", with_tokenizer=False)
    folders = (Path(__file__).parent, Path(__file__).parents[2] / "support", os.environ.get("PYTHONPATH", ""))
    here = os.pathsep.join(map(str, folders))
    environ = {**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "1"}
    (tmp_path / "rank.py").write_text(RANK)
    ranks = [
        AnyForkingPopen(
            [sys.executable, str(tmp_path / "rank.py"), str(rank), str(path), str(tmp_path / "store"), str(tmp_path / f"{rank}.pt")],
            env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    errors = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert torch.equal(first, second), "ranks sample from the same bits"
    torch.testing.assert_close(first, logits_of(path), atol=1e-4, rtol=1e-4)


def test_a_plugins_own_is_taken_by_its_priority(tmp_path, monkeypatch):
    class Plugin:
        PELTON_API = ">=1.2,<2"

        @hookimpl
        def pelton_communicators(self, device_type):
            load = "pelton_platforms.cpu.gloo:GlooCommunicator"
            return [Entry(name="mine", load=load, priority=90), Entry(name="bad", load="json:dumps", priority=5)]

    plugins = load_plugins(only=[])
    register(plugins.manager, Plugin(), "mine", "test")
    context = CommunicatorContext(rank=0, size=1, device=torch.device("cpu"), store=str(tmp_path / "store"))
    assert make_communicator(plugins, context, "toaster").size == 1
    with pytest.raises(PluginError, match=r"'bad' \(json:dumps of mine .* fails: TypeError"):
        make_communicator(plugins, context, "cpu", "bad")


def test_one_is_named_or_the_best_is_taken(tmp_path):
    plugins = load_plugins(only=[])
    context = CommunicatorContext(rank=0, size=1, device=torch.device("cpu"), store=str(tmp_path / "store"))
    group = GroupContext(make_communicator(plugins, context, "cpu"))
    assert (group.rank, group.size, type(group.communicator).__name__) == (0, 1, "SharedMemoryCommunicator")
    with pytest.raises(ConfigError, match="communicator for 'cpu' is 'nccl'; available: shared, gloo"):
        make_communicator(plugins, context, "cpu", "nccl")
    with pytest.raises(ConfigError, match="communicator for 'toaster' is 'any'; available: none"):
        make_communicator(plugins, context, "toaster")


SUMS = """
import sys, time, torch
from pelton.parallel.communicator import CommunicatorContext
from pelton_platforms.cpu.shared import PLACE_BYTES, SharedMemoryCommunicator

rank, store = int(sys.argv[1]), sys.argv[2]
one = SharedMemoryCommunicator(CommunicatorContext(rank=rank, size=2, device=torch.device("cpu"), store=store))
for turn in range(3000):
    if turn % 500 == 100 * rank:
        time.sleep(0.003)  # now one is late, now the other
    count = (1, 7, 512, PLACE_BYTES // 4, PLACE_BYTES // 4 + 1)[turn % 5 if turn % 50 < 5 else turn % 3]
    found = one.all_reduce(torch.full((count,), float(turn * (rank + 1))))
    assert found[0] == found[-1] == 3.0 * turn, (turn, count, found)
    both = one.all_gather(torch.full((2, 3), turn + rank, dtype=torch.int64), dim=0)
    assert both.tolist() == [[turn] * 3] * 2 + [[turn + 1] * 3] * 2, (turn, both)
"""


def test_no_turn_reads_what_another_has_brought(tmp_path):
    (tmp_path / "sums.py").write_text(SUMS)
    ranks = [
        AnyForkingPopen(
            [sys.executable, str(tmp_path / "sums.py"), str(rank), str(tmp_path / "store")], env=dict(os.environ), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    errors = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"pelton-{ranks[0].pid}-")]
