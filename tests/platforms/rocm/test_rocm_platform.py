"""The ROCm platform with a made-up device: no test has run on one of AMD's."""

from types import SimpleNamespace

import pytest

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.platform.select import platform_statuses
from pelton.plugins import load_plugins
from pelton.worker.select import worker_class
from pelton_platforms.cuda.platform import CUDAPlatform
from pelton_platforms.gpu.platform import GPUPlatform
from pelton_platforms.rocm.driver import why_not_here
from pelton_platforms.rocm.platform import RocmPlatform

GIB = 2**30


class FakeGPU:
    """In place of `torch.cuda`: an MI300X, of which 100 GiB are free."""

    def __init__(self, count=1, error=None):
        self.calls, self.count, self.error = [], count, error

    def init(self):
        if self.error:
            raise RuntimeError(self.error)

    def device_count(self):
        return self.count

    def set_device(self, index):
        self.calls.append(("set_device", index))

    def Stream(self, index):
        return ("stream", index)

    def set_stream(self, stream):
        self.calls.append(("set_stream", stream))

    def synchronize(self, *index):
        self.calls.append(("synchronize", *index))

    def empty_cache(self):
        pass

    def reset_peak_memory_stats(self):
        pass

    def memory_reserved(self):
        return 10 * GIB

    def max_memory_reserved(self):
        return 13 * GIB

    def mem_get_info(self, index):
        return 100 * GIB, 192 * GIB

    def get_device_properties(self, index):
        return SimpleNamespace(name="AMD Instinct MI300X", total_memory=192 * GIB, gcnArchName="gfx942:sramecc+:xnack-")


@pytest.fixture
def gpu():
    return FakeGPU()


@pytest.fixture
def platform(gpu):
    return RocmPlatform(gpu, "6.4")


def config(**flat):
    return EngineConfig.from_flat(**flat)


def test_says_who_it_is(platform):
    assert platform.describe() == "rocm: AMD Instinct MI300X, 192.0 GiB, gfx942:sramecc+:xnack-"
    assert platform.capability() is None, "its numbers are not NVIDIA's"
    assert platform.device(1).type == "cuda" and platform.device(1).index == 1
    assert (platform.default_max_num_batched_tokens, platform.default_max_num_seqs) == (16384, 1024)


def test_the_device_and_a_stream_of_its_own_are_selected(platform, gpu):
    platform.init_device(config(), 0)
    platform.init_device(config(), 0)
    assert gpu.calls == [("set_device", 0), ("set_stream", ("stream", 0))] * 2
    platform.synchronize()
    assert gpu.calls[-1] == ("synchronize", 0)


def test_what_cannot_be_used_says_what_to_check():
    with pytest.raises(
        ConfigError, match=r"ROCm cannot be used here: no device\. This torch was built for ROCm 6\.4; .*rocm-smi"
    ):
        RocmPlatform(FakeGPU(error="no device"), "6.4").init_device(config(), 0)
    with pytest.raises(ConfigError, match=r"needs ROCm device 1; 1 is visible.*HIP_VISIBLE_DEVICES"):
        RocmPlatform(FakeGPU(), "6.4").init_device(config(), 1)
    with pytest.raises(ConfigError, match="built without ROCm"):
        RocmPlatform(FakeGPU())


def test_memory_is_reckoned_as_on_nvidias(platform):
    assert platform.measure_peak_bytes(lambda: None) == 3 * GIB
    room = platform.available_kv_cache_bytes(
        config(gpu_memory_utilization=0.9, enforce_eager=True), weights_bytes=GIB, peak_activation_bytes=2 * GIB
    )
    assert room == int(192 * GIB * 0.9) - 92 * GIB - 2 * GIB
    with pytest.raises(ConfigError, match=str(2**60)):
        platform.available_kv_cache_bytes(config(kv_cache_memory_bytes=2**60), weights_bytes=0, peak_activation_bytes=0)


def test_nothing_is_compiled_ahead_of_the_first_launch(platform):
    assert platform.compile_ahead(lambda: pytest.fail("not run")) == 0
    assert not platform.compile_soon(lambda: pytest.fail("not run"))


@pytest.mark.parametrize(
    "files, environ, version, why",
    [
        (["kfd"], {}, "6.4", None),
        ([], {}, "6.4", "no AMD device"),
        (["kfd"], {}, None, "built without ROCm"),
        (["kfd"], {"HIP_VISIBLE_DEVICES": "-1"}, "6.4", "HIP_VISIBLE_DEVICES is '-1', which hides every device"),
        (["kfd"], {"ROCR_VISIBLE_DEVICES": ""}, "6.4", "ROCR_VISIBLE_DEVICES is '', which hides every device"),
        (["kfd"], {"HIP_VISIBLE_DEVICES": "1"}, "6.4", None),
    ],
)
def test_the_probe_says_why_not(tmp_path, files, environ, version, why):
    (tmp_path / "dev").mkdir()
    for name in files:
        (tmp_path / "dev" / name).touch()
    found = why_not_here(tmp_path, environ, lambda: version)
    assert found is None if why is None else why in found


def test_it_is_offered_and_has_the_common_worker(platform):
    plugins = load_plugins(only=[])
    assert "rocm" in {status.name for status in platform_statuses(plugins)}
    assert worker_class(platform, plugins) is worker_class_of_cpu(plugins)
    assert issubclass(RocmPlatform, GPUPlatform) and issubclass(CUDAPlatform, GPUPlatform)


def worker_class_of_cpu(plugins):
    from pelton_platforms.cpu.platform import CPUPlatform

    return worker_class(CPUPlatform(), plugins)


def test_portable_kernels_are_offered_and_those_of_one_vendor_are_not():
    plugins = load_plugins(only=[])
    names = [
        {entry.name for entry in plugins.entries("pelton_attention_backends", device_type=name)}
        for name in ("rocm", "cuda")
    ]
    assert names[1] - names[0] == {"flash_attn", "flashinfer"} and names[0] >= {"triton", "triton_mla", "sdpa"}
    ops, nvidias = (
        {entry.name for entry in plugins.entries("pelton_ops", device_type=name) if "triton" in entry.name}
        for name in ("rocm", "cuda")
    )
    assert (
        {"triton.add_norm", "triton_gemv.linear", "triton.qk_norm_rope_write_kv", "triton.prepare_inputs"}
        <= ops
        < nvidias
    )
    assert not {name for name in ops if "fp8" in name or name in ("triton.sample", "triton.logprobs", "triton.verify")}
