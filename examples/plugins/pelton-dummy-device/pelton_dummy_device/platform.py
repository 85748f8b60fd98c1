"""Platform of the dummy device: sizes, dtypes, and its worker. torch is imported inside methods only."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.platform.interface import Platform
from pelton_dummy_device.plugin import DEVICE_TYPE

if TYPE_CHECKING:
    import torch

    from pelton.worker.interface import Worker

DEFAULT_KV_CACHE_BYTES = 256 * 2**20


class DummyPlatform(Platform):
    """A device with 256 MiB for the KV cache unless told otherwise."""

    name: ClassVar[str] = "dummy"
    device_type: ClassVar[str] = DEVICE_TYPE
    default_max_num_batched_tokens: ClassVar[int] = 512
    default_max_num_seqs: ClassVar[int] = 16
    default_dtype: ClassVar[str] = "float32"

    def device(self, local_rank: int) -> torch.device:
        import torch

        return torch.device("cpu")

    def init_device(self, config: EngineConfig, local_rank: int) -> None:
        pass

    def describe(self, local_rank: int = 0) -> str:
        return "dummy: CPU tensors, for tests and for reading"

    def available_kv_cache_bytes(self, config: EngineConfig, *, weights_bytes: int, peak_activation_bytes: int) -> int:
        """Return what is set; it has to fit into the device's memory, which is the host's here. Weights are in it already."""
        wanted = config.kv_cache.kv_cache_memory_bytes
        if wanted is None:
            return DEFAULT_KV_CACHE_BYTES
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if wanted > free - peak_activation_bytes:
            raise ConfigError(
                f"kv_cache_memory_bytes is {wanted}; after weights and activations {max(free - peak_activation_bytes, 0)} "
                "bytes of memory are left. Set it lower."
            )
        return wanted

    def worker_class(self) -> type[Worker]:
        from pelton_dummy_device.worker import DummyWorker

        return DummyWorker
