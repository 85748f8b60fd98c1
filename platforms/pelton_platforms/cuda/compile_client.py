"""Processes that compile kernels for this one, which goes on meanwhile: see `compile_server.py`, the program that they run.

Threads of one process cannot share the work: a quarter of it is Python (the way from a kernel's source to Triton's first
representation), and Python's lock is also what the steps need that say which kernels there are. Nothing here imports torch or Triton.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection

COMPILED, FOUND, FAILED = b"compiled", b"found", b"failed"
_MOST_COMPILERS = 16  # each has a compiler in memory


def num_compilers() -> int:
    """Kernels that are compiled at once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_COMPILERS)


class CompileServer:
    """`num_processes` that take a kernel each. They are started at once and take some seconds to be there; what they are asked
    before waits for them."""

    def __init__(self, num_processes: int) -> None:
        pipes = [Pipe() for _ in range(num_processes)]
        theirs = [their_end.fileno() for _, their_end in pipes]
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if "zip" not in path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pelton_platforms.cuda.compile_server", *map(str, theirs)],
            env=os.environ | {"PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=theirs,
            process_group=0,  # Ctrl-C is ours: they end when their connections do
        )
        for _, their_end in pipes:
            their_end.close()
        self.num_processes = num_processes
        self._connections = [ours for ours, _ in pipes]
        self._free: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        for connection in self._connections:
            self._free.put(connection)

    def compile(self, kernel: bytes) -> bytes:
        """Wait for a free process to compile `kernel` (`kernel_messages.py`) into the cache, or to find it there, and for its
        answer. From any thread."""
        connection = self._free.get()
        try:
            connection.send_bytes(kernel)
            return connection.recv_bytes()
        except (OSError, EOFError):  # it has died: whoever gets this connection next hears the same
            return FAILED
        finally:
            self._free.put(connection)

    def close(self) -> None:
        """End the processes; answers that are still open are dropped."""
        for connection in self._connections:
            connection.close()
        self._process.terminate()
        self._process.wait()
