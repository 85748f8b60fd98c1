"""Pelton's cache folder: where it is, and what happens where it cannot be written."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pelton.utils import cache_folder
from pelton.utils.cache_folder import user_cache


@pytest.fixture
def make():
    """`cache_folder` without what earlier calls found."""
    return cache_folder.cache_folder.__wrapped__


def test_is_the_users_cache_folder(monkeypatch, tmp_path, make):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert make("triton") == tmp_path / "pelton/triton"
    assert (tmp_path / "pelton/triton").is_dir() and not list((tmp_path / "pelton/triton").iterdir())


@pytest.mark.parametrize("given", ["", "relative/folder"])
def test_is_under_home_by_default(monkeypatch, tmp_path, given):
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / ".cache/pelton"


def test_a_folder_that_cannot_be_made_is_replaced_by_a_private_one(monkeypatch, tmp_path, make, caplog):
    (tmp_path / "pelton").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING, "pelton"):
        folder = make("triton")
    assert folder.is_dir() and not folder.is_relative_to(tmp_path / "pelton") and folder.stat().st_mode & 0o077 == 0
    assert len(caplog.records) == 1 and str(folder) in caplog.text
    Path(folder).rmdir()


def test_an_engine_process_leaves_no_private_folder(tmp_path):
    (tmp_path / "pelton").write_text("in the way")
    code = """
from pelton.utils.cache_folder import cache_folder
from pelton.utils.own_process import end_process
folder = cache_folder("triton")
print(folder, folder.is_dir(), flush=True)
end_process(3)
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    folder, was_there = result.stdout.split()
    assert result.returncode == 3 and was_there == "True" and not Path(folder).exists(), result.stderr


def test_one_owner_is_asked_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache_folder.cache_folder.cache_clear()
    try:
        first = cache_folder.cache_folder("x")
        monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
        assert cache_folder.cache_folder("x") == first
    finally:
        cache_folder.cache_folder.cache_clear()
