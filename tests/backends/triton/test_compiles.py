"""The interpreter takes what the compiler refuses (a variable whose dtype a branch changes): every cache's kernels are
compiled too, for an H200, with or without one here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("compile_for_hopper.py")
DECODE = ("early", "split", "streamed")


def compile_for_hopper(*arguments: str) -> list[dict[str, str | int]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, PROGRAM, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "dtype, kv_dtype, names",
    [
        ("bfloat16", "fp8_e4m3", (*DECODE, "prefill", "cascade", "write")),
        ("bfloat16", "fp8_e5m2", (*DECODE, "write")),
        ("float16", "bfloat16", ("streamed",)),
    ],
)
def test_caches_of_another_dtype_have_kernels(dtype: str, kv_dtype: str, names: tuple[str, ...]) -> None:
    assert {kernel["of"] for kernel in compile_for_hopper(dtype, kv_dtype, *names)} == set(names)


def test_decode_keeps_all_in_registers() -> None:
    kernels = compile_for_hopper("bfloat16", "bfloat16", *DECODE)
    assert [kernel["of"] for kernel in kernels if kernel["stack"] == 0] == list(DECODE), kernels
