"""Ranks in a Ray cluster of several nodes, all on this machine: equality, a rank that ends, and a cluster without room."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pelton_e2e import eventually, generate, greedy, greedy_reference, make_llm, make_prompts

from pelton.errors import ConfigError, EngineDeadError
from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint
from pelton_plugins.executors.ray_cluster.settings import RaySettings
from pelton_plugins.executors.ray_cluster.wire import accept, connect

NUM_TOKENS = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[object]:
    pytest.importorskip("ray")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "num_gpus": 0, "object_store_memory": 80_000_000, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        made.add_node(num_cpus=1, num_gpus=0, object_store_memory=80_000_000)
    ray.init(address=made.address, namespace="pelton", logging_level="error")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.mark.slow
def test_ranks_on_two_nodes_answer_as_transformers_and_one_that_ends_is_named(cluster: object, tmp_path: Path) -> None:
    path = str(make_tiny_checkpoint(tmp_path / "model", "llama"))
    prompts = make_prompts(VOCAB_SIZE, (3, 40, 90))
    outputs, _ = greedy_reference(path, prompts, NUM_TOKENS)
    flags = {
        "tensor_parallel_size": 2, "distributed_executor_backend": "ray",
        "plugin_config": {"ray": {"placement": "STRICT_SPREAD"}},
    }  # fmt: skip
    with make_llm(path, **flags) as llm:
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == outputs
        executor = llm.llm_engine.client._core._executor
        import ray

        table = ray.util.placement_group_table(executor._group)
        assert len(set(table["bundles_to_node_id"].values())) == 2
        pids = [rank._pid for rank in executor._ranks]
        threading.Timer(0.2, os.kill, (pids[1], signal.SIGKILL)).start()
        with pytest.raises(EngineDeadError, match=rf"Rank 1 \(pid {pids[1]} on "):
            for _ in range(200):
                generate(llm, prompts, greedy(NUM_TOKENS))
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.slow
def test_a_cluster_without_room_says_what_it_has(cluster: object, tmp_path: Path) -> None:
    path = str(make_tiny_checkpoint(tmp_path / "model", "llama", with_tokenizer=False))
    with pytest.raises(ConfigError, match=r"has no room for 2 ranks of \{'CPU': 9"):
        make_llm(
            path, tensor_parallel_size=2, distributed_executor_backend="ray", skip_tokenizer_init=True,
            plugin_config={"ray": {"num_cpus": 9, "start_timeout_s": 1}},
        )  # fmt: skip


def test_only_who_knows_the_token_is_a_rank() -> None:
    token = bytes(32)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        port = listener.getsockname()[1]
        told: list[object] = []

        def stranger() -> None:
            try:
                connect("127.0.0.1", port, b"x" * 32, 1)
            except EngineDeadError as error:
                told.append(error)

        thread = threading.Thread(target=stranger)
        thread.start()
        assert accept(listener, token) is None
        thread.join()
        assert len(told) == 1
        thread = threading.Thread(target=lambda: told.append(connect("127.0.0.1", port, token, 3)))
        thread.start()
        found = accept(listener, token)
        thread.join()
        assert found is not None and found[0] == 3
        found[1].close()
        told[1].close()


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"ray\.placement is 'near'; use one of PACK"):
        RaySettings(placement="near")
