"""Deployment examples: every `pelton serve` in them has flags that exist and go together, on each host."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pelton_plugins.flags import parse_flags
from pelton_plugins.server.config import ServerConfig

FOLDER = Path(__file__).resolve().parents[2] / "examples/deploy"
FILLED = {
    "$MODEL": "m", "$API_KEY": "k", "$POD_IP": "10.0.0.1", "$((2 * LWS_WORKER_INDEX))": "2",
    "$(getent hosts $LWS_LEADER_ADDRESS | cut -d' ' -f1)": "10.0.0.1", "$SIZES": "-dp 16 --data-parallel-size-local 8",
    "$HEAD": "--data-parallel-address 10.0.0.1 --data-parallel-key-file key", "$((PER_NODE * SLURM_NODEID))": "8", "$SLURM_NNODES": "2",
}  # fmt: skip


def commands(text: str) -> list[str]:
    """Each `pelton serve`, with lines that go on joined."""
    found = []
    for match in re.finditer(r"^( *)exec pelton serve (.*(?:\n\1 *-.*)*)", text, re.MULTILINE):
        found.append(" ".join(match[2].split()))
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.[ys]*")), ids=lambda path: path.name)
def test_commands_are_understood_and_hosts_agree(path: Path) -> None:
    found = commands(path.read_text())
    assert found
    heads, nodes = [], []
    for command in found:
        for name, value in FILLED.items():
            command = command.replace(name, value)
        assert "$" not in command, command
        parsed = parse_flags(shlex.split(command), [ServerConfig], positional="model", environ={})
        server: ServerConfig = parsed.structs["ServerConfig"]
        server.check_exposure()
        (nodes if server.headless else heads).append(parsed.config.parallel)
    (head,) = heads
    for node in nodes:
        assert (node.data_parallel_size, node.data_parallel_address) == (
            head.data_parallel_size,
            head.data_parallel_address,
        )
        assert (
            [*head.engine_indexes, *node.engine_indexes] == [*range(head.data_parallel_size)] == [*head.served_indexes]
        )


@pytest.mark.parametrize("name", ["leader_worker_set.yaml", "leader_worker_set_ray.yaml"])
def test_manifests_are_yaml_of_the_operator(name: str) -> None:
    yaml = pytest.importorskip("yaml")
    first, *_ = yaml.safe_load_all((FOLDER / name).read_text())
    template = first["spec"]["leaderWorkerTemplate"]
    assert first["kind"] == "LeaderWorkerSet" and template["size"] == 2
    assert {"leaderTemplate", "workerTemplate"} <= template.keys()
