"""`RankPlace`: what a rank's process has before it knows its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pelton.parallel.communicator import Communicator, CommunicatorContext, GroupContext, make_communicator
from pelton.worker.select import worker_class
from pelton_plugins.executors.in_process import WorkerThread, place_on_host
from pelton_plugins.executors.one_rank import OneRank

if TYPE_CHECKING:
    from pelton.config import EngineConfig
    from pelton.config.parallel import ParallelConfig
    from pelton.plugins import Plugins


class RankPlace:
    """A rank's platform with its share of the host, and its place among the ranks. They meet on a thread, while the worker is imported.
    store: where they find each other."""

    def __init__(self, config: EngineConfig, plugins: Plugins, rank: int, store: str) -> None:
        from pelton.platform.select import select_platform

        self.rank, self._config, self._plugins, self._store = rank, config, plugins, store
        self.platform = select_platform(config, plugins)
        place, count = place_on_host(config.parallel, rank)
        if count > 1:
            self.platform.share_host(place, count)
        self._device_index = self.local_rank(config.parallel)
        self.platform.prepare(config)
        self.platform.begin_device(self._device_index)
        self._thread = WorkerThread("pelton-meeting")
        self._found = self._thread.submit(self._find)
        worker_class(self.platform, plugins)

    def local_rank(self, parallel: ParallelConfig) -> int:
        """Return the number of this rank's device on its host."""
        return place_on_host(parallel, self.rank)[0]

    def found(self) -> tuple[int, GroupContext]:
        """Return the number of the device on this host, and the groups of ranks, once all have met. Raises what kept them from it."""
        found: tuple[int, GroupContext] = self._found.result()
        self._thread.close(0)
        return found

    def _find(self) -> tuple[int, GroupContext]:
        """Ranks of one stage follow each other."""
        parallel = self._config.parallel
        stage, rank = divmod(self.rank, parallel.tensor_parallel_size)
        stages = None
        if parallel.pipeline_parallel_size > 1:
            stages = self._meet(stage, parallel.pipeline_parallel_size, f"pp{rank}")
        size, num_parts = parallel.tensor_parallel_size, parallel.decode_context_parallel_size
        if size == 1:
            return self._device_index, GroupContext(OneRank(), stages)
        group = self._meet(rank, size, f"tp{stage}")
        found = GroupContext(group, stages)
        if num_parts > 1:  # ranks with the same KV heads follow each other
            number, part = divmod(rank, num_parts)
            found.context = group
            if num_parts < size:
                found.context = self._meet(part, num_parts, f"dcp{stage}.{number}")
        return self._device_index, found

    def _meet(self, rank: int, size: int, group: str) -> Communicator:
        context = CommunicatorContext(
            rank=rank, size=size, device=self.platform.device(self._device_index), store=self._store, group=group,
            engine_config=self._config,
        )  # fmt: skip
        return make_communicator(self._plugins, context, self.platform.device_type)
