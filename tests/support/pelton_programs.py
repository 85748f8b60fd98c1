"""Programs of this folder that compile Triton's kernels, from tests in a process that interprets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_program(name: str, *arguments: str, **environment: str) -> list[dict[str, Any]]:
    """The objects that it prints, a line each."""
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(name), *arguments], env=inherited | environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
