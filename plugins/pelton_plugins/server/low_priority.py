"""Priority of a process that serves beside an engine on a CPU: lower than the engine's, which computes on the same cores."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

from pelton.engine.process_client import EngineConnection

NICENESS = 5


class LowPriority:
    """Lowers this process once its engine has started. A process inherits the priority of the thread that starts it, and may not raise
    it: engines that come later are started by a thread that has kept the old one."""

    def __init__(self) -> None:
        self._keeper: ThreadPoolExecutor | None = None

    def lower(self, by: int = NICENESS) -> None:
        """Lower all threads but one, and those that they start."""
        self._keeper = ThreadPoolExecutor(1, "pelton-starts")
        self._kept = self._keeper.submit(threading.get_native_id).result()
        self._niceness = os.getpriority(os.PRIO_PROCESS, self._kept) + by
        self._lower_threads()

    def connect(self, hang_dump_s: float) -> EngineConnection:
        """Start an engine's process."""
        if self._keeper is None:
            return EngineConnection(hang_dump_s)
        connection = self._keeper.submit(EngineConnection, hang_dump_s).result()
        self._lower_threads()  # those that read from it
        return connection

    def _lower_threads(self) -> None:
        with contextlib.suppress(OSError):  # Linux has a priority for each thread, others have no such folder
            for thread in map(int, os.listdir("/proc/self/task")):
                if thread != self._kept:
                    with contextlib.suppress(ProcessLookupError):
                        os.setpriority(os.PRIO_PROCESS, thread, self._niceness)
