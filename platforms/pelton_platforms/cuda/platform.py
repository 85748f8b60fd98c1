"""The CUDA platform: one GPU a worker, its stream, its memory."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pelton.config import CUDAGraphMode, EngineConfig
from pelton.errors import ConfigError
from pelton.platform.interface import Platform
from pelton.utils.cache_folder import cache_folder
from pelton_platforms.cuda.compile_client import CompileServer, num_compilers
from pelton_platforms.cuda.driver import torch_cuda_version, total_memory
from pelton_platforms.device.graphs.modes import requested_mode

if TYPE_CHECKING:
    import torch

    from pelton.graphs.recorder import GraphRecorder
    from pelton_platforms.cuda.compiler import FirstStart

LARGE_DEVICE_BYTES = 70 * 2**30
GRAPHS_BYTES = 2**30
"""Of captured graphs themselves, up to some 230 sizes of steps: 38 more of Llama-3.1-8B's took the driver 110 MiB."""
MOST_GRAPH_POOL_BYTES = 2 * 2**30
"""Of what captured steps compute in: a step of 1,024 rows with logits over 150,000 ids, in float32 and in the model's dtype."""
LEAST_KV_CACHE_BYTES = 16 * 2**20


class CUDAPlatform(Platform):
    """A worker has one device and one stream, its own, which is current in its thread from `init_device` on: graphs cannot be
    captured on the default stream, and other threads' work on that one does not hold the step up.

    Memory is torch's caching allocator's. Weights are allocated in one phase, the KV pool as a few large buffers in
    another; what a step computes in between is given back to the driver after the profile run, and taken again behind
    them. So they lie in segments of their own: to sleep, drop the pool's tensors (or the model's) and call
    `torch.cuda.empty_cache()`; the driver has that memory back, and the other part stays where it is.
    `PYTORCH_CUDA_ALLOC_CONF` (such as `expandable_segments:True`) is the user's: nothing here depends on how segments are made.
    """

    name: ClassVar[str] = "cuda"
    device_type: ClassVar[str] = "cuda"
    default_dtype: ClassVar[str] = "bfloat16"
    supported_dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")
    supported_graph_modes: ClassVar[tuple[CUDAGraphMode, ...]] = tuple(CUDAGraphMode)
    dumps_graphs: ClassVar[bool] = True

    def __init__(self) -> None:
        if torch_cuda_version() is None:
            raise ConfigError(
                "An NVIDIA device is here, but the installed torch was built without CUDA. Install torch with CUDA "
                "(on Linux, `pip install torch` from the default index has it), or choose --device cpu."
            )
        self._local_rank = 0
        self._stream: torch.cuda.Stream | None = None
        self._debug_dump_path: str | None = None
        self._server: CompileServer | None = None  # until `_first_start` has it
        self._first_start: FirstStart | None = None
        self._marker: Path | None = None  # to be written by a first start

    @property
    def default_max_num_batched_tokens(self) -> int:  # type: ignore[override]
        """16,384 with 70 GiB of memory or more, else 8,192: a step long enough to fill the GPU, its activations small
        beside the weights of the models that fit."""
        return 16384 if self._is_large() else 8192

    @property
    def default_max_num_seqs(self) -> int:  # type: ignore[override]
        return 1024 if self._is_large() else 256

    def device(self, local_rank: int) -> torch.device:
        import torch

        return torch.device("cuda", local_rank)

    def init_device(self, config: EngineConfig, local_rank: int) -> None:
        """Selects the device and makes the worker's stream current, in the calling thread. float32 products stay float32
        (no TF32) in the whole process: rounding inputs to 10 bits is not what a float32 model asks for."""
        self.prepare(config)
        server, self._server = self._server, None
        try:
            self._init_cuda(config, local_rank)
        except BaseException:
            if server is not None:
                server.close()
            raise
        if server is not None:
            from pelton_platforms.cuda.compiler import FirstStart

            self._first_start = FirstStart(server, local_rank)

    def prepare(self, config: EngineConfig) -> None:
        """At a first start processes that compile come up, beside the imports and the driver's start of this one."""
        marker = _marker(_set_triton_cache(), config)
        is_prepared = self._server is not None or self._first_start is not None
        if not is_prepared and not marker.exists() and importlib.util.find_spec("triton") is not None:
            self._marker = marker
            self._server = CompileServer(num_compilers())

    def _init_cuda(self, config: EngineConfig, local_rank: int) -> None:
        import torch

        self._debug_dump_path = config.compilation.debug_dump_path
        try:
            torch.cuda.init()
        except RuntimeError as error:
            raise ConfigError(
                f"CUDA cannot be used here: {error}. This torch was built for CUDA {torch_cuda_version()}; check the driver "
                "with nvidia-smi, or choose --device cpu."
            ) from error
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise ConfigError(
                f"Worker {local_rank} needs CUDA device {local_rank}; {count} {'is' if count == 1 else 'are'} visible. "
                "Lower the parallel sizes, or show more with CUDA_VISIBLE_DEVICES."
            )
        torch.cuda.set_device(local_rank)
        torch.set_float32_matmul_precision("highest")
        if self._stream is None or self._local_rank != local_rank:
            self._local_rank = local_rank
            self._stream = torch.cuda.Stream(local_rank)
        torch.cuda.set_stream(self._stream)

    def describe(self, local_rank: int = 0) -> str:
        import torch

        properties = torch.cuda.get_device_properties(local_rank)
        memory = properties.total_memory / 2**30
        return f"cuda: {properties.name}, {memory:.1f} GiB, capability {properties.major}.{properties.minor}"

    def capability(self, local_rank: int = 0) -> tuple[int, int] | None:
        import torch

        major, minor = torch.cuda.get_device_capability(local_rank)
        return major, minor

    def measure_peak_bytes(self, run: Callable[[], None]) -> int | None:
        """Memory that torch takes from the driver for the largest step, gaps between tensors included. What it took goes
        back to the driver afterwards."""
        import torch

        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_reserved()
        try:
            run()
            torch.cuda.synchronize()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"The largest step does not fit in the GPU's memory beside the weights: {error} "
                "Lower max_num_batched_tokens or max_num_seqs."
            ) from error
        peak: int = torch.cuda.max_memory_reserved() - held
        torch.cuda.empty_cache()
        return max(peak, 0)

    def available_kv_cache_bytes(self, config: EngineConfig, *, weights_bytes: int, peak_activation_bytes: int) -> int:
        """The size that was set, or what `gpu_memory_utilization` of the device leaves beside all that is on it now (of
        other processes too), the largest step, and captured graphs."""
        import torch

        free, total = torch.cuda.mem_get_info(self._local_rank)
        reserve = peak_activation_bytes + graph_bytes(config, peak_activation_bytes)
        kv_cache = config.kv_cache
        if kv_cache.kv_cache_memory_bytes is not None:
            if kv_cache.kv_cache_memory_bytes > free - reserve:
                raise ConfigError(
                    f"kv_cache_memory_bytes is {kv_cache.kv_cache_memory_bytes}; after weights, activations and graphs "
                    f"{max(free - reserve, 0)} bytes of the GPU's memory are left. Set it lower."
                )
            return kv_cache.kv_cache_memory_bytes
        room = int(total * kv_cache.gpu_memory_utilization) - (total - free) - reserve
        if room < LEAST_KV_CACHE_BYTES:
            raise ConfigError(
                f"GPU memory is full: gpu_memory_utilization {kv_cache.gpu_memory_utilization} of {_gib(total)} leaves "
                f"{_gib(max(room, 0))} for the KV cache; {_gib(total - free)} are in use ({_gib(weights_bytes)} of them this "
                f"model's weights), the largest step and graphs take {_gib(reserve)}. Raise gpu_memory_utilization, lower "
                "max_num_batched_tokens or max_num_seqs, stop what else uses the GPU, or use a smaller model."
            )
        return room

    def compile_ahead(self, run: Callable[[], None]) -> int:
        try:
            from pelton_platforms.cuda.compiler import compile_ahead
        except (ImportError, AttributeError):  # no Triton, or one that compiles in another way
            return 0
        import torch

        num_compiled = compile_ahead(run, self._local_rank, self._first_start)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # of the largest steps: the KV cache was planned without what they leave
        return num_compiled

    def compile_soon(self, run: Callable[[], None]) -> bool:
        if self._first_start is None:
            return False
        import torch

        self._first_start.compile_soon(run)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # weights come next: nothing shall lie between them
        return True

    def worker_ready(self) -> None:
        if self._first_start is not None and self._marker is not None:
            self._first_start.close()
            self._first_start = None
            with contextlib.suppress(OSError):  # then the next start looks whether there is something to compile
                self._marker.touch()

    def graph_recorder(self) -> GraphRecorder:
        from pelton_platforms.cuda.graphs import CUDAGraphRecorder

        return CUDAGraphRecorder(self._debug_dump_path)

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize(self._local_rank)

    def _is_large(self) -> bool:
        """Asked before a start's `prepare`, which shall not wait for torch."""
        total = None if "torch" in sys.modules else total_memory(self._local_rank)
        if total is None:
            import torch

            total = torch.cuda.get_device_properties(self._local_rank).total_memory
        return total >= LARGE_DEVICE_BYTES


def graph_bytes(config: EngineConfig, peak_activation_bytes: int) -> int:
    """Kept free for captured graphs: their nodes, and the one pool that all of them compute in. No captured step is
    larger than the largest step."""
    if requested_mode(config.compilation) is CUDAGraphMode.NONE:
        return 0
    return GRAPHS_BYTES + min(peak_activation_bytes, MOST_GRAPH_POOL_BYTES)


def _set_triton_cache() -> Path:
    """Kernels compiled once are found by the next start, under a key that Triton makes of source, options and device.
    Where the user chose a folder, that one. Read by Triton when it compiles, so set before."""
    if not os.environ.get("TRITON_CACHE_DIR") and not os.environ.get("TRITON_HOME"):
        os.environ["TRITON_CACHE_DIR"] = str(cache_folder("triton"))
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(os.environ["TRITON_HOME"], ".triton", "cache"))


def _marker(folder: Path, config: EngineConfig) -> Path:
    """A file among the compiled kernels that says that a start with these settings has been there. Where it is missing, most
    kernels probably are."""
    versions = []
    for name in ("pelton", "torch", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    digest = hashlib.sha256(repr((config, versions)).encode())
    return folder / f"pelton-{digest.hexdigest()[:24]}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
