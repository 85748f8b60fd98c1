"""The CUDA platform: what NVIDIA GPUs have beside `GPUPlatform`, kernels compiled by several processes at a first start."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.utils.cache_folder import cache_folder
from pelton_platforms.cuda.compile_client import CompileServer, num_compilers
from pelton_platforms.cuda.driver import start_context, stream_wait, torch_cuda_version, total_memory
from pelton_platforms.gpu.platform import GPUPlatform, ranks_per_device

if TYPE_CHECKING:
    from pelton_platforms.cuda.compiler import FirstStart


class CUDAPlatform(GPUPlatform):
    """One NVIDIA GPU a worker. `PYTORCH_CUDA_ALLOC_CONF` is the user's."""

    name: ClassVar[str] = "cuda"
    device_type: ClassVar[str] = "cuda"
    dumps_graphs: ClassVar[bool] = True
    driver_name: ClassVar[str] = "CUDA"
    visible_devices: ClassVar[str] = "CUDA_VISIBLE_DEVICES"
    checker: ClassVar[str] = "nvidia-smi"

    def __init__(self) -> None:
        super().__init__()
        if torch_cuda_version() is None:
            raise ConfigError(
                "An NVIDIA device is here, but the installed torch was built without CUDA. Install torch with CUDA "
                "(on Linux, `pip install torch` from the default index has it), or choose --device cpu."
            )
        self._is_prepared = False
        self._server: CompileServer | None = None  # until `_first_start` has it
        self._first_start: FirstStart | None = None
        self._marker: Path | None = None  # to be written by a first start

    def built_for(self) -> str:
        return str(torch_cuda_version())

    def init_device(self, config: EngineConfig, local_rank: int) -> None:
        self.prepare(config)
        server, self._server = self._server, None
        try:
            super().init_device(config, local_rank)
        except BaseException:
            if server is not None:
                server.close()
            raise
        if server is not None:
            from pelton_platforms.cuda.compiler import FirstStart

            self._first_start = FirstStart(server, self._index)

    def prepare(self, config: EngineConfig) -> None:
        """The device's context is made beside the imports, where they come yet and the device is known. At a first start processes
        that compile come up, too. Called again it does nothing: sizes that are found since would name another start."""
        if self._is_prepared:
            return
        self._is_prepared = True
        parallel = config.parallel
        if "torch" not in sys.modules and parallel.num_ranks == 1 and not parallel.has_several_engines:
            start_context(self._index)
        marker = _marker(_set_triton_cache(), config)
        if not marker.exists() and importlib.util.find_spec("triton") is not None:
            self._marker = marker
            self._server = CompileServer(num_compilers())

    def begin_device(self, local_rank: int) -> None:
        if "torch" not in sys.modules:
            start_context(local_rank // ranks_per_device())

    def describe(self, local_rank: int = 0) -> str:
        import torch

        properties = torch.cuda.get_device_properties(self.device(local_rank))
        memory = properties.total_memory / 2**30
        return f"cuda: {properties.name}, {memory:.1f} GiB, capability {properties.major}.{properties.minor}"

    def stream_wait(self) -> Callable[[int, int], None] | None:
        return stream_wait(lambda: int(self.gpu.current_stream().cuda_stream))

    def capability(self, local_rank: int = 0) -> tuple[int, int] | None:
        import torch

        major, minor = torch.cuda.get_device_capability(self.device(local_rank))
        return major, minor

    def compile_ahead(self, run: Callable[[], None]) -> int:
        try:
            from pelton_platforms.cuda.compiler import compile_ahead
        except (ImportError, AttributeError):  # no Triton, or one that compiles in another way
            return 0
        import torch

        num_compiled = compile_ahead(run, self._index, self._first_start)
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

    def total_memory(self) -> int:
        """Asked before a start's `prepare`, which shall not wait for torch; the driver comes up meanwhile, in 0.2 s."""
        if "torch" in sys.modules:
            return super().total_memory()
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(total_memory, self._index)
            import numpy  # noqa: F401 - torch will
        total = asked.result()
        return super().total_memory() if total is None else total


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
