"""The platform of GPUs that torch drives by `torch.cuda`: NVIDIA's, and AMD's in torch's HIP build, which answers to the same names."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pelton.config import CUDAGraphMode, EngineConfig
from pelton.errors import ConfigError
from pelton.platform.interface import Platform
from pelton_platforms.device.graphs.modes import requested_mode

if TYPE_CHECKING:
    import torch

    from pelton.graphs.recorder import GraphRecorder

LARGE_DEVICE_BYTES = 70 * 2**30
THROUGHPUT_DEVICE_BYTES = 120 * 2**30
GRAPHS_BYTES = 2**30
"""Of captured graphs themselves, up to some 230 sizes of steps: 38 more of Llama-3.1-8B's took the driver 110 MiB."""
MOST_GRAPH_POOL_BYTES = 2 * 2**30
"""Of what captured steps compute in: a step of 1,024 rows with logits over 150,000 ids, in float32 and in the model's dtype."""
LEAST_KV_CACHE_BYTES = 16 * 2**20


def ranks_per_device(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks share a device: PELTON_RANKS_PER_DEVICE, 1 where unset. More than one tests what several devices do, slowly."""
    given = environ.get("PELTON_RANKS_PER_DEVICE", "1")
    if not given.isdecimal() or not 1 <= int(given) <= 64:
        raise ConfigError(f"PELTON_RANKS_PER_DEVICE is {given!r}; use a number of ranks, 1 to 64.")
    return int(given)


class GPUPlatform(Platform):
    """A worker has one device and one stream, its own, which is current in its thread from `init_device` on: graphs cannot be
    captured on the default stream, and other threads' work on that one does not hold the step up.

    Memory is torch's caching allocator's. Weights are allocated in one phase, the KV pool as a few large buffers in
    another; what a step computes in between is given back to the driver after the profile run, and taken again behind
    them. So they lie in segments of their own: to sleep, drop the pool's tensors (or the model's) and call
    `torch.cuda.empty_cache()`; the driver has that memory back, and the other part stays where it is.
    The allocator's settings (such as `expandable_segments:True`) are the user's: nothing here depends on how segments are made.
    """

    default_dtype: ClassVar[str] = "bfloat16"
    supported_dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")
    supported_graph_modes: ClassVar[tuple[CUDAGraphMode, ...]] = tuple(CUDAGraphMode)
    driver_name: ClassVar[str]
    """"CUDA", in messages."""
    visible_devices: ClassVar[str]
    """The environment variable that says which devices are shown."""
    checker: ClassVar[str]
    """The command that shows whether the driver works."""

    def __init__(self, gpu: Any = None) -> None:
        """gpu: in place of `torch.cuda`."""
        self._given_gpu = gpu
        self._index = 0
        self._stream: Any = None
        self._debug_dump_path: str | None = None

    @property
    def gpu(self) -> Any:
        if self._given_gpu is not None:
            return self._given_gpu
        import torch

        return torch.cuda

    def built_for(self) -> str:
        """Return the driver's version that the installed torch was built with."""
        raise NotImplementedError

    @property
    def default_max_num_batched_tokens(self) -> int:  # type: ignore[override]
        """16,384 with 70 GiB of memory or more, else 8,192: a step long enough to fill the GPU, its activations small
        beside the weights of the models that fit."""
        return 16384 if self._is_large() else 8192

    @property
    def throughput_scale(self) -> int:  # type: ignore[override]
        """With 120 GiB of memory or more: experts have more rows each, and products fewer last rounds, so that prompts of Qwen3-30B-A3B are
        3 % faster. With less, what a step's activations and windows take would be missing to models that fit closely."""
        return 2 if self.total_memory() >= THROUGHPUT_DEVICE_BYTES else 1

    @property
    def default_max_num_seqs(self) -> int:  # type: ignore[override]
        return 1024 if self._is_large() else 256

    def device(self, local_rank: int) -> torch.device:
        import torch

        return torch.device("cuda", local_rank // ranks_per_device())

    def init_device(self, config: EngineConfig, local_rank: int) -> None:
        """Selects the device and makes the worker's stream current, in the calling thread. float32 products stay float32
        (no TF32) in the whole process: rounding inputs to 10 bits is not what a float32 model asks for."""
        import torch

        gpu = self.gpu
        self._debug_dump_path = config.compilation.debug_dump_path if self.dumps_graphs else None
        try:
            gpu.init()
        except RuntimeError as error:
            raise ConfigError(
                f"{self.driver_name} cannot be used here: {error}. This torch was built for {self.driver_name} {self.built_for()}; "
                f"check the driver with {self.checker}, or choose --device cpu."
            ) from error
        count, index = gpu.device_count(), self.device(local_rank).index
        if index >= count:
            raise ConfigError(
                f"Worker {local_rank} needs {self.driver_name} device {index}; {count} {'is' if count == 1 else 'are'} visible. "
                f"Lower the parallel sizes, or show more with {self.visible_devices}."
            )
        gpu.set_device(index)
        torch.set_float32_matmul_precision("highest")
        if self._stream is None or self._index != index:
            self._index = index
            self._stream = gpu.Stream(index)
        gpu.set_stream(self._stream)

    def measure_peak_bytes(self, run: Callable[[], None]) -> int | None:
        """Memory that torch takes from the driver for the largest step, gaps between tensors included. What it took goes
        back to the driver afterwards."""
        import torch

        gpu = self.gpu
        gc.collect()
        gc.freeze()  # what is left lives as long as the engine: `garbage.tune` need not look at it once more
        gpu.synchronize()
        gpu.empty_cache()
        gpu.reset_peak_memory_stats()
        held = gpu.memory_reserved()
        try:
            run()
            gpu.synchronize()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"The largest step does not fit in the GPU's memory beside the weights: {error} "
                "Lower max_num_batched_tokens or max_num_seqs."
            ) from error
        peak: int = gpu.max_memory_reserved() - held
        gpu.empty_cache()
        return max(peak, 0)

    def available_kv_cache_bytes(self, config: EngineConfig, *, weights_bytes: int, peak_activation_bytes: int) -> int:
        """The size that was set, or what `gpu_memory_utilization` of the device leaves beside all that is on it now (of
        other processes too), the largest step, and captured graphs."""
        free, total = self.gpu.mem_get_info(self._index)
        reserve = peak_activation_bytes + graph_bytes(config, peak_activation_bytes)
        kv_cache = config.kv_cache
        if kv_cache.kv_cache_memory_bytes is not None:
            if kv_cache.kv_cache_memory_bytes > free - reserve:
                raise ConfigError(
                    f"kv_cache_memory_bytes is {kv_cache.kv_cache_memory_bytes}; after weights, activations and graphs "
                    f"{max(free - reserve, 0)} bytes of the GPU's memory are left. Set it lower."
                )
            return kv_cache.kv_cache_memory_bytes
        room: int = int(total * kv_cache.gpu_memory_utilization) - (total - free) - reserve
        if room < LEAST_KV_CACHE_BYTES:
            raise ConfigError(
                f"GPU memory is full: gpu_memory_utilization {kv_cache.gpu_memory_utilization} of {_gib(total)} leaves "
                f"{_gib(max(room, 0))} for the KV cache; {_gib(total - free)} are in use ({_gib(weights_bytes)} of them this "
                f"model's weights), the largest step and graphs take {_gib(reserve)}. Raise gpu_memory_utilization, lower "
                "max_num_batched_tokens or max_num_seqs, stop what else uses the GPU, or use a smaller model."
            )
        return room

    def graph_recorder(self) -> GraphRecorder:
        from pelton_platforms.gpu.graphs import CUDAGraphRecorder

        return CUDAGraphRecorder(self._debug_dump_path)

    def synchronize(self) -> None:
        self.gpu.synchronize(self._index)

    def total_memory(self) -> int:
        """Bytes of the device's memory."""
        total: int = self.gpu.get_device_properties(self._index).total_memory
        return total

    def _is_large(self) -> bool:
        return self.total_memory() >= LARGE_DEVICE_BYTES


def graph_bytes(config: EngineConfig, peak_activation_bytes: int) -> int:
    """Kept free for captured graphs: their nodes, and the one pool that all of them compute in. No captured step is
    larger than the largest step."""
    if requested_mode(config.compilation) is CUDAGraphMode.NONE:
        return 0
    return GRAPHS_BYTES + min(peak_activation_bytes, MOST_GRAPH_POOL_BYTES)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
