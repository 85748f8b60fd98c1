"""Pelton's processes (servers, API processes, engines, ranks) as forks of one that has imported what they import, which is most of
what a start costs.

    python pelton_forked.py SOCKET PADDING      that process, a zygote; it ends with the one that started it

A fork is a child of the process that asks for it, as one that is started by `exec`: the zygote forks twice, and who asks adopts what
the process between leaves. So its end, its signals, its parent's id and the parent's end are real. Its command line says what it
would have said. A fork that starts processes itself has a zygote of its own, which it forks before it does anything else.

What the product does begins with `runpy` in the fork, as with `python -m`. Starts by `exec` have tests of their own: servers with all
that they start in e2e/test_server.py, e2e/test_tensor_parallel.py (ranks), plugins/server/test_several_processes.py (API processes) and
plugins/bench/test_soak.py; the commands' ends in plugins/server/test_life.py and cli; engines in core/engine/test_engine_process.py and
sdk/test_real_model.py; ranks of a user's own process in plugins/executors/test_multiproc.py; scripts in docs/test_readme.py; pytest with
conformance suites, and `pelton plugins check`, in examples/test_from_wheel.py.
"""

from __future__ import annotations

import array
import asyncio
import atexit
import contextlib
import ctypes
import fcntl
import functools
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_MOST_BYTES, _MOST_FDS = 1 << 17, 16
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PYTHON, _ENVIRON = sys.executable, dict(os.environ)  # a test may name others
_PADDING = "-" * 4096
"""Where the command lines of forks are written."""
NAME = Path(__file__).name
"""It is in the command line of each zygote, which a test that counts processes leaves out."""
STARTS_NOTHING = ("pelton_plugins.executors.multiproc.rank", "pelton.testing.communicator")
PACKAGES = ("pelton", "pelton_backends", "pelton_platforms", "pelton_plugins")


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


class Zygote:
    """The process that is forked, as its parent sees it."""

    def __init__(self, control: socket.socket) -> None:
        self._socket, self._lock = control, threading.Lock()

    def fork(self, job: dict[str, Any], fds: Sequence[int]) -> int:
        """Return the id of a child of this process. fds: its stdin, stdout and stderr, and those that it is handed."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        with self._lock:
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                self._socket.sendmsg([json.dumps(job).encode()], rights)
                answer = self._socket.recv(100)
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        assert answer, "the process that is forked has ended"
        return int(answer)


ExecPopen = subprocess.Popen
"""Also while `forked_starts` has another one in its place."""

_first_start = threading.Lock()
_inherited: list[Zygote] = []


@functools.cache
def _started() -> Zygote:
    """A zygote of this process, which is none's fork."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [_PYTHON, str(Path(__file__).resolve()), str(theirs.fileno()), _PADDING]
        environ = {**_ENVIRON, "OPENBLAS_NUM_THREADS": "1"}  # else numpy starts threads
        _Started(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=environ)
    return Zygote(ours)


def _zygote() -> Zygote:
    if _inherited:
        return _inherited[0]
    with _first_start:  # several engines start at once
        return _started()


class _Started(subprocess.Popen[bytes]):
    """It outlives who has started it, in Python, and ends with the process."""

    def __del__(self) -> None:
        pass


class ForkingPopen(subprocess.Popen[Any]):
    """`subprocess.Popen`, whose processes are forks where they are programs of Pelton."""

    def _execute_child(self, *given: Any) -> None:
        options = _NAMES.bind(self, *given).arguments
        job = self._job(list(options["args"]) if isinstance(options["args"], (list, tuple)) else [])
        is_plain = options["executable"] is None and options["preexec_fn"] is None and not options["shell"]
        if job is None or not is_plain:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        env, group = options["env"], options["process_group"]
        job |= {
            "env": dict(os.environ if env is None else env),
            "cwd": str(options["cwd"] or os.getcwd()),
            "fds": list(options["pass_fds"]),
            "session": options["start_new_session"],
            "group": None if group in (None, -1) else group,
            "is_deaf": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        }
        ends = [options[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        standard = [number if end == -1 else end for number, end in enumerate(ends)]
        self.pid = _zygote().fork(job, [*standard, *options["pass_fds"]])
        self._child_created = True
        pipes = [options[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _job(self, command: list[Any]) -> dict[str, Any] | None:
        """What is to run; None where that is none of Pelton's programs."""
        program = [word for word in command if word != "-P"]
        if program[:2] != [_PYTHON, "-m"] or program[2].partition(".")[0] not in PACKAGES:
            return None
        return {"kind": "-m", "argv": program[2:], "command": command, "is_safe_path": "-P" in command}


class AnyForkingPopen(ForkingPopen):
    """Also scripts (a path, `-c`) and runs of pytest, which then find imported what they would import."""

    def _job(self, command: list[Any]) -> dict[str, Any] | None:
        if (job := super()._job(command)) is not None:
            return job
        if command[:3] == [_PYTHON, "-m", "pytest"]:
            return {"kind": "-m", "argv": command[2:], "command": command, "is_safe_path": False}
        if command[:1] != [_PYTHON] or (str(command[1]).startswith("-") and command[1] != "-c"):
            return None
        words = list(map(str, command))
        kind = "-c" if words[1] == "-c" else "script"
        return {"kind": kind, "argv": words[1 + (kind == "-c") :], "command": words, "is_safe_path": False}


_NAMES = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_exec = asyncio.create_subprocess_exec


class _AsyncProcess:
    """What Pelton uses of `asyncio.subprocess.Process`: uvloop starts processes by itself."""

    def __init__(self, process: ForkingPopen) -> None:
        self.pid, self._process = process.pid, process
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # nobody waits any more
            self._loop.call_soon_threadsafe(self._end, code)

    def _end(self, code: int) -> None:
        self.returncode = code
        self._ended.set_result(code)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)


async def _create_subprocess_exec(*command: str, **options: Any) -> Any:
    if ForkingPopen._job(ForkingPopen.__new__(ForkingPopen), list(command)) is None:
        return await _exec(*command, **options)
    return _AsyncProcess(ForkingPopen(list(command), **options))


@contextlib.contextmanager
def forked_starts(popen: type[ForkingPopen] = ForkingPopen) -> Iterator[None]:
    """Processes of Pelton that this one starts are forks, until the block ends."""
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", popen)
        patch.setattr(asyncio, "create_subprocess_exec", _create_subprocess_exec)
        yield


# In the process that is forked.


def _serve(control: socket.socket) -> dict[str, Any]:
    """Fork for each job. Returns in the fork, with its job, once it is the child of who asked."""
    while True:
        data, rights, _, _ = control.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(4 * _MOST_FDS))
        if not data:
            os._exit(0)
        fds = array.array("i")
        for _, _, part in rights:
            fds.frombytes(part)
        told, tell = os.pipe()
        held, hold = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            for descriptor in (told, hold, control.detach()):
                os.close(descriptor)
            return json.loads(data) | {"given": list(fds), "tell": tell, "held": held}
        for descriptor in (tell, held, *fds):
            os.close(descriptor)
        os.waitpid(between, 0)  # its child has another parent now
        answer = os.read(told, 100)  # and a group and a session
        for descriptor in (told, hold):
            os.close(descriptor)
        control.send(answer)


def _fork_zygote(job: dict[str, Any]) -> socket.socket | None:
    """Return None in the zygote of this process, in which `job` is what it was asked for."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        return ours
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for descriptor in (*job["given"], job["tell"], job["held"], ours.detach()):
        os.close(descriptor)
    asked = _serve(theirs)
    job.clear()
    job.update(asked)
    return None


def _become(job: dict[str, Any]) -> None:
    """Run what `python` would have run."""
    own = None
    while job["argv"][0] not in STARTS_NOTHING and (own := _fork_zygote(job)) is None:
        pass
    if job["session"]:
        os.setsid()
    if job["group"] is not None:
        os.setpgid(0, job["group"])
    os.write(job["tell"], str(os.getpid()).encode())
    os.read(job["held"], 1)
    for descriptor in (job["tell"], job["held"]):
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN if job["is_deaf"] else signal.default_int_handler)
    free = max(200, *job["fds"], 0) + 1  # where descriptors lie until their own numbers are free
    if own is not None:
        _inherited[:] = [Zygote(socket.socket(fileno=_moved(own.detach(), free)))]
        subprocess.Popen = ForkingPopen  # type: ignore[misc]
        asyncio.create_subprocess_exec = _create_subprocess_exec
    high = [_moved(descriptor, free) for descriptor in job["given"]]
    for source, target in zip(high, [0, 1, 2, *job["fds"]], strict=True):
        os.dup2(source, target)
        os.close(source)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    _show(job["command"])
    paths = [path for path in job["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    folder = Path(__file__).parent
    sys.path[:] = paths + [path for path in sys.path if path not in paths and path != str(folder)]
    program, *sys.argv[1:] = job["argv"]
    if not job["is_safe_path"]:
        sys.path.insert(0, {"-m": job["cwd"], "-c": "", "script": str(Path(program).resolve().parent)}[job["kind"]])
    sys.argv[0] = "-c" if job["kind"] == "-c" else program
    _end_with(_status_of(job["kind"], program))


def _status_of(kind: str, program: str) -> int:
    try:
        if kind == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        elif kind == "script":
            runpy.run_path(program, run_name="__main__")
        else:
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(program, "<string>", "exec"), vars(main))  # noqa: S102
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end_with(status: int) -> None:
    """End as Python does, and leave the modules alone, which it would take apart one by one."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or nobody reads
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 255)


def _moved(descriptor: int, lowest: int) -> int:
    """The same file under a number from `lowest` on, for this process alone."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)
    os.close(descriptor)
    return moved


def _show(command: Sequence[str]) -> None:
    """Write a command line over that which this process was started with."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(map(os.fsencode, command))[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


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
    # What a server imports beside these.
    "pelton.cli", "pelton.sdk.async_llm", "pelton_plugins.flags", "pelton_plugins.loaders.gguf.format",
    "pelton_plugins.loaders.hf_folder.format", "pelton_plugins.loaders.hf_folder.sentence_transformers",
    "pelton_plugins.loaders.hf_folder.tokenizer", "pelton_plugins.loaders.text.chat_template",
    "pelton_plugins.loaders.text.tokenizer", "pelton_plugins.server.ahead", "pelton_plugins.server.app",
    "pelton_plugins.server.command", "pelton_plugins.server.processes.joined_client",
    "pelton_plugins.server.processes.owner", "pelton_plugins.server.routes.anthropic",
    "pelton_plugins.server.routes.cohere", "pelton_plugins.server.routes.elastic", "pelton_plugins.server.routes.extras",
    "pelton_plugins.server.routes.lora", "pelton_plugins.server.routes.openai", "pelton_plugins.server.routes.operations",
    "pelton_plugins.server.routes.pooling", "pelton_plugins.server.routes.profile",
    "pelton_plugins.server.routes.responses", "pelton_plugins.server.routes.sleep", "pelton_plugins.server.routes.tokens",
    "pelton_plugins.sources.local", "pelton_plugins.stat_loggers.log_line", "pelton_plugins.stat_loggers.prometheus",
    "pelton_plugins.web.routes", "uvicorn.lifespan.off", "uvicorn.protocols.http.httptools_impl", "uvloop",
)  # fmt: skip
"""Nothing that looks at the environment while it is imported, and no module that a fork runs as its program."""
OF_LITESTAR = (
    "litestar._kwargs.kwargs_model", "litestar.middleware._internal.exceptions.middleware",
    "litestar.middleware.allowed_hosts", "litestar.middleware.csrf", "litestar.middleware.response_cache",
    "litestar.plugins.pydantic",
)  # fmt: skip
"""What it imports with the first application that it makes, so far as this version has it: 0.2 s, most of it pydantic."""


def main(control: int) -> None:
    import gc

    import pelton_quick_end  # noqa: F401  # of forks, too
    import torch  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in IMPORTED:
        importlib.import_module(name)
    for name in OF_LITESTAR:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    from pelton.plugins import load_plugins

    load_plugins()  # the modules of all plugins
    gc.collect()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has one thread of several"
    _become(_serve(socket.socket(fileno=control)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
