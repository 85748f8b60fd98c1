"""Parts of a sum that programs hand to each other through memory, without a counter.

A place without a part holds 0, and a part is stored as its bits exclusive-or those of a NaN that no instruction makes: never as 0. Who adds
looks at a part's own places until every number has come, and leaves them as they were. With a counter there are three ways through
the second-level cache: the part has to be seen before the counter is raised, and is read after the counter. Here there is one.

A program may wait for such alone as come before it in the order in which programs start. Looking again and again takes of what L2 gives:
for a few numbers a program only (for tiles of 64 x 32 and 64 x 64 numbers a counter is faster, see docs/performance/models.md).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_UNMADE: gl.constexpr = gl.constexpr(0x7FC0DEAD)
"""Bits of a quiet NaN. Those that instructions make are 0x7fffffff (PTX ISA, floating point)."""


@gluon.jit
def hand_over(cells, part, is_taken):
    """Store a part, one number a place, for the program that adds it."""
    gl.store(cells, part.to(gl.int32, bitcast=True) ^ _UNMADE, mask=is_taken)


@gluon.jit
def _some_miss(found, is_taken):
    count = ((found == 0) & is_taken).to(gl.int32)
    for _ in gl.static_range(len(found.shape) - 1):
        count = gl.max(count, 0)
    return gl.max(count, 0) > 0


@gluon.jit
def take(cells, is_taken):
    """Wait for parts of any shape, and return them; zeros where nothing is taken."""
    found = gl.load(cells, mask=is_taken, other=0, volatile=True)
    while _some_miss(found, is_taken):
        found = gl.load(cells, mask=is_taken, other=0, volatile=True)
    gl.store(cells, gl.zeros_like(found), mask=is_taken)
    return gl.where(is_taken, (found ^ _UNMADE).to(gl.float32, bitcast=True), 0.0)
