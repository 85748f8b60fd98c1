"""The pool of threads by itself, in C: what it promises, as it is and with data races or addresses watched."""

import subprocess
from pathlib import Path

import pytest

from pelton_backends.native.build import FLAGS, SOURCES, find_compiler

CHECKS = ("runs", "many_runs", "stall", "once", "no_memory", "nested", "fork", "callers")
SANITIZERS = {"plain": (), "thread": ("-fsanitize=thread",), "address": ("-fsanitize=address,undefined",)}


@pytest.fixture(scope="module", params=SANITIZERS)
def program(request, tmp_path_factory):
    made = tmp_path_factory.mktemp("pool") / request.param
    sources = [Path(__file__).with_name("pool_check.c"), SOURCES / "pool.c", SOURCES / "common.c"]
    flags = [flag for flag in FLAGS if flag not in ("-fPIC", "-fvisibility=hidden")]
    command = [find_compiler(), *flags, "-g", *SANITIZERS[request.param], "-DPELTON_ISA=0", f"-I{SOURCES}", "-pthread"]
    result = subprocess.run([*command, *map(str, sources), "-lm", "-o", str(made)], capture_output=True, text=True)
    if result.returncode and SANITIZERS[request.param]:
        pytest.skip(f"the compiler has no {request.param} sanitizer")
    assert result.returncode == 0, result.stderr
    return made


@pytest.mark.parametrize("check", CHECKS)
def test_the_pool_keeps_its_promises(program, check):
    if program.name == "thread" and check == "fork":
        pytest.skip("threads that a child of fork starts are not watched")
    result = subprocess.run([str(program), check], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr[-3000:]
