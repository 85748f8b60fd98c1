"""What the device offers: sizes, dtypes, and its worker. torch is imported inside methods only."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pelton.config import EngineConfig
from pelton.platform.interface import Platform
from pelton_dummy_device.plugin import DEVICE_TYPE

if TYPE_CHECKING:
    import torch

    from pelton.worker.interface import Worker

DEFAULT_KV_CACHE_BYTES = 64 * 2**20


class DummyPlatform(Platform):
    """A device with 64 MiB for the KV cache unless told otherwise."""

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
        return config.kv_cache.kv_cache_memory_bytes or DEFAULT_KV_CACHE_BYTES

    def worker_class(self) -> type[Worker]:
        from pelton_dummy_device.worker import DummyWorker

        return DummyWorker
