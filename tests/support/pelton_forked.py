"""Processes of ranks, engines and communicators as forks of one that has imported torch and what nearly all of them import, which is
most of what a start costs.

    python pelton_forked.py SOCKET      that process; it ends with the one that started it

What a rank or an engine does begins with `runpy` in the fork, as with `python -m`. Starts without a fork have tests of their own
(plugins/executors/test_multiproc.py, core/engine/test_engine_process.py, every server).
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import functools
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_MOST_BYTES, _MOST_FDS = 1 << 17, 16
UNKNOWN = 251
"""The exit status of a fork whose server is gone, and with it who would have been told."""


class ForkServer:
    """Started by the first process that is asked of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())]
            environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # else numpy starts threads
            self._process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=environ
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, job: dict[str, Any], fds: list[int]) -> int:
        """Return the process id. fds: where its end is told, its stdin, stdout and stderr, and those that it is handed."""
        with self._lock:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            self._socket.sendmsg([json.dumps(job).encode()], rights)
            return int(self._socket.recv(100))


class ForkedProcess:
    """What Pelton uses of `subprocess.Popen`."""

    def __init__(
        self, server: ForkServer, command: list[str], *, env: dict[str, str], stdin: int | None = None, stdout: int | None = None,
        stderr: int | None = None, pass_fds: tuple[int, ...] = (), process_group: int | None = None, text: bool = False,
    ) -> None:  # fmt: skip
        is_safe_path, command = command[1] == "-P", [word for word in command if word != "-P"]
        assert command[0] == sys.executable, command
        is_module = command[1] == "-m"
        if "--parent-pid" in command:
            command[command.index("--parent-pid") + 1] = str(server.pid)
        self._lock = threading.Lock()
        self._server = server  # which ends with the last who holds it
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[Any] | None = None
        self._end, told = os.pipe()
        given, close = [told, 0, 1, 2], [told]
        if stdin == subprocess.DEVNULL:
            given[1] = os.open(os.devnull, os.O_RDONLY)
            close.append(given[1])
        if stdin == subprocess.PIPE:
            given[1], ours = os.pipe()
            self.stdin = os.fdopen(ours, "wb")
            close.append(given[1])
        if stdout == subprocess.PIPE:
            ours, given[2] = os.pipe()
            self.stdout = os.fdopen(ours, "r" if text else "rb")
            close.append(given[2])
        if stderr == subprocess.STDOUT:
            given[3] = given[2]
        job = {
            "is_module": is_module,
            "argv": command[1 + is_module :],
            "env": env,
            "cwd": os.getcwd(),
            "fds": list(pass_fds),
            "group": process_group,
        }
        job["path"] = [] if is_safe_path else [os.getcwd()]
        try:
            self.pid = server.fork(job, [*given, *pass_fds])
        finally:
            for descriptor in close:
                os.close(descriptor)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            poll = select.poll()  # descriptors may be large
            poll.register(self._end, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000) and self.returncode is None:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            with self._lock:
                if self.returncode is None:
                    said = os.read(self._end, 20)
                    os.close(self._end)
                    self.returncode = int(said) if said else UNKNOWN
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[Any, None]:
        """What it prints until it ends."""
        assert self.stdout is not None
        self.wait(timeout)  # a pipe holds more than those who are asked print
        with self.stdout:
            return self.stdout.read(), None

    def __del__(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(OSError):
                os.close(self._end)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


_first_start = threading.Lock()


@functools.cache
def _server() -> ForkServer:
    return ForkServer()


def start(command: list[str], **options: Any) -> ForkedProcess:
    """In place of `subprocess.Popen`, from any thread."""
    with _first_start:  # several engines start at once: two servers otherwise, of which one ends, and its forks with it
        server = _server()
    return ForkedProcess(server, command, **options)


@contextlib.contextmanager
def forked_starts() -> Iterator[None]:
    """Ranks and engines that this process starts are forks, until the block ends."""
    import pytest

    from pelton.engine import process_client
    from pelton.testing import communicator
    from pelton_plugins.executors.multiproc import processes

    stand_in = type("subprocess", (), {**vars(subprocess), "Popen": staticmethod(start)})
    with pytest.MonkeyPatch.context() as patch:
        for module in (processes, process_client, communicator):
            patch.setattr(module, "subprocess", stand_in)
        yield


# In the process that is forked.


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each job. Returns in the fork, with its job; None where nobody is left to ask."""
    ends: dict[int, int] = {}  # by process id, where its end is told
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        readable, _, _ = select.select([control, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
        for pid in list(ends):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                end = ends.pop(pid)
                with contextlib.suppress(OSError):  # nobody waits any more
                    os.write(end, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(end)
        if control not in readable:
            continue
        data, rights, _, _ = control.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(4 * _MOST_FDS))
        if not data:
            return None
        fds = array.array("i")
        for _, _, part in rights:
            fds.frombytes(part)
        end, *given = fds
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (end, woken, wake, *ends.values()):
                os.close(descriptor)
            control.close()
            return json.loads(data) | {"given": given}
        ends[pid] = end
        for descriptor in given:
            os.close(descriptor)
        control.send(str(pid).encode())


def _become(job: dict[str, Any]) -> None:
    """The process that `python -P -m` would have made of the job."""
    if job["group"] is not None:
        os.setpgid(0, job["group"])
    free = max(200, *job["fds"], 0) + 1  # where descriptors lie until their own numbers are free
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, free) for descriptor in job["given"]]
    for descriptor in job["given"]:
        os.close(descriptor)
    for source, target in zip(high, [0, 1, 2, *job["fds"]], strict=True):
        os.dup2(source, target)
        os.close(source)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    paths = job["path"] + [path for path in job["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    own = str(Path(__file__).parent)
    sys.path[:] = paths + [path for path in sys.path if path not in paths and path != own]
    program, *sys.argv[1:] = job["argv"]
    if job["is_module"]:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


IMPORTED = (
    "pelton.engine.core", "pelton.platform.select", "pelton.sdk.llm", "pelton_backends.native.backend",
    "pelton_backends.native.encoder", "pelton_backends.native.layer_norm", "pelton_backends.native.lora",
    "pelton_backends.native.moe", "pelton_backends.native.sampling", "pelton_backends.native.step",
    "pelton_backends.reference.composed_lora", "pelton_backends.reference.composed_moe",
    "pelton_backends.reference.speculation", "pelton_backends.sdpa.backend", "pelton_backends.sdpa.mla",
    "pelton_platforms.cpu.platform", "pelton_platforms.cpu.shared", "pelton_platforms.device.adapters",
    "pelton_platforms.device.graphs.call_graph", "pelton_platforms.device.steps.step_drafts",
    "pelton_platforms.device.worker", "pelton_plugins.executors.multiproc.executor", "pelton_plugins.kv_cache.manager",
    "pelton_plugins.loaders.safetensors_loader", "pelton_plugins.models.deepseek", "pelton_plugins.models.qwen3_moe",
    "pelton_plugins.scheduler.scheduler", "pelton_plugins.speculative.ngram", "safetensors.torch",
)  # fmt: skip
"""Nothing that looks at the environment while it is imported, and no module that a fork runs as its program."""


def main(control: int) -> None:
    import pelton_quick_end  # noqa: F401  # of forks, too
    import torch  # noqa: F401

    for name in IMPORTED:
        importlib.import_module(name)
    from pelton.plugins import load_plugins

    load_plugins()  # the modules of all plugins
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has one thread of several"
    job = _serve(socket.socket(fileno=control))
    if job is not None:
        _become(job)


if __name__ == "__main__":
    main(int(sys.argv[1]))
