"""A rank inside an actor of Ray."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pelton_plugins.executors.multiproc.place import RankPlace
from pelton_plugins.executors.multiproc.rank import Rank
from pelton_plugins.executors.ray_cluster.wire import SocketJobs, connect

if TYPE_CHECKING:
    from pelton.config.parallel import ParallelConfig


class RayRankPlace(RankPlace):
    """A rank that sees the devices that Ray gave it, and no others."""

    def local_rank(self, parallel: ParallelConfig) -> int:
        seen = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
        return 0 if len(seen) == 1 else super().local_rank(parallel)


class RayRank(Rank):
    place_class = RayRankPlace


class RankActor:
    """Ray makes an actor of it."""

    def pid(self) -> int:
        return os.getpid()

    def run(self, host: str, port: int, token: bytes, rank: int, size: int) -> None:
        """Serve as this rank until the executor says that it is over. The end of the connection ends the process."""
        connection = connect(host, port, token, rank)
        RayRank(rank, size, SocketJobs(connection), connection).run()
