"""Compile the C files for one instruction set into shared libraries, once for each content: sources, flags, compiler.

One library has what every model needs. Files that only some models need are libraries of their own, which call the first. Of several
processes one compiles, and the others wait for it. Each library is made under a private name and renamed, so that none is read half
made, and two processes may make it at once where the file system has no locks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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

BASE = "base"
GROUPS = {
    "quant": ("quant", "moe"),  # moe.c calls quant.c
    "lora": ("lora",),
    "encoder": ("encoder", "layer_norm"),
    "ceiling": ("ceiling",),
    "float": ("linear_vec", "attention_decode", "attention_prefill", "float_kernels"),
}
"""Files by name that only some models need, a library each. All others are the base, which calls none of them. Only where bfloat16
has products of its own is `float` apart: elsewhere the base has it."""
LONGEST = (
    "linear_vec",
    "attention_decode",
    "attention_prefill",
    "attention_avx512",
    "sampling",
    "quant",
    "linear_bf16",
    "lora",
)
"""Files that take 0.4 s and more, the longest first: the last one to end should be a short one."""

NAME_FLAG = "-install_name" if sys.platform == "darwin" else "-soname"

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


def build_libraries(
    isa: InstructionSet, groups: Iterable[str] = (), *, extra_flags: Sequence[str] = (), folder: Path | None = None
) -> dict[str, Path]:
    """Paths of the base and of these groups; compiles what the cache lacks, all at once. Raises `CannotBuildError`.

    The base has to be loaded first: that is how the others find it.
    """
    compiler = find_compiler()
    folder = folder or cache_folder("native")
    key = content_key(compiler, [*FLAGS, *isa.flags, *extra_flags])
    libraries = {group: folder / f"pelton_native-{key}{_suffix(group)}.so" for group in (BASE, *groups_of(isa, groups))}
    if all(library.exists() for library in libraries.values()):
        return libraries
    with _one_at_a_time(folder):
        lacking = [group for group, library in libraries.items() if not library.exists()]
        if lacking:
            _build(compiler, isa, extra_flags, lacking, libraries)
    return libraries


def _build(
    compiler: str,
    isa: InstructionSet,
    extra_flags: Sequence[str],
    lacking: Sequence[str],
    libraries: dict[str, Path],
) -> None:
    started = time.monotonic()
    flags = [*FLAGS, *isa.flags, *extra_flags]
    with tempfile.TemporaryDirectory(dir=libraries[BASE].parent, prefix="building-") as place:
        sources = {group: _sources(isa, group) for group in lacking}
        _compile(compiler, flags, [source for group in lacking for source in sources[group]], Path(place))
        for group, library in libraries.items():
            if group in lacking:
                made = Path(place) / library.name
                parts = [str(_object(source, Path(place))) for source in sources[group]]
                parts += [] if group == BASE else [str(libraries[BASE])]
                named = f"-Wl,{NAME_FLAG},{library.name}"  # by which a loaded base is found
                _run([compiler, "-shared", named, *extra_flags, *parts, "-lm", "-pthread", "-o", str(made)])
                os.replace(made, library)
    what = ", ".join(lacking)
    logger.info(
        "compiled the CPU kernels (%s) for %s with %s: %.1f s", what, isa.name, compiler, time.monotonic() - started
    )


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait for other processes that compile into this folder, if its file system has locks: ranks or servers would compile the same."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a fork of this process may have the descriptor too
        os.close(descriptor)


def build_library(isa: InstructionSet, *, extra_flags: Sequence[str] = (), folder: Path | None = None) -> Path:
    """The base's path; as `build_libraries`."""
    return build_libraries(isa, extra_flags=extra_flags, folder=folder)[BASE]


def groups_of(isa: InstructionSet, groups: Iterable[str]) -> list[str]:
    """Those of the groups that are libraries of their own for this set."""
    return [group for group in groups if group != "float" or isa.has_bf16]


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
    for part in (*flags, repr(GROUPS), compiler, _version(compiler), platform.machine()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def _suffix(group: str) -> str:
    return "" if group == BASE else f"-{group}"


def _sources(isa: InstructionSet, group: str) -> list[Path]:
    if group != BASE:
        return [SOURCES / f"{name}.c" for name in GROUPS[group]]
    others = {name for group in groups_of(isa, GROUPS) for name in GROUPS[group]}
    return [source for source in sorted(SOURCES.glob("*.c")) if source.stem not in others]


def _object(source: Path, place: Path) -> Path:
    return place / f"{source.stem}.o"


def _compile(compiler: str, flags: Sequence[str], sources: Sequence[Path], place: Path) -> None:
    """As many at once as there are cores: each takes up to 100 MiB."""
    order = {name: number for number, name in enumerate(LONGEST)}
    with ThreadPoolExecutor(_num_cores()) as pool:
        running = [
            pool.submit(_run, [compiler, *flags, "-c", str(source), "-o", str(_object(source, place))])
            for source in sorted(sources, key=lambda source: order.get(source.stem, len(order)))
        ]
        try:
            for one in running:
                one.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
