"""The probe: what it answers from files, without torch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pelton_platforms.cuda import driver
from pelton_platforms.rocm.driver import torch_hip_version


def loads(name):
    return object()


def lacks(name):
    raise OSError(f"{name}: cannot open shared object file")


def no_load(name):
    raise AssertionError("loaded the driver's library without a device")


@pytest.mark.parametrize(
    "files, environ, load, answer",
    [
        pytest.param(["dev/nvidia0"], {}, loads, None, id="here"),
        pytest.param(["dev/nvidia3"], {"CUDA_VISIBLE_DEVICES": "0"}, loads, None, id="another-number"),
        pytest.param(["dev/dxg"], {}, loads, None, id="wsl"),
        pytest.param([], {}, no_load, "no NVIDIA device", id="nothing"),
        pytest.param(["dev/nvidia-caps"], {}, no_load, "no NVIDIA device", id="only-control-files"),
        pytest.param(["proc/driver/nvidia/version"], {}, no_load, "container", id="container-without-devices"),
        pytest.param(["dev/nvidia0"], {}, lacks, "not its driver's library: libcuda", id="no-library"),
        pytest.param(["dev/nvidia0"], {"CUDA_VISIBLE_DEVICES": ""}, no_load, "hides every device", id="hidden"),
        pytest.param(["dev/nvidia0"], {"CUDA_VISIBLE_DEVICES": "-1,0"}, no_load, "'-1,0'", id="hidden-by-minus-one"),
    ],
)
def test_probe(tmp_path, files, environ, load, answer):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    reason = driver.why_not_here(tmp_path, environ, load)
    assert reason is None if answer is None else answer in reason


def test_probe_imports_no_torch():
    code = "import sys; from pelton_platforms.cuda.plugin import pelton_platforms as p; p()[0].probe(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    "text, cuda, hip",
    [
        ("cuda: Optional[str] = '13.0'\nhip = None\n", "13.0", None),
        ('cuda = "12.8"\n', "12.8", None),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.43482-0f2d60242'\n", None, "6.4.43482-0f2d60242"),
        ("hip = '6.0'\n", None, "6.0"),
    ],
)
def test_what_torch_was_built_with_is_read_from_its_version_file(tmp_path, monkeypatch, text, cuda, hip):
    (tmp_path / "version.py").write_text(text)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert (driver.torch_cuda_version(), torch_hip_version()) == (cuda, hip)


def test_no_torch_has_no_cuda(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert driver.torch_cuda_version() is None


class Driver:
    """The functions of the library that `total_memory` and `start_context` call."""

    def __init__(self, status=0):
        self.cuInit = lambda flags: 0
        self.contexts = []

        def retain(context, device):
            self.contexts.append(device.value)
            return 0

        self.cuDevicePrimaryCtxRetain = retain

        def get(device, index):
            device._obj.value = 7 + index
            return 0

        def total(found, device):
            found._obj.value = 10**11 + device.value
            return status

        self.cuDeviceGet, self.cuDeviceTotalMem_v2 = get, total


def test_memory_is_what_the_driver_says_or_unknown():
    assert driver.total_memory(1, lambda name: Driver()) == 10**11 + 8
    assert driver.total_memory(1, lambda name: Driver(status=100)) is None
    assert driver.total_memory(1, lambda name: object()) is None, "a library without these functions"
    assert driver.total_memory(1, lacks) is None


@pytest.mark.parametrize("missing", [None, "cuInit", "cuDevicePrimaryCtxRetain"])
def test_a_context_is_made_on_a_thread_or_left_to_torch(missing):
    library = Driver()
    if missing is not None:
        delattr(library, missing)
    driver.start_context(1, lambda name: library).join()
    assert library.contexts == ([] if missing else [8])
    driver.start_context(1, lacks).join()
