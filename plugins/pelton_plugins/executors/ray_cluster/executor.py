"""`RayExecutor`: the ranks of one engine as actors of a Ray cluster, on one host or several.

Ray finds room for them (a placement group) and sees to their processes. What they are told and answer goes through connections of our
own, as it does between processes of one host: Ray carries no message, and nothing of ours is pickled. Collectives go over TCP.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import socket
import time
from datetime import timedelta
from typing import Any

from pelton.config.plugin_settings import read_settings
from pelton.errors import ConfigError, EngineDeadError
from pelton.executor.interface import ExecutorContext
from pelton.logging import get_logger
from pelton.platform.select import select_platform
from pelton_plugins.executors.multiproc import messages
from pelton_plugins.executors.multiproc.executor import MultiProcExecutor
from pelton_plugins.executors.multiproc.processes import RankProcess
from pelton_plugins.executors.ray_cluster.settings import SETTINGS, RaySettings
from pelton_plugins.executors.ray_cluster.wire import FRAME, accept

logger = get_logger(__name__)


def _ray() -> Any:
    """Import Ray: an extra, whose types nobody checks here."""
    return importlib.import_module("ray")


class RayRankProcess(RankProcess):
    """One rank's actor as the executor sees it."""

    def __init__(self, rank: int, actor: Any, pid: int, host: str) -> None:
        self.rank, self.actor = rank, actor
        self._pid, self._host = pid, host
        self._received = bytearray()
        self.is_connected = self._is_killed = False

    def attach(self, connection: socket.socket) -> None:
        self.socket = connection
        self.is_connected = True

    @property
    def name(self) -> str:
        return f"Rank {self.rank} (pid {self._pid} on {self._host})"

    def send(self, data: bytes) -> None:
        self.socket.sendall(FRAME.pack(len(data)) + data)

    def has_ended(self) -> bool:
        with contextlib.suppress(OSError):
            return not self.socket.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        return False

    def is_stopped(self) -> bool:
        return False  # on another host nobody sees it; `max_step_s` ends an engine that hangs

    def describe_end(self, wait_s: float = 1.0) -> str:
        return f"{self.name} has ended."

    def kill(self) -> None:
        if self._is_killed:
            return
        self._is_killed = True
        if self.is_connected:  # the process ends with it
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(Exception):  # the cluster may be gone
            _ray().kill(self.actor, no_restart=True)

    def close(self) -> None:
        if self.is_connected:
            self.socket.close()


class RayExecutor(MultiProcExecutor):
    """Settings: `plugin_config.ray`."""

    _ring = None

    def start_ranks(self, context: ExecutorContext, ranks: list[RankProcess]) -> None:
        try:
            ray = _ray()
        except ImportError as error:
            raise ConfigError(
                "distributed_executor_backend is ray, which is not installed: pip install 'pelton[ray]'."
            ) from error
        settings = read_settings(context.config, SETTINGS, RaySettings)
        if not ray.is_initialized():
            address = settings.address or os.environ.get("RAY_ADDRESS") or "auto"
            try:
                ray.init(address=address, log_to_driver=True, logging_level="warning", namespace="pelton")
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"ray.address is {address!r}, and no cluster answers there ({error}). Start one by ray start --head."
                ) from error
        host = ray.util.get_node_ip_address()
        self._group = self._placement(ray, settings, context)
        token = secrets.token_bytes(32)
        with socket.create_server((host, 0), backlog=self.size) as listener:
            port = listener.getsockname()[1]
            found = self._start_actors(ray, settings, context)
            ranks.extend(found)
            for rank in found:
                rank.actor.run.remote(host, port, token, rank.rank, self.size)
            self._wait_for_ranks(listener, token, found, settings.start_timeout_s)
        self.send(messages.encode(messages.Prepare.of(context.config, context.plugins, self._open_store(host))))

    def _bundle(self, settings: RaySettings, context: ExecutorContext) -> dict[str, float]:
        num_gpus = settings.num_gpus
        if num_gpus is None:
            num_gpus = 0.0 if select_platform(context.config, context.plugins).device_type == "cpu" else 1.0
        wanted = {"CPU": settings.num_cpus, "GPU": num_gpus, **settings.resources}
        return {name: count for name, count in wanted.items() if count}

    def _placement(self, ray: Any, settings: RaySettings, context: ExecutorContext) -> Any:
        """Room for all ranks. Raises `ConfigError` where the cluster has none in time."""
        bundle = self._bundle(settings, context)
        group = ray.util.placement_group([bundle] * self.size, strategy=settings.placement)
        if not group.wait(timeout_seconds=settings.start_timeout_s):
            ray.util.remove_placement_group(group)
            raise ConfigError(
                f"The Ray cluster has no room for {self.size} ranks of {bundle} ({settings.placement}) within "
                f"{settings.start_timeout_s:g} s; it has {ray.cluster_resources()}."
            )
        return group

    def _start_actors(self, ray: Any, settings: RaySettings, context: ExecutorContext) -> list[RayRankProcess]:
        from pelton_plugins.executors.ray_cluster.remote import RankActor

        bundle = self._bundle(settings, context)
        made, place = ray.remote(RankActor), importlib.import_module("ray.util.scheduling_strategies")
        actors = [
            made.options(
                num_cpus=bundle.get("CPU", 0), num_gpus=bundle.get("GPU", 0), max_concurrency=2,
                resources=settings.resources or None,
                scheduling_strategy=place.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
            ).remote()
            for rank in range(self.size)
        ]  # fmt: skip
        try:
            pids = ray.get([actor.pid.remote() for actor in actors], timeout=settings.start_timeout_s)
        except ray.exceptions.RayError as error:
            raise EngineDeadError(f"The Ray cluster did not start the ranks: {error}") from error
        nodes = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        return [
            RayRankProcess(rank, actor, pid, hosts.get(nodes.get(rank), "?"))
            for rank, (actor, pid) in enumerate(zip(actors, pids, strict=True))
        ]

    def _wait_for_ranks(
        self, listener: socket.socket, token: bytes, ranks: list[RayRankProcess], timeout_s: float
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while missing := [rank.name for rank in ranks if not rank.is_connected]:
            listener.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                found = accept(listener, token)
            except TimeoutError:
                raise EngineDeadError(f"{', '.join(missing)} did not connect within {timeout_s:g} s.") from None
            if found is not None and found[0] < self.size:
                ranks[found[0]].attach(found[1])

    def _open_store(self, host: str) -> str:
        """Where the ranks' communicators find each other, across hosts."""
        distributed: Any = importlib.import_module("torch.distributed")
        self._store = distributed.TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        return f"tcp://{host}:{self._store.port}"

    def send(self, data: bytes) -> None:
        for rank in self._ranks:
            assert isinstance(rank, RayRankProcess)
            try:
                rank.send(data)
            except OSError as error:
                self._fail(rank.describe_end())
                raise self._error or EngineDeadError(str(error)) from error

    def shutdown(self) -> None:
        super().shutdown()
        group, self._group = getattr(self, "_group", None), None
        if group is not None:
            with contextlib.suppress(Exception):  # the cluster may be gone
                _ray().util.remove_placement_group(group)
