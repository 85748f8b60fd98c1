"""Is there an NVIDIA device, and can the installed torch use it? Answered from files: nothing imports torch, and the driver
is not initialised but for `total_memory` and `start_context`, so a process that only asks may fork later and pays milliseconds."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pelton_platforms.gpu.torch_build import torch_built_with

LIBRARY = "libcuda.so.1"
_DEVICE_FILES = ("dev/nvidia[0-9]*", "dev/dxg")  # the last one: Windows' subsystem for Linux


def why_not_here(
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    load: Callable[[str], object] = ctypes.CDLL,
) -> str | None:
    """The platform's probe: None when a device and its driver are here."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.split(",")[0].strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides every device"
    if not any(path for pattern in _DEVICE_FILES for path in root.glob(pattern)):
        if (root / "proc/driver/nvidia").exists():
            return "the NVIDIA driver is loaded, but no /dev/nvidia* is here (a container needs its GPUs passed in)"
        return "no NVIDIA device (no /dev/nvidia*, no /proc/driver/nvidia)"
    try:
        load(LIBRARY)
    except OSError as error:
        return f"an NVIDIA device is here, but not its driver's library: {error}"
    return None


def torch_cuda_version() -> str | None:
    """CUDA version that the installed torch was built with, such as "13.0"; None for a build without CUDA."""
    return torch_built_with("cuda")


def total_memory(index: int, load: Callable[[str], Any] = ctypes.CDLL) -> int | None:
    """Bytes of the device's memory, as the driver says, which this initialises; None where it says nothing."""
    device, total = ctypes.c_int(), ctypes.c_size_t()
    try:
        driver = load(LIBRARY)
        failed = (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(device), index)
            or driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
        )
    except (OSError, AttributeError):
        return None
    return None if failed else total.value


def start_context(index: int, load: Callable[[str], Any] = ctypes.CDLL) -> threading.Thread:
    """Have the driver make the context of the device that torch will use, on a thread, while this one imports torch. Where it
    cannot, torch says why."""

    def make() -> None:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        with contextlib.suppress(OSError, AttributeError):
            driver = load(LIBRARY)
            if not (driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index)):
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)

    thread = threading.Thread(target=make, name="pelton-cuda-context", daemon=True)
    thread.start()
    return thread


_AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ: cyclic, so that numbers may overflow."""


def stream_wait(
    current_stream: Callable[[], int], load: Callable[[str], Any] = ctypes.CDLL, machine: str | None = None
) -> Callable[[int, int], None] | None:
    """Return what lets a stream wait until the int32 at an address of pinned memory has reached a value; None where the driver has no
    such call, or a processor may show the number before what was written before it. current_stream: its handle.

    What is returned raises RuntimeError where the device refuses.
    """
    if (machine or platform.machine()) not in ("x86_64", "AMD64"):
        return None
    try:
        call = load(LIBRARY).cuStreamWaitValue32_v2
    except (OSError, AttributeError):
        return None
    call.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]

    def wait(address: int, value: int) -> None:
        failed = call(current_stream(), address, value, _AT_LEAST)
        if failed:
            raise RuntimeError(f"The CUDA driver refuses to let a stream wait for a number: error {failed}.")

    return wait
