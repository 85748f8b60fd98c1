"""Compile the C files for one instruction set into a shared library, once for each content: sources, flags, compiler.

The library is made under a private name and renamed, so that two processes may make it at once.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pelton.logging import get_logger
from pelton.utils.cache_folder import cache_folder
from pelton_backends.native.isa import InstructionSet, probe_command, sets_of_cpu

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-O2",
    "-ftree-vectorize",
    "-std=gnu11",
    "-fPIC",
    "-fopenmp-simd",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-schedule-insns2",  # a quarter of the compiler's time; CPUs that reorder instructions run no slower without it
)

logger = get_logger(__name__)


class CannotBuildError(Exception):
    """Why there is no library, in words for `pelton backends`."""


def available_sets() -> list[InstructionSet]:
    """Those that this CPU and this compiler have, the slowest first. Raises `CannotBuildError`."""
    compiler = find_compiler()
    return [one for one in sets_of_cpu() if _knows(compiler, one)]


def best_set() -> InstructionSet:
    """The fastest of `available_sets`, for which fewer questions are asked."""
    compiler = find_compiler()
    for one in reversed(sets_of_cpu()):
        if _knows(compiler, one):
            return one
    raise CannotBuildError(f"{compiler} compiles nothing for this CPU")


def build_library(isa: InstructionSet, *, extra_flags: Sequence[str] = (), folder: Path | None = None) -> Path:
    """The library's path; compiles where the cache lacks it. Raises `CannotBuildError`."""
    compiler = find_compiler()
    flags = [*FLAGS, *isa.flags, *extra_flags]
    folder = folder or cache_folder("native")
    library = folder / f"pelton_native-{content_key(compiler, flags)}.so"
    if library.exists():
        return library
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as place:
        made = Path(place) / "library.so"
        objects = _compile(compiler, flags, Path(place))
        _run([compiler, "-shared", *extra_flags, *objects, "-lm", "-pthread", "-o", str(made)])
        os.replace(made, library)
    logger.info("compiled the CPU kernels for %s with %s: %.1f s", isa.name, compiler, time.monotonic() - started)
    return library


def find_compiler() -> str:
    for name in COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise CannotBuildError("no C compiler on the PATH")


def content_key(compiler: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for part in (*flags, compiler, _version(compiler), platform.machine()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def _compile(compiler: str, flags: Sequence[str], place: Path) -> list[str]:
    """Every file at once: the slowest decides."""
    running = []
    for source in sorted(SOURCES.glob("*.c")):
        made = place / f"{source.stem}.o"
        command = [compiler, *flags, "-c", str(source), "-o", str(made)]
        running.append((command, made, _start(command)))
    for command, _, process in running:
        _, errors = process.communicate()
        if process.returncode:
            for _, _, other in running:
                other.kill()
                other.wait()
            raise CannotBuildError(_failure(command, errors))
    return [str(made) for _, made, _ in running]


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        raise CannotBuildError(f"{command[0]} cannot be run: {error}") from error


def _run(command: Sequence[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotBuildError(f"{command[0]} cannot be run: {error}") from error
    if result.returncode:
        raise CannotBuildError(_failure(command, result.stderr))
    return result.stdout


def _failure(command: Sequence[str], errors: str) -> str:
    """In one line: the rest is logged."""
    logger.warning("%s\n%s", " ".join(command), errors.strip())
    said = [line for line in errors.splitlines() if "error" in line] or errors.splitlines() or ["no message"]
    return f"the C compiler failed: {said[0].strip()[:200]}"


def _knows(compiler: str, isa: InstructionSet) -> bool:
    return (
        not isa.features
        or subprocess.run(probe_command(compiler, isa), capture_output=True, check=False).returncode == 0
    )


def _version(compiler: str) -> str:
    return _run([compiler, "--version"])
