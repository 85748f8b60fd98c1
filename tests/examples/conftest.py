"""The example plugins in a folder of their own, one of them installed as a user would."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pelton_site import install, place

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = {
    "tiny_model": "pelton-tiny-model",
    "jsonl_stats": "pelton-jsonl-stats",
    "dummy_device": "pelton-dummy-device",
    "window_model": "pelton-window-model",
    "grid_vectors": "pelton-grid-vectors",
    "no_repeat": "pelton-no-repeat",
}


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages, the first of them built by pip."""
    folder = tmp_path_factory.mktemp("site")
    first, *others = PLUGINS.values()
    install(ROOT / "examples/plugins" / first, folder)
    for name in others:
        place(ROOT / "examples/plugins" / name, folder)
    return folder


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The packages importable in this process; gone again afterwards, so that other tests do not see them."""
    monkeypatch.syspath_prepend(str(site))
    # For engine processes.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
    importlib.invalidate_caches()
    yield site
    for name in [name for name in sys.modules if name.split(".")[0] in {f"pelton_{plugin}" for plugin in PLUGINS}]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's stat logger writes where it is started."""
    monkeypatch.chdir(tmp_path)
