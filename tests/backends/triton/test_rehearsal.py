"""What a first start compiles for compute capability 9.0, with a GPU or without: all that later steps launch, and only once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "support" / "pelton_rehearsed.py"


def start(cache: Path, *arguments: str) -> dict[str, int]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, PROGRAM, *arguments], env=environment | {"TRITON_CACHE_DIR": str(cache)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [("llama", "FULL_AND_PIECEWISE"), ("gemma3", "NONE", "fp8_e4m3"), ("qwen3", "PIECEWISE")],
    ids=lambda arguments: arguments[0],
)
def test_steps_of_any_size_find_their_kernels_and_so_does_a_second_start(tmp_path, arguments):
    first = start(tmp_path, *arguments)
    assert first["of_the_last_two"] > 0 and first["of_all"] > 20 and first["of_odd_steps"] == 0
    assert start(tmp_path, *arguments) == {"of_the_last_two": 0, "of_all": 0, "of_odd_steps": 0}
