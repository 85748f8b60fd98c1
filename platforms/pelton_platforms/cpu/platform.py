"""The CPU platform: threads, memory and defaults of the host's CPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from pelton.config import CUDAGraphMode, EngineConfig
from pelton.errors import ConfigError
from pelton.logging import get_logger
from pelton.platform.interface import Platform
from pelton_platforms.cpu import host
from pelton_platforms.cpu.threads import bind_team

if TYPE_CHECKING:
    import torch

    from pelton.graphs.recorder import GraphRecorder

DEFAULT_KV_CACHE_BYTES = 512 * 2**20
_LEAST_KV_CACHE_BYTES = 16 * 2**20

logger = get_logger(__name__)


class CPUPlatform(Platform):
    """One worker computes with all cores that the process may use."""

    name: ClassVar[str] = "cpu"
    device_type: ClassVar[str] = "cpu"
    default_max_num_batched_tokens: ClassVar[int] = 2048
    default_max_num_seqs: ClassVar[int] = 64
    encoder_scale: ClassVar[int] = 2
    target_step_s: ClassVar[float | None] = 0.7  # attention over a long context comes on top
    default_dtype: ClassVar[str] = "float32"
    supported_graph_modes: ClassVar[tuple[CUDAGraphMode, ...]] = (CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY)
    pads_graphs: ClassVar[bool] = False

    def device(self, local_rank: int) -> torch.device:
        import torch

        return torch.device("cpu")

    def share_host(self, local_rank: int, num_local_ranks: int) -> None:
        """A rank has cores of its own. Where there are fewer than ranks, those that wait for each other, which follow each other, get
        different ones."""
        cores = host.core_cpus()[: host.usable_cores()]
        share = len(cores) // num_local_ranks
        first = local_rank * len(cores) // num_local_ranks if share else local_rank % len(cores)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores[first:][: max(share, 1)])

    def init_device(self, config: EngineConfig, local_rank: int) -> None:
        """Threads within an op, none between ops: a step is one chain of ops."""
        import torch

        torch.set_num_threads(num_threads())
        try:
            torch.set_num_interop_threads(1)
        except RuntimeError as error:  # torch allows it only before the process's first parallel work
            logger.debug("inter-op threads stay at %d: %s", torch.get_num_interop_threads(), error)
        bind_team(num_threads(), host.core_cpus())

    def graph_recorder(self) -> GraphRecorder:
        from pelton_platforms.device.graphs.call_graph import CallGraphRecorder

        return CallGraphRecorder()

    def describe(self, local_rank: int = 0) -> str:
        count = num_threads()
        return f"cpu: {host.cpu_name()}, {count} thread{'s' if count > 1 else ''}"

    def available_kv_cache_bytes(self, config: EngineConfig, *, weights_bytes: int, peak_activation_bytes: int) -> int:
        """The size that was set, or 512 MiB; less where the host has less. Weights are in memory already."""
        wanted = config.kv_cache.kv_cache_memory_bytes
        available = host.available_memory_bytes()
        room = (
            None
            if available is None
            else int(available * config.kv_cache.gpu_memory_utilization) - peak_activation_bytes
        )
        if wanted is not None:
            if room is not None and wanted > room:
                raise ConfigError(
                    f"kv_cache_memory_bytes is {wanted}; after weights and activations {max(room, 0)} bytes of memory are left. "
                    "Set it lower, or give the process more memory."
                )
            return wanted
        if room is None or room >= DEFAULT_KV_CACHE_BYTES:
            return DEFAULT_KV_CACHE_BYTES
        if room < _LEAST_KV_CACHE_BYTES:
            raise ConfigError(
                f"Memory is full: {max(room, 0)} bytes are left for the KV cache after {weights_bytes} bytes of weights. "
                "Use a smaller model, lower max_num_batched_tokens, or give the process more memory."
            )
        logger.warning("KV cache shrunk to %d bytes: the host has no more memory", room)
        return room


def num_threads() -> int:
    """OMP_NUM_THREADS where the operator set it, else one for each usable core."""
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(given) if given.isdigit() and int(given) > 0 else host.usable_cores()
