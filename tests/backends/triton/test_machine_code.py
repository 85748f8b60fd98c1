"""Dependent launch as the machine sees it: kernels compiled for compute capability 9.0, no GPU needed.

Every program waits for the kernels before (ACQBULK) before it writes anything or adds to a counter, lets the next one start
(PREEXIT), and has its first weights on the way by then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pelton_sm90
import pytest

pytestmark = pytest.mark.skipif(not (pelton_sm90.BIN / "cuobjdump").exists(), reason="Triton brings no cuobjdump here")

LOADS = {"LDG", "LDGSTS", "UTMALDG"}
WRITES = {"STG", "ATOM", "ATOMG", "RED", "REDG", "REDUX", "UTMASTG", "UTMAREDG"}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Instructions without their modifiers, of each seam's one kernel."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    made = subprocess.run(
        [sys.executable, str(Path(pelton_sm90.__file__))], env=environment, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)
    assert all(len(of_seam) == 1 for of_seam in found.values()), "a seam is one kernel"
    return {name: [text.split(".")[0] for text in of_seam[0]] for name, of_seam in found.items()}


def test_nothing_is_written_before_the_wait(kernels: dict[str, list[str]]) -> None:
    for name, code in kernels.items():
        assert "PREEXIT" in code, f"{name}: the next kernel may not start early"
        assert "ACQBULK" in code, f"{name}: it never waits for the kernels before"
        early = code[: code.index("ACQBULK")]
        assert not WRITES & set(early), f"{name}: it writes before the wait"
        assert WRITES & set(code), f"{name}: the list of writing instructions knows none of this kernel's"


def test_weights_are_on_their_way_before_the_wait(kernels: dict[str, list[str]]) -> None:
    for name, code in kernels.items():
        early = code[: code.index("ACQBULK")]
        assert LOADS & set(early), f"{name}: nothing is loaded before the wait"
