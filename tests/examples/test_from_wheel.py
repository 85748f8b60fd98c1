"""A package beside Pelton's wheel, without this repository's sources: `tests/tools/plugins_from_wheel.py` does all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[1] / "tools/plugins_from_wheel.py"


def test_an_example_and_a_skeleton_pass_with_the_wheel_alone():
    done = subprocess.run([sys.executable, str(TOOL), "no-repeat", "settings"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 packages pass with the wheel alone" in done.stdout


def test_a_name_that_there_is_not():
    done = subprocess.run([sys.executable, str(TOOL), "nothing"], capture_output=True, text=True)
    assert done.returncode == 1 and "There is no 'nothing'; there is dummy-device" in done.stderr
