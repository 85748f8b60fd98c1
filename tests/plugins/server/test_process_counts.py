"""The processes of a server with several engines of several ranks: what docs/parallelism.md says, counted while one runs. Those of one
engine are counted in e2e/test_tensor_parallel.py, where such a server runs for another reason too."""

from __future__ import annotations

import psutil
import pytest
from pelton_e2e import processes_of

from pelton_plugins.bench.stream.command import own_server


@pytest.mark.usefixtures("forks")
def test_processes_are_as_many_as_the_sizes_say():
    sizes = {"num_seqs": 4, "max_model_len": 64, "num_ranks": 2}
    with own_server(2, None, "-dp", "2", **sizes) as (_, process):
        server = psutil.Process(process.pid)
        family = [server, *server.children(recursive=True)]
        found = processes_of(process.pid)
    _, alive = psutil.wait_procs(family, timeout=90)
    assert not alive
    assert found == {"API process": 2, "server": 1, "engine": 2, "rank": 4}
