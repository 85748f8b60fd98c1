"""Our own programs (engine, ranks, API processes) as processes that import from where this one does."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from pelton.utils.cache_folder import remove_private_folders

_PR_SET_PDEATHSIG = 1


def own_program(module: str, *, is_bound: bool = True, **arguments: object) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of `python -m module`, with the arguments as flags; `read_arguments` takes them there.

    is_bound: it ends with this process.
    """
    command = [sys.executable, "-P", "-m", module]
    for name, value in arguments.items():
        command += ["--" + name.replace("_", "-"), str(value)]
    environment = dict(os.environ)
    if "PYTHONPATH" in environment:
        command += ["--python-path", environment["PYTHONPATH"]]
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path if "zip" not in path)
    if is_bound:
        command += ["--parent-pid", str(os.getpid())]
        if threading.current_thread() is threading.main_thread():  # whose end the kernel's signal follows
            command.append("--die-with-parent")
    return command, environment


def read_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse what `own_program` passed and set PYTHONPATH to what the user's was, for processes that this one starts.

    Ends the process when the one that started it has ended already.
    """
    parser.add_argument("--python-path", default=None, help="PYTHONPATH as the user set it")
    parser.add_argument("--parent-pid", type=int, default=None)
    parser.add_argument("--die-with-parent", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.die_with_parent:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if arguments.parent_pid not in (None, os.getppid()):
        sys.exit(1)
    os.environ.pop("PYTHONPATH", None)
    if arguments.python_path is not None:
        os.environ["PYTHONPATH"] = arguments.python_path
    return arguments


def end_process(status: int) -> NoReturn:
    """Leave at once: interpreter teardown with torch loaded takes long and frees nothing that the kernel does not."""
    remove_private_folders()
    os._exit(status)
