"""The CUDA platform: its arithmetic with a made-up device anywhere, conformance and memory on a real one."""

from __future__ import annotations

import gc
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from pelton.config import CUDAGraphMode, EngineConfig
from pelton.errors import ConfigError
from pelton.testing.platform import PlatformConformance
from pelton_platforms.cuda import compiler
from pelton_platforms.cuda import platform as cuda
from pelton_platforms.cuda.platform import CUDAPlatform
from pelton_platforms.gpu import platform as gpu
from pelton_platforms.gpu.graphs import CUDAGraphRecorder

GIB = 2**30
PEAK = 3 * GIB


@pytest.fixture
def fake(monkeypatch):
    """A device of 100 GiB, 60 free, that torch's functions tell of."""
    device = SimpleNamespace(
        free=60 * GIB, total=100 * GIB, reserved=10 * GIB, peak=10 * GIB, calls=[], servers=[], count=1, init_error=None
    )

    def init():
        if device.init_error:
            raise RuntimeError(device.init_error)

    def call(name):
        return lambda *args: device.calls.append((name, *args))

    functions = {
        "init": init,
        "device_count": lambda: device.count,
        "mem_get_info": lambda index: (device.free, device.total),
        "memory_reserved": lambda: device.reserved,
        "max_memory_reserved": lambda: device.peak,
        "get_device_properties": lambda index: SimpleNamespace(
            name="Fake", total_memory=device.total, major=9, minor=0
        ),
        "Stream": lambda index: ("stream", index),
        **{n: call(n) for n in ("set_device", "set_stream", "synchronize", "empty_cache", "reset_peak_memory_stats")},
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(cuda, "torch_cuda_version", lambda: "13.0")
    monkeypatch.setattr(cuda, "CompileServer", lambda count: FakeServer(device.servers))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/chosen")
    return device


class FakeServer:
    num_processes = 2

    def __init__(self, servers):
        self.is_open = True
        servers.append(self)

    def close(self):
        self.is_open = False


def kv_bytes(**flat) -> int:
    config = EngineConfig.from_flat(**flat)
    return CUDAPlatform().available_kv_cache_bytes(config, weights_bytes=GIB, peak_activation_bytes=PEAK)


def test_torch_without_cuda_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(cuda, "torch_cuda_version", lambda: None)
    with pytest.raises(ConfigError, match=r"built without CUDA.* Install torch with CUDA"):
        CUDAPlatform()


@pytest.mark.parametrize(
    "total, tokens, seqs", [(140 * GIB, 16384, 1024), (70 * GIB, 16384, 1024), (70 * GIB - 1, 8192, 256)]
)
def test_default_sizes_go_by_memory(fake, total, tokens, seqs):
    fake.total = total
    platform = CUDAPlatform()
    assert (platform.default_max_num_batched_tokens, platform.default_max_num_seqs) == (tokens, seqs)
    assert platform.throughput_scale == (2 if total == 140 * GIB else 1)


def test_selecting_sets_device_stream_and_precision(fake):
    torch.set_float32_matmul_precision("high")
    try:
        platform = CUDAPlatform()
        platform.init_device(EngineConfig(), 0)
        assert fake.calls == [("set_device", 0), ("set_stream", ("stream", 0))]
        assert torch.get_float32_matmul_precision() == "highest"
        stream = fake.calls[-1][1]
        platform.init_device(EngineConfig(), 0)
        assert fake.calls[-1][1] is stream
    finally:
        torch.set_float32_matmul_precision("highest")
    assert platform.describe(0) == "cuda: Fake, 100.0 GiB, capability 9.0"
    assert platform.device(2) == torch.device("cuda", 2)


def test_a_driver_that_does_not_start_is_the_operators_error(fake):
    fake.init_error = "driver too old (found version 11040)"
    with pytest.raises(ConfigError, match=r"driver too old.*built for CUDA 13.0.*--device cpu"):
        CUDAPlatform().init_device(EngineConfig(), 0)


def test_a_rank_without_a_device_is_the_operators_error(fake):
    with pytest.raises(ConfigError, match="needs CUDA device 1; 1 is visible"):
        CUDAPlatform().init_device(EngineConfig(), 1)


def test_kernels_are_compiled_ahead_and_what_steps_took_is_given_back(fake, monkeypatch):
    monkeypatch.setattr(compiler, "compile_ahead", lambda run, rank, first: fake.calls.append(("ran", run())) or 3)
    assert CUDAPlatform().compile_ahead(lambda: "all steps") == 3
    assert fake.calls == [("ran", "all steps"), ("synchronize",), ("empty_cache",)]


def test_a_first_start_has_compilers_until_the_worker_is_ready_and_a_second_one_none(fake, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    config, other = EngineConfig(), EngineConfig.from_flat(max_num_seqs=7)
    ran = []
    platform = CUDAPlatform()
    for _ in range(2):
        platform.init_device(config, 0)
    assert platform.compile_soon(lambda: ran.append("early")) and ran == ["early"]
    assert [server.is_open for server in fake.servers] == [True]
    platform.worker_ready()
    assert not fake.servers[0].is_open
    second = CUDAPlatform()
    second.init_device(config, 0)
    assert not second.compile_soon(lambda: ran.append("again")) and ran == ["early"]
    CUDAPlatform().init_device(other, 0)
    assert len(fake.servers) == 2, "other settings have kernels of their own"


def test_compilers_come_up_before_the_device_where_the_executor_lets_them(fake, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    platform = CUDAPlatform()
    for _ in range(2):
        platform.prepare(EngineConfig())
    assert len(fake.servers) == 1 and fake.calls == []
    platform.init_device(EngineConfig(), 0)
    assert platform.compile_soon(lambda: None) and len(fake.servers) == 1


def test_sizes_that_are_found_later_make_no_other_first_start(fake, monkeypatch, tmp_path):
    """A rank prepares itself before they are found."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for is_first in (True, False):
        platform = CUDAPlatform()
        platform.prepare(EngineConfig.from_flat(tensor_parallel_size=2))
        platform.init_device(EngineConfig.from_flat(tensor_parallel_size=2, max_num_seqs=7), 0)
        assert platform.compile_soon(lambda: None) == is_first
        platform.worker_ready()
    assert len(fake.servers) == 1


def test_default_sizes_are_known_without_torch(fake, monkeypatch):
    monkeypatch.setattr(cuda, "total_memory", lambda index: 80 * GIB)
    monkeypatch.delitem(sys.modules, "torch")
    fake.total = 1
    assert CUDAPlatform().default_max_num_seqs == 1024


@pytest.mark.parametrize(
    "settings, imported, started", [({}, False, [0]), ({}, True, []), ({"tensor_parallel_size": 2}, False, [])]
)
def test_a_context_is_made_while_torch_is_imported_where_its_device_is_known(
    fake, monkeypatch, settings, imported, started
):
    found = []
    monkeypatch.setattr(cuda, "start_context", found.append)
    if not imported:
        monkeypatch.delitem(sys.modules, "torch")
    CUDAPlatform().prepare(EngineConfig.from_flat(**settings))
    assert found == started


@pytest.mark.parametrize("imported, a_device, started", [(False, 1, [3]), (False, 2, [1]), (True, 1, [])])
def test_a_rank_s_context_is_made_before_its_model_is_known(fake, monkeypatch, imported, a_device, started):
    found = []
    monkeypatch.setattr(cuda, "start_context", found.append)
    monkeypatch.setenv("PELTON_RANKS_PER_DEVICE", str(a_device))
    if not imported:
        monkeypatch.delitem(sys.modules, "torch")
    CUDAPlatform().begin_device(3)
    assert found == started


def test_a_device_that_fails_leaves_no_compilers(fake, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    fake.init_error = "no driver"
    with pytest.raises(ConfigError, match="no driver"):
        CUDAPlatform().init_device(EngineConfig(), 0)
    assert [server.is_open for server in fake.servers] == [False]


def test_without_triton_nothing_is_compiled_ahead(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "pelton_platforms.cuda.compiler", None)
    assert CUDAPlatform().compile_ahead(lambda: pytest.fail("it was run")) == 0 and fake.calls == []


def test_pool_is_what_the_rest_leaves(fake):
    in_use, graphs = 40 * GIB, gpu.GRAPHS_BYTES + gpu.MOST_GRAPH_POOL_BYTES
    assert kv_bytes(gpu_memory_utilization=0.75) == 75 * GIB - in_use - PEAK - graphs
    assert kv_bytes(gpu_memory_utilization=0.75, enforce_eager=True) == 75 * GIB - in_use - PEAK
    assert kv_bytes(gpu_memory_utilization=0.5, cudagraph_mode="NONE") == 50 * GIB - in_use - PEAK
    assert kv_bytes(gpu_memory_utilization=0.5, compilation_config={"level": 0}) == 50 * GIB - in_use - PEAK


@pytest.mark.parametrize(
    "flat, peak, expected",
    [
        ({}, GIB, gpu.GRAPHS_BYTES + GIB),
        ({"compilation_config": {"level": 1}}, 9 * GIB, gpu.GRAPHS_BYTES + gpu.MOST_GRAPH_POOL_BYTES),
        ({"compilation_config": {"level": 0}}, GIB, 0),
        ({"compilation_config": {"level": 0, "cudagraph_mode": "FULL"}}, GIB, gpu.GRAPHS_BYTES + GIB),
        ({"enforce_eager": True, "cudagraph_mode": "FULL"}, GIB, 0),
    ],
)
def test_memory_kept_for_graphs(flat, peak, expected):
    assert gpu.graph_bytes(EngineConfig.from_flat(**flat), peak) == expected


def test_pool_of_a_set_size_may_use_what_is_free(fake):
    assert kv_bytes(kv_cache_memory_bytes=50 * GIB, gpu_memory_utilization=0.1) == 50 * GIB
    with pytest.raises(ConfigError, match=f"kv_cache_memory_bytes is {60 * GIB}.* {54 * GIB} bytes"):
        kv_bytes(kv_cache_memory_bytes=60 * GIB)


def test_full_gpu_is_an_error_with_what_to_do(fake):
    with pytest.raises(
        ConfigError, match=r"0.4 of 100.00 GiB leaves 0.00 GiB.*40.00 GiB are in use \(1.00 GiB.*Raise gpu_memory_util"
    ):
        kv_bytes(gpu_memory_utilization=0.4)


def test_peak_is_what_the_step_takes_from_the_driver(fake):
    def step():
        fake.peak = 12 * GIB
        fake.calls.append("step")

    assert CUDAPlatform().measure_peak_bytes(step) == 2 * GIB
    order = [name if isinstance(name, str) else name[0] for name in fake.calls]
    assert order == ["synchronize", "empty_cache", "reset_peak_memory_stats", "step", "synchronize", "empty_cache"]


def test_a_step_that_does_not_fit_is_the_operators_error(fake):
    def step():
        raise torch.OutOfMemoryError("Tried to allocate 90.00 GiB.")

    with pytest.raises(ConfigError, match=r"largest step.*90.00 GiB.*Lower max_num_batched_tokens"):
        CUDAPlatform().measure_peak_bytes(step)


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "TRITON_HOME"])
def test_the_users_folder_for_kernels_is_kept(fake, monkeypatch, name):
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv(name, "/mine")
    CUDAPlatform().init_device(EngineConfig(), 0)
    assert os.environ.get("TRITON_CACHE_DIR") == ("/mine" if name == "TRITON_CACHE_DIR" else None)


def test_kernels_are_kept_in_peltons_folder_else(fake, monkeypatch, tmp_path):
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.setenv(name, "")  # so that it is put back as it was
    monkeypatch.setattr(cuda, "cache_folder", lambda owner: tmp_path / owner)
    CUDAPlatform().init_device(EngineConfig(), 0)
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")


def test_every_graph_mode_is_offered():
    assert set(CUDAPlatform.supported_graph_modes) == set(CUDAGraphMode)


@pytest.mark.gpu
class TestConformance(PlatformConformance):
    platform_class = CUDAPlatform


@pytest.fixture
def real():
    platform = CUDAPlatform()
    before = torch.cuda.current_stream()
    platform.init_device(EngineConfig(), 0)
    yield platform
    torch.cuda.set_stream(before)


@pytest.mark.gpu
def test_work_goes_to_a_stream_of_its_own(real):
    assert torch.cuda.current_stream() != torch.cuda.default_stream()
    x = torch.ones(8, device="cuda")
    recorder = real.graph_recorder()
    recorder.begin()  # refused on the default stream
    y = x * 2
    first = recorder.end()
    recorder.begin()
    z = y + 1
    second = recorder.end()
    for value in (1.0, 5.0):
        x.fill_(value)
        first.replay()
        second.replay()
        assert z.tolist() == [2 * value + 1] * 8


@pytest.mark.gpu
def test_what_captures_hand_on_keeps_no_memory(real):
    """Three layers of two sizes, cut at attention: all their rows lie in the memory of the largest."""
    recorder, x = real.graph_recorder(), torch.ones(4 * 2**20, device="cuda")
    graphs, kept = [], []
    held = torch.cuda.memory_allocated()
    for size in (2**20, 4 * 2**20):
        hidden = x[:size]
        for _ in range(3):
            recorder.begin()
            rows = hidden + 1
            graphs.append(recorder.end())
            assert rows.stride() == (1,)
            kept.append(recorder.unowned(rows))
            hidden = rows
        del rows, hidden
    assert torch.cuda.memory_allocated() < held + 2**20  # all of it is free for the next capture
    assert len({tensor.data_ptr() for tensor in kept}) < 6
    for value in (0.0, 5.0):
        x.fill_(value)
        for index, (graph, tensor) in enumerate(zip(graphs, kept, strict=True)):
            graph.replay()
            assert bool((tensor == value + index % 3 + 1).all())
    strided = torch.arange(24, dtype=torch.bfloat16, device="cuda").view(4, 6)[1:, ::2]
    assert torch.equal(recorder.unowned(strided), strided)
    assert recorder.unowned(strided).stride() == (6, 2) and recorder.unowned(x[:0]).shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("has_room", [False, True])
def test_captures_of_growing_steps_share_the_room_that_was_made(real, has_room):
    recorder, graphs = real.graph_recorder(), []

    def capture(num_bytes):
        recorder.begin()
        memory = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        memory[:1].zero_()
        del memory
        graphs.append(recorder.end())

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    if has_room:
        capture(320 * 2**20)
    for size in (20, 40, 80, 160, 320):
        capture(size * 2**20)
    taken = (torch.cuda.memory_reserved() - before) // 2**20
    assert taken <= 324 if has_room else taken >= 600


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_next_one_well(real):
    x = torch.ones(8, device="cuda")
    recorder = real.graph_recorder()
    recorder.begin()
    with pytest.raises(RuntimeError):
        x.sum().item()  # waits for the device: not in a capture
    recorder.abort()
    recorder.begin()
    y = x + 1
    recorder.end().replay()
    assert y.tolist() == [2.0] * 8


@pytest.mark.parametrize("name", ["capture_begin", "capture_end"])
def test_a_capture_that_cannot_begin_or_end_leaves_its_pool(monkeypatch, name):
    """Else all that its stream allocates from then on lies in the pool of the graphs."""
    left, failing = [], [name]

    def call(called):
        def method(*args, **kwargs):
            if called in failing:
                raise RuntimeError("operation failed due to a previous error during capture")

        return method

    names = ("capture_begin", "capture_end")
    monkeypatch.setattr(
        torch.cuda, "CUDAGraph", lambda **kwargs: SimpleNamespace(**{name: call(name) for name in names})
    )
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: left.append(pool), raising=False)
    recorder = CUDAGraphRecorder()
    first = recorder._pool
    with pytest.raises(RuntimeError, match="previous error"):
        recorder.begin()
        recorder.end()
    failing.append("capture_end")  # what was not begun, or has ended once, cannot be ended
    recorder.abort()
    assert left == [first] and recorder._pool is not first
    failing.clear()
    recorder.begin()
    recorder.end()
    recorder.abort()
    assert left == [first]


@pytest.mark.gpu
def test_graphs_can_be_looked_at(tmp_path):
    platform = CUDAPlatform()
    before = torch.cuda.current_stream()
    platform.init_device(EngineConfig.from_flat(compilation_config={"debug_dump_path": str(tmp_path / "dump")}), 0)
    try:
        x = torch.ones(8, device="cuda")
        recorder = platform.graph_recorder()
        recorder.begin()
        y = x * 2
        recorder.end().replay()
        assert y.tolist() == [2.0] * 8
        assert "digraph" in (tmp_path / "dump" / "graph_0000.dot").read_text()
    finally:
        torch.cuda.set_stream(before)


@pytest.mark.gpu
def test_float32_products_are_float32(real):
    a, b = torch.randn(256, 256, device="cuda"), torch.randn(256, 256, device="cuda")
    exact = a.double() @ b.double()
    assert ((a @ b).double() - exact).abs().max() < 1e-4  # TF32: about 2e-2


@pytest.mark.gpu
def test_peak_and_what_is_given_back(real):
    held = torch.cuda.memory_reserved()

    def step():
        x = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
        torch.empty_like(x)

    peak = real.measure_peak_bytes(step)
    assert 128 * 2**20 <= peak <= 160 * 2**20
    assert torch.cuda.memory_reserved() <= held


@pytest.mark.gpu
@pytest.mark.parametrize("dropped", ["pool", "weights"])
def test_pool_and_weights_are_freed_apart(real, dropped):
    """What the platform's docstring says of sleeping."""
    gc.collect()
    torch.cuda.empty_cache()
    held = [torch.cuda.memory_reserved()]
    weights = [torch.ones(3 * 2**20, device="cuda") for _ in range(8)] + [torch.ones(64, device="cuda")]
    real.measure_peak_bytes(lambda: torch.ones(2**25, device="cuda"))
    held.append(torch.cuda.memory_reserved())
    pool = [torch.zeros(32 * 2**20, device="cuda") for _ in range(4)]
    held.append(torch.cuda.memory_reserved())
    size = {"weights": held[1] - held[0], "pool": held[2] - held[1]}
    assert min(size.values()) >= 64 * 2**20
    (pool if dropped == "pool" else weights).clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == held[2] - size[dropped]
    assert all(bool((weight == 1).all()) for weight in weights)
    assert not any(bool(part.any()) for part in pool)


@pytest.mark.gpu
def test_an_impossible_step_leaves_the_device_usable(real):
    with pytest.raises(ConfigError, match="does not fit"):
        real.measure_peak_bytes(lambda: torch.empty(2**50, dtype=torch.uint8, device="cuda"))
    assert torch.ones(4, device="cuda").sum().item() == 4
