"""The pool of threads by itself, in C: what it promises, as it is and with data races or addresses watched."""

import functools
import subprocess
from pathlib import Path

import pytest

from pelton_backends.native.build import FLAGS, SOURCES, find_compiler

CHECKS = ("runs", "many_runs", "stall", "once", "no_memory", "nested", "fork", "callers")
SANITIZERS = {"plain": (), "thread": ("-fsanitize=thread",), "address": ("-fsanitize=address,undefined",)}
GRID = [
    *(("plain", check) for check in ("stall", "fork", "callers")),  # others take no time that counts
    *(("thread", check) for check in CHECKS if check != "fork"),  # threads that its child starts are not watched
    *(("address", check) for check in CHECKS),
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A function from sanitizer to its program, each made once: an indirect parameter is made again for every case."""
    return functools.cache(functools.partial(compile_program, tmp_path_factory.mktemp("pool")))


def compile_program(folder, sanitizer):
    made = folder / sanitizer
    sources = [Path(__file__).with_name("pool_check.c"), SOURCES / "pool.c", SOURCES / "common.c"]
    flags = [flag for flag in FLAGS if flag not in ("-fPIC", "-fvisibility=hidden")]
    command = [find_compiler(), *flags, "-g", *SANITIZERS[sanitizer], "-DPELTON_ISA=0", f"-I{SOURCES}", "-pthread"]
    result = subprocess.run([*command, *map(str, sources), "-lm", "-o", str(made)], capture_output=True, text=True)
    if result.returncode and SANITIZERS[sanitizer]:  # which this compiler has not
        plain = [part for part in command if part not in SANITIZERS[sanitizer]]
        result = subprocess.run([*plain, *map(str, sources), "-lm", "-o", str(made)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return made


@pytest.mark.parametrize("sanitizer, check", GRID)
def test_the_pool_keeps_its_promises(programs, sanitizer, check):
    result = subprocess.run([str(programs(sanitizer)), check], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
