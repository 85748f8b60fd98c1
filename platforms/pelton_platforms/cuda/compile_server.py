"""Compile kernels into Triton's cache for another process.

    python -m pelton_platforms.cuda.compile_server FD...      started by `compile_client.py` and by nobody else

It imports what all need and becomes as many processes as there are connections. Each ends with its connection, so that none
outlives the engine. They use no device.
"""

from __future__ import annotations

import contextlib
import os
import sys
from multiprocessing.connection import Connection

import torch  # noqa: F401  # what kernels' modules import takes longest, so before there are many processes
import triton.experimental.gluon  # noqa: F401
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import compile as compile_kernel

from pelton.platform.compiling import hash_callees_first
from pelton_platforms.cuda.compile_client import COMPILED, FAILED, FOUND
from pelton_platforms.cuda.kernel_messages import decode_kernel


def main(*fds: str) -> None:
    children = []
    for index, fd in enumerate(fds):
        child = os.fork()
        if not child:
            for other in fds[:index] + fds[index + 1 :]:
                os.close(int(other))
            _serve(Connection(int(fd)))
        children.append(child)
    for fd in fds:
        os.close(int(fd))
    for child in children:
        os.waitpid(child, 0)


def _serve(connection: Connection) -> None:
    """Never returns."""
    try:
        while True:
            connection.send_bytes(_compile(connection.recv_bytes()))
    finally:
        os._exit(0)  # no cleaning up of what a sibling has as well


def _compile(kernel: bytes) -> bytes:
    """The answer. Why a kernel cannot be compiled is said by the process that launches it."""
    is_new = False

    def note(*, cache_hit: bool, **rest: object) -> None:
        nonlocal is_new
        is_new = not cache_hit

    knobs.compilation.listener = note
    try:
        src, target, options = decode_kernel(kernel)
        hash_callees_first(src.fn)
        compiled = compile_kernel(src, target=target, options=options)
    except Exception:
        return FAILED
    with contextlib.suppress(Exception):
        CudaLauncher(src, compiled.metadata)  # the C function that launches it is compiled into the cache too
    return COMPILED if is_new else FOUND


if __name__ == "__main__":
    main(*sys.argv[1:])
