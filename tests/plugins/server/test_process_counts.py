"""The processes of a server, by its sizes: what docs/parallelism.md says, counted while one runs."""

from __future__ import annotations

from collections import Counter

import psutil
import pytest

from pelton_plugins.bench.soak.chaos import API, ENGINE, RANK
from pelton_plugins.bench.stream.command import own_server

PARTS = {ENGINE: "engine", API: "API process", RANK: "rank", "pelton.cli.main": "server"}


def processes(num_ranks: int, num_engines: int) -> Counter[str]:
    """Every process of a running server, by what it is; api-server-count as it is by default."""
    flags = ["-dp", str(num_engines)] if num_engines > 1 else []
    sizes = {"num_seqs": 4, "max_model_len": 64, "num_ranks": num_ranks}
    with own_server(num_engines, None, *flags, **sizes) as (_, process):
        server = psutil.Process(process.pid)
        family = [server, *server.children(recursive=True)]
        found = Counter(_part(one.cmdline()) for one in family)
    _, alive = psutil.wait_procs(family, timeout=90)
    assert not alive
    return found


def _part(command: list[str]) -> str:
    return next((part for module, part in PARTS.items() if module in command), " ".join(command))


@pytest.mark.parametrize(
    "num_ranks, num_engines, wanted",
    [
        pytest.param(4, 1, {"server": 1, "engine": 1, "rank": 4}, id="6-of-tp-4"),
        pytest.param(2, 2, {"API process": 2, "server": 1, "engine": 2, "rank": 4}, id="9-of-tp-2-dp-2"),
    ],
)
@pytest.mark.slow
def test_processes_are_as_many_as_the_sizes_say(num_ranks, num_engines, wanted):
    assert processes(num_ranks, num_engines) == wanted
