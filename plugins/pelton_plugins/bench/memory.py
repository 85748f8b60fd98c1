"""Memory in use, read from outside: of the device by its driver's tool, of processes from /proc."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

DRIVER_TOOL = "nvidia-smi"


async def device_bytes() -> int | None:
    """Return the bytes of all devices together; None where the driver has no tool to ask."""
    if shutil.which(DRIVER_TOOL) is None:
        return None
    process = await asyncio.create_subprocess_exec(
        DRIVER_TOOL, "--query-gpu=memory.used", "--format=csv,noheader,nounits",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    out, _ = await process.communicate()
    numbers = [int(line) for line in out.decode().split() if line.isdigit()]
    return sum(numbers) * 2**20 if process.returncode == 0 and numbers else None


def host_bytes() -> int | None:
    """Resident memory of this process and of all that it started; None without /proc."""
    try:
        return family_bytes(os.getpid())
    except OSError:
        return None


def family_bytes(pid: int) -> int:
    """Resident memory of a process and of all that it started. Raises `OSError` without /proc."""
    return sum(_resident_bytes(one) for one in family(pid))


def family(pid: int) -> list[int]:
    """A process and all that it started. Raises `OSError` without /proc."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):  # it has just ended
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(path.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def _resident_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One process, seen from outside."""

    pid: int
    name: str
    resident_bytes: int
    num_fds: int
    num_threads: int


def family_states(pid: int) -> list[ProcessState]:
    """A process and all that it started, without those that have just ended. Raises `OSError` without /proc."""
    found = []
    for one in family(pid):
        with contextlib.suppress(OSError):
            folder = Path(f"/proc/{one}")
            name, num_fds = (folder / "comm").read_text().strip(), len(os.listdir(folder / "fd"))
            found.append(ProcessState(one, name, _resident_bytes(one), num_fds, len(os.listdir(folder / "task"))))
    return found
