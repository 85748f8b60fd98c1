"""Plugin packages in a folder that stands for `site-packages`: as pip leaves them, and what takes a second each without pip."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path


def install(source: Path, site: Path) -> None:
    """Build and install a package by pip, without a network."""
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation",
        "--disable-pip-version-check", "--target", str(site), str(source),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def place(source: Path, site: Path) -> None:
    """Copy a package's modules, and write its name and its entry points beside them."""
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    package = project["name"].replace("-", "_")
    shutil.copytree(source / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    told = site / f"{package}-{project['version']}.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"{name} = {module}" for name, module in project["entry-points"]["pelton"].items()]
    (told / "entry_points.txt").write_text("\n".join(["[pelton]", *lines, ""]))
