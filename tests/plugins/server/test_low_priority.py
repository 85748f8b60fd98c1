"""The server lowers its own priority beside an engine on a CPU, and not that of engines that it starts again."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, os, subprocess, sys, threading, time
from pelton_plugins.server import low_priority

class Connection:
    def __init__(self, hang_dump_s):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        command = ["python3", "-c", "import os; print(os.getpriority(os.PRIO_PROCESS, 0))"]
        self.niceness = int(subprocess.run(command, capture_output=True, check=True).stdout)

low_priority.EngineConnection = Connection
priority, before = low_priority.LowPriority(), os.getpriority(os.PRIO_PROCESS, 0)
first = priority.connect(1.0).niceness
priority.lower(3)
again = priority.connect(1.0).niceness
threads = [os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")]
print(json.dumps([before, first, again, sorted(threads)]))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")
def test_an_engine_that_is_started_again_has_the_priority_of_the_first() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    before, first, again, threads = json.loads(done.stdout)
    assert first == again == before
    lowered = min(before + 3, 19)
    assert threads.count(before) == 1 and set(threads) == {before, lowered} and len(threads) >= 4
