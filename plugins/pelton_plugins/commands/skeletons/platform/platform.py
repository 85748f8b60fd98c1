"""The platform: sizes, dtypes, and the room for the KV cache. torch is imported inside methods only."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.platform.interface import Platform

if TYPE_CHECKING:
    import torch

MEMORY_BYTES = 4 * 2**30


class SkeletonPlatform(Platform):
    """A device whose tensors lie in host memory, so that the CPU's attention backends and ops serve it."""

    name: ClassVar[str] = "skeleton"
    device_type: ClassVar[str] = "cpu"  # torch's word; attention backends and ops are offered by it
    default_max_num_batched_tokens: ClassVar[int] = 512
    default_max_num_seqs: ClassVar[int] = 16
    default_dtype: ClassVar[str] = "float32"

    def device(self, local_rank: int) -> torch.device:
        import torch

        return torch.device("cpu")

    def init_device(self, config: EngineConfig, local_rank: int) -> None:
        """Select the device; there is one."""

    def describe(self, local_rank: int = 0) -> str:
        return f"skeleton: {MEMORY_BYTES // 2**30} GiB of host memory"

    def available_kv_cache_bytes(self, config: EngineConfig, *, weights_bytes: int, peak_activation_bytes: int) -> int:
        free = max(MEMORY_BYTES - weights_bytes - peak_activation_bytes, 0)
        wanted = config.kv_cache.kv_cache_memory_bytes
        if wanted is None:
            return free // 2
        if wanted > free:
            raise ConfigError(f"kv_cache_memory_bytes is {wanted}; {free} bytes are free. Set it lower.")
        return wanted
