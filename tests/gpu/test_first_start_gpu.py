"""On a machine that has compiled nothing yet, no request waits for a compiler; and a second start compiles nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pelton.testing.models import make_tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

PROGRAM = Path(__file__).parents[1] / "support" / "pelton_first_start.py"


def start(checkpoint: Path, cache: Path) -> tuple[str, str]:
    """The log until the engine is ready, and from then on."""
    done = subprocess.run(
        [sys.executable, PROGRAM, checkpoint], env=os.environ | {"TRITON_CACHE_DIR": str(cache)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    before, _, after = done.stderr.partition("READY\n")
    return before, after


def test_requests_wait_for_no_compiler(tmp_path: Path) -> None:
    checkpoint = make_tiny_checkpoint(tmp_path / "llama", "llama", head_dim=64, max_position_embeddings=4096)
    before, after = start(checkpoint, tmp_path / "triton")
    print(re.findall(r"compile kernels: .*", before), re.findall(r"compiled .*", before + after))
    assert "compile kernels: " in before and "Not all kernels" not in before
    assert re.findall(r"compiled (\w+)", after) == []
    before, after = start(checkpoint, tmp_path / "triton")
    assert "compile kernels" not in before
    assert re.findall(r"compiled (\w+)", before + after) == []
