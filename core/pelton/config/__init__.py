"""Settings: one frozen struct per owner, put together in `EngineConfig`."""

from pelton.config.attention import AttentionConfig
from pelton.config.compilation import CompilationConfig, CUDAGraphMode
from pelton.config.engine import AsyncEngineArgs, EngineArgs, EngineConfig
from pelton.config.kv_cache import KVCacheConfig
from pelton.config.kv_transfer import KVRole, KVTransferConfig
from pelton.config.lora import LoRAConfig
from pelton.config.model import LoadConfig, ModelConfig
from pelton.config.observability import ObservabilityConfig
from pelton.config.parallel import ParallelConfig
from pelton.config.scheduler import SchedulerConfig
from pelton.config.speculative import SpeculativeConfig
from pelton.config.structured_outputs import StructuredOutputsConfig

__all__ = [
    "AsyncEngineArgs", "AttentionConfig", "CUDAGraphMode", "CompilationConfig", "EngineArgs", "EngineConfig", "KVCacheConfig",
    "KVRole", "KVTransferConfig", "LoRAConfig", "LoadConfig", "ModelConfig", "ObservabilityConfig", "ParallelConfig",
    "SchedulerConfig", "SpeculativeConfig", "StructuredOutputsConfig",
]  # fmt: skip
