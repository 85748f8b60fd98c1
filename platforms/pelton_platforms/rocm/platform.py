"""The ROCm platform: what AMD GPUs have beside `GPUPlatform`. Tensors are on torch's device "cuda" there too."""

from __future__ import annotations

from typing import Any, ClassVar

from pelton.errors import ConfigError
from pelton_platforms.gpu.platform import GPUPlatform
from pelton_platforms.rocm.driver import torch_hip_version


class RocmPlatform(GPUPlatform):
    """One AMD GPU a worker. Kernels are compiled when they are first launched; a second start finds them in Triton's cache.

    It has no compute capability: the numbers that torch gives for one are those of AMD's architectures.
    """

    name: ClassVar[str] = "rocm"
    device_type: ClassVar[str] = "rocm"
    driver_name: ClassVar[str] = "ROCm"
    visible_devices: ClassVar[str] = "HIP_VISIBLE_DEVICES"
    checker: ClassVar[str] = "rocm-smi"

    def __init__(self, gpu: Any = None, hip_version: str | None = None) -> None:
        super().__init__(gpu)
        self._hip_version = hip_version or torch_hip_version()
        if self._hip_version is None:
            raise ConfigError(
                "An AMD device is here, but the installed torch was built without ROCm. Install torch's build for ROCm, "
                "or choose --device cpu."
            )

    def built_for(self) -> str:
        return str(self._hip_version)

    def describe(self, local_rank: int = 0) -> str:
        properties = self.gpu.get_device_properties(self.device(local_rank))
        memory = properties.total_memory / 2**30
        return f"rocm: {properties.name}, {memory:.1f} GiB, {properties.gcnArchName}"
