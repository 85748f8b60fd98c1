"""One distribution with four import packages, and nothing else of the repository."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"pelton", "pelton_platforms", "pelton_backends", "pelton_plugins"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    code = f"from hatchling.builders.wheel import WheelBuilder; print(*WheelBuilder({str(ROOT)!r}).build(directory={str(folder)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=folder)
    [path] = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_four_packages_and_no_more(wheel):
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES
    assert all(f"{package}/py.typed" in wheel.namelist() for package in PACKAGES)
    assert not [name for name in wheel.namelist() if "test_" in name or "examples" in name or name.endswith(".pyc")]


def test_the_wheel_has_every_module_of_the_trees(wheel):
    for tree in ("core/pelton", "platforms/pelton_platforms", "backends/pelton_backends", "plugins/pelton_plugins"):
        parent = (ROOT / tree).parent
        found = [*(ROOT / tree).rglob("*.py"), *(ROOT / tree).rglob("*.toml")]
        ours = {path.relative_to(parent).as_posix() for path in found}
        assert ours <= set(wheel.namelist())


def test_the_wheel_names_its_licence_entry_points_and_script(wheel):
    info = next(name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name)
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    points = wheel.read(f"{info}/entry_points.txt").decode()
    assert "pelton = pelton.cli.main:main" in points and "core = pelton.builtin" in points
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata and "Requires-Python: >=3.11" in metadata
