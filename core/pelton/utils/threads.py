"""Turns of the interpreter's threads in a process that serves requests or runs steps."""

from __future__ import annotations

import sys

SWITCH_S = 100e-6
"""How long a thread may keep the interpreter from others that wait for it; Python's own 5 ms are several steps of a small model. A
launch, a mask or a token that has arrived lets go of it, and would come back to it only when the other thread has had its time."""


def take_short_turns() -> None:
    """Lower the interpreter's switch interval to `SWITCH_S`; a lower one stays."""
    sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
