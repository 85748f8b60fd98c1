"""Resources of the host that this process may use: cores and memory, as affinity and cgroups allow.

A container's limits are in cgroup files, version 2 or 1; the plain counts of the machine are the bound where there is none.
"""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
CPUS = Path("/sys/devices/system/cpu")
MEMINFO = Path("/proc/meminfo")
CPUINFO = Path("/proc/cpuinfo")
_UNLIMITED = 2**60  # cgroup v1 writes a number near 2**63 for "no limit"


def usable_cores() -> int:
    """Physical cores that this process may keep busy: affinity, hyperthreads and CPU quota considered. At least 1."""
    cores = core_cpus()
    return max(1, min(len(cores), cpu_quota() or len(cores)))


def core_cpus() -> list[int]:
    """Return the first CPU of each physical core that this process may use."""
    return sorted({_siblings(cpu): cpu for cpu in sorted(_affinity(), reverse=True)}.values())


def cpu_quota(root: Path = CGROUP) -> int | None:
    """Whole CPUs of this process's cgroup, rounded up; None without a quota."""
    words = _read(root / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit():
        return math.ceil(int(words[0]) / int(words[1]))
    quota, period = _read(root / "cpu" / "cpu.cfs_quota_us"), _read(root / "cpu" / "cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        return math.ceil(int(quota) / int(period))
    return None


def available_memory_bytes(root: Path = CGROUP, meminfo: Path = MEMINFO) -> int | None:
    """Memory that can still be taken without swapping; None where the host does not say."""
    bounds = [left for left in (_host_memory(meminfo), _cgroup_memory(root)) if left is not None]
    return min(bounds) if bounds else None


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """The CPU's model, for people."""
    for line in _read(cpuinfo).splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "Hardware") and value.strip():
            return " ".join(value.split())
    return platform.processor() or platform.machine() or "CPU"


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _siblings(cpu: int) -> str:
    """Equal for the hyperthreads of one core; a CPU that does not say is a core of its own."""
    return _read(CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu)


def _host_memory(meminfo: Path) -> int | None:
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_memory(root: Path) -> int | None:
    for limit_file, used_file, stat_file in (
        (root / "memory.max", root / "memory.current", root / "memory.stat"),
        (
            root / "memory" / "memory.limit_in_bytes",
            root / "memory" / "memory.usage_in_bytes",
            root / "memory" / "memory.stat",
        ),
    ):
        limit, used = _read(limit_file), _read(used_file)
        if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:
            return max(0, int(limit) - int(used) + _reclaimable(stat_file))
    return None


def _reclaimable(stat_file: Path) -> int:
    """File pages that nobody used of late: the kernel takes them back before it refuses memory."""
    for line in _read(stat_file).splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file") and value.isdigit():
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
