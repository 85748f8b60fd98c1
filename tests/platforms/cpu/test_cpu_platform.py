"""The CPU platform: conformance, threads, memory, cgroups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.testing.platform import PlatformConformance
from pelton_platforms.cpu import host, threads
from pelton_platforms.cpu.platform import DEFAULT_KV_CACHE_BYTES, CPUPlatform, num_threads


class TestConformance(PlatformConformance):
    platform_class = CPUPlatform


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    "files, quota",
    [
        pytest.param({"cpu_dot_max": "150000 100000\n"}, 2, id="v2-rounds-up"),
        pytest.param({"cpu_dot_max": "max 100000\n"}, None, id="v2-without-limit"),
        pytest.param({"cpu__cpu_dot_cfs_quota_us": "400000", "cpu__cpu_dot_cfs_period_us": "100000"}, 4, id="v1"),
        pytest.param(
            {"cpu__cpu_dot_cfs_quota_us": "-1", "cpu__cpu_dot_cfs_period_us": "100000"}, None, id="v1-without"
        ),
        pytest.param({}, None, id="no-cgroup"),
    ],
)
def test_cpu_quota_of_a_container(tmp_path, files, quota):
    assert host.cpu_quota(write(tmp_path, **files)) == quota


def test_quota_bounds_the_threads(monkeypatch):
    monkeypatch.setattr(host, "_affinity", lambda: set(range(8)))
    monkeypatch.setattr(host, "_siblings", lambda cpu: f"{cpu % 4},{cpu % 4 + 4}")
    monkeypatch.setattr(host, "cpu_quota", lambda: None)
    assert host.usable_cores() == 4  # hyperthreads share a core
    monkeypatch.setattr(host, "cpu_quota", lambda: 2)
    assert host.usable_cores() == 2


@pytest.mark.parametrize("given, count", [("3", 3), ("3,2", 3), ("", None), ("many", None), ("0", None)])
def test_operators_thread_count_wins(monkeypatch, given, count):
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert num_threads() == (count or host.usable_cores())


def test_threads_are_set(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    try:
        CPUPlatform().init_device(EngineConfig(), 0)
        assert torch.get_num_threads() == 2
        assert CPUPlatform().describe().endswith(", 2 threads")
    finally:
        torch.set_num_threads(before)


def test_memory_is_the_least_of_host_and_cgroup(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:  4000000 kB\n")
    empty = tmp_path / "empty"
    assert host.available_memory_bytes(empty, meminfo) == 4_096_000_000
    limited = write(
        tmp_path / "limited",
        memory_dot_max="3000",
        memory_dot_current="2000",
        memory_dot_stat="anon 9\ninactive_file 500\n",
    )
    assert host.available_memory_bytes(limited, meminfo) == 1500
    old = write(tmp_path / "old", memory__memory_dot_limit_in_bytes="9000", memory__memory_dot_usage_in_bytes="2000")
    assert host.available_memory_bytes(old, meminfo) == 7000
    free = write(tmp_path / "free", memory_dot_max="max", memory_dot_current="2000")
    assert host.available_memory_bytes(free, meminfo) == 4_096_000_000
    assert host.available_memory_bytes(empty, tmp_path / "none") is None


def kv_bytes(monkeypatch, available: int | None, **flat) -> int:
    monkeypatch.setattr(host, "available_memory_bytes", lambda: available)
    config = EngineConfig.from_flat(gpu_memory_utilization=0.5, **flat)
    return CPUPlatform().available_kv_cache_bytes(config, weights_bytes=7, peak_activation_bytes=2**20)


def test_default_pool_is_512_mib(monkeypatch):
    assert kv_bytes(monkeypatch, 2**34) == DEFAULT_KV_CACHE_BYTES == 512 * 2**20
    assert kv_bytes(monkeypatch, None) == DEFAULT_KV_CACHE_BYTES


def test_pool_shrinks_on_a_small_host(monkeypatch):
    assert kv_bytes(monkeypatch, 2**28) == 2**27 - 2**20


def test_full_host_is_an_error_with_what_to_do(monkeypatch):
    with pytest.raises(ConfigError, match=r"Memory is full.*smaller model"):
        kv_bytes(monkeypatch, 2**20)


def test_set_pool_that_does_not_fit_is_an_error(monkeypatch):
    assert kv_bytes(monkeypatch, 2**28, kv_cache_memory_bytes=2**26) == 2**26
    with pytest.raises(ConfigError, match=f"kv_cache_memory_bytes is {2**28}"):
        kv_bytes(monkeypatch, 2**28, kv_cache_memory_bytes=2**28)


def test_cpu_has_a_name(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name\t: Some  CPU 9000\n")
    assert host.cpu_name(info) == "Some CPU 9000"
    assert host.cpu_name(tmp_path / "none")


def test_a_core_counts_once_by_its_first_cpu(monkeypatch):
    monkeypatch.setattr(host, "_affinity", lambda: {1, 2, 3, 5, 6})
    monkeypatch.setattr(host, "_siblings", lambda cpu: f"{cpu % 4},{cpu % 4 + 4}")
    assert host.core_cpus() == [1, 2, 3]


@pytest.fixture
def threads_in(monkeypatch):
    """Threads of a process as the kernel lists them, before and after a team of torch's has started; and what is bound."""

    def make(before, after):
        lists, bound = iter([set(before), set(after)]), {}
        monkeypatch.setattr(threads, "_threads", lambda: next(lists))
        monkeypatch.setattr(threads, "_start_team", lambda count: None)
        monkeypatch.setattr(threads.os, "sched_setaffinity", lambda thread, cpus: bound.update({thread: cpus}))
        for name in threads.OPERATORS:
            monkeypatch.delenv(name, raising=False)
        return bound

    return make


def test_all_threads_but_the_workers_are_bound(threads_in):
    bound = threads_in([10, 11], [10, 11, 14, 13])
    assert threads.bind_team(3, [0, 2, 4]) and bound == {13: {2}, 14: {4}}


@pytest.mark.parametrize("after, cores", [([10, 11], [0, 2]), ([10, 11, 12, 13], [0, 2]), ([10, 11, 12], [0, 1, 2])])
def test_threads_that_are_not_known_for_certain_stay_free(threads_in, after, cores):
    bound = threads_in([10, 11], after)
    assert not threads.bind_team(2, cores) and not bound


@pytest.mark.parametrize("name", threads.OPERATORS)
def test_the_operators_binding_wins(threads_in, monkeypatch, name):
    bound = threads_in([10], [10, 11])
    monkeypatch.setenv(name, "")
    assert not threads.bind_team(2, [0, 1]) and not bound


@pytest.mark.skipif(len(host.core_cpus()) < 2, reason="one core")
def test_torchs_threads_are_found_and_bound():
    """In a process of its own, whose thread has no team yet."""
    script = """
import os, threading, torch
from pelton_platforms.cpu import host, threads
def work():
    torch.set_num_threads(2)
    cores = host.core_cpus()[:2]
    before = threads._threads()
    bound = threads.bind_team(2, cores)
    names = {thread: open(f"/proc/self/task/{thread}/comm").read() for thread in threads._threads() - before}
    assert bound and len(names) == 1, (bound, names)
    (started,) = names
    print(os.sched_getaffinity(started) == {cores[1]}, len(os.sched_getaffinity(0)) > 1)
worker = threading.Thread(target=work)
worker.start(), worker.join()
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=clean, check=True)
    assert found.stdout.split() == ["True", "True"], found.stderr
