"""One thread a core: the threads that compute beside the worker's own are bound, each to a core of its own.

Two of them on one core would hold up every step until the kernel moves one. The worker's own thread is left free: what it starts
(the C compiler) would inherit its binding.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from pelton.logging import get_logger

OPERATORS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Where the operator has a say, the OpenMP runtime has heard it."""

logger = get_logger(__name__)


def bind_team(count: int, cores: Sequence[int]) -> bool:
    """Start torch's `count` threads for the calling thread and bind all but that; cores: a CPU of each. False: none is bound."""
    if count < 2 or count != len(cores) or any(name in os.environ for name in OPERATORS):
        return False
    before = _threads()
    _start_team(count)
    started = sorted(_threads() - before)
    if len(started) != count - 1:  # another runtime, or a team that was there before
        logger.debug("%d threads appeared, not %d: none is bound", len(started), count - 1)
        return False
    for thread, core in zip(started, cores[1:], strict=True):
        os.sched_setaffinity(thread, {core})
    return True


def _threads() -> set[int]:
    try:
        return {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:
        return set()


def _start_team(count: int) -> None:
    """Something that torch spreads over all its threads: it does so from 32,768 numbers a thread on."""
    import torch

    torch.zeros(count << 17).add_(1)
