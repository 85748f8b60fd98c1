"""Settings of `pelton.kv_cache`, and of nothing else."""

from __future__ import annotations

import msgspec

from pelton.errors import ConfigError

HASH_ALGOS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")


class KVCacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The paged KV cache: sizes, prefix caching."""

    block_size: int = 16
    """Tokens per block; the chosen attention backend says which sizes it takes."""
    gpu_memory_utilization: float = 0.92
    """Share of the device's memory that weights, activations and KV cache may take together."""
    kv_cache_memory_bytes: int | None = None
    """Size of the pool in bytes; from measured free memory when unset (CPU: 512 MiB)."""
    num_gpu_blocks_override: int | None = None
    """Number of blocks, for tests and for reproducing a problem."""
    kv_cache_dtype: str = "auto"
    """auto (the model's dtype), float32, float16, bfloat16, fp8, fp8_e4m3 or fp8_e5m2, where the backend can."""
    calculate_kv_scales: bool = False
    """On a CPU, with a cache in fp8, find scales of keys and values from the first step's prompts, where the checkpoint has none."""
    enable_prefix_caching: bool = True
    """Keep full blocks findable, so that a prompt's known prefix is not computed again."""
    prefix_caching_hash_algo: str = "sha256"
    """sha256, sha256_cbor, xxhash or xxhash_cbor (the last two need the package xxhash)."""
    kv_cache_manager: str | None = None
    """Name of the KV-cache manager; the offered one with the highest priority when unset."""
    disable_hybrid_kv_cache_manager: bool = False
    """Treat every layer as full attention (more memory, simpler tables)."""
    kv_cache_metrics: bool = False
    """Sample block residency (lifetime, idle time, reuse gap)."""
    kv_cache_metrics_sample: float = 0.01
    """Share of blocks that are sampled."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size is {self.block_size}; use at least 1, such as 16.")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization is {self.gpu_memory_utilization}; use a share in (0, 1].")
        if self.num_gpu_blocks_override is not None and self.num_gpu_blocks_override < 2:
            raise ConfigError(
                f"num_gpu_blocks_override is {self.num_gpu_blocks_override}; use at least 2 (block 0 is never handed out)."
            )
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_bytes <= 0:
            raise ConfigError(f"kv_cache_memory_bytes is {self.kv_cache_memory_bytes}; use a positive number of bytes.")
        if self.kv_cache_dtype not in CACHE_DTYPES:
            raise ConfigError(f"kv_cache_dtype is {self.kv_cache_dtype!r}; use one of {', '.join(CACHE_DTYPES)}.")
        if self.prefix_caching_hash_algo not in HASH_ALGOS:
            raise ConfigError(
                f"prefix_caching_hash_algo is {self.prefix_caching_hash_algo!r}; use one of {', '.join(HASH_ALGOS)}."
            )
        if not 0.0 < self.kv_cache_metrics_sample <= 1.0:
            raise ConfigError(f"kv_cache_metrics_sample is {self.kv_cache_metrics_sample}; use a share in (0, 1].")
