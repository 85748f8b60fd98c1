"""A server where the machine has no memory, no temporary folder or no cache folder: one line that says so, and nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
from pelton_e2e import serving

from pelton.engine.process_client import EngineConnection
from pelton.errors import ConfigError, PluginError
from pelton.plugins import blamed
from pelton.testing.models import make_tiny_checkpoint
from pelton_backends.native.build import COMPILERS, find_compiler

LIMITED = """
import os, resource, sys
limit = int(sys.argv[2])
resource.setrlimit(getattr(resource, sys.argv[1]), (limit, limit))
os.execv(sys.executable, [sys.executable, "-m", "pelton.cli.main", "serve", *sys.argv[3:]])
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


def serve_with(limit: str, value: int, *arguments: str) -> str:
    """What a server says that ends by itself; its last line."""
    command = [sys.executable, "-c", LIMITED, limit, str(value), *arguments, "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode not in (0, None)
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return done.stderr.strip().splitlines()[-1]


def test_no_temporary_folder_is_one_line(checkpoint):
    last = serve_with("RLIMIT_FSIZE", 0, checkpoint)
    assert last.startswith("pelton serve: ") and "temporary" in last and "TMPDIR" in last


def test_memory_that_is_not_there_is_not_the_plugins_mistake():
    def fails(error: OSError) -> None:
        with blamed("Model 'llama'", "somewhere", "Fix it."):
            raise error

    with pytest.raises(ConfigError, match=r"Model 'llama' finds no memory \(\[Errno 12\]"):
        fails(OSError(12, "Cannot allocate memory"))
    with pytest.raises(PluginError, match="Fix it"):
        fails(OSError(2, "No such file"))


@pytest.mark.parametrize(
    "last, shown",
    [
        ("INFO 10:57:23 allocate KV cache and warm up: 1.6 s", ""),
        ("DEBUG 10:57:23 x", ""),
        ("terminate called after throwing", " Its last line: terminate called after throwing"),
    ],
)
def test_a_line_of_progress_is_not_told_as_a_cause(last, shown):
    connection = SimpleNamespace(_failure=None, _last_lines=deque([last]))
    assert EngineConnection._why(connection) == shown  # type: ignore[arg-type]


def test_a_cache_folder_that_cannot_be_written_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    cache, temporary = tmp_path / "cache", tmp_path / "tmp"
    cache.write_text("a file, where the folder should be")
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("TMPDIR", str(temporary))
    # The kernels are compiled anew: in half of the time without optimization.
    compiler = tmp_path / "bin" / COMPILERS[0]
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\nexec {find_compiler()} "$@" -O0\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(compiler.parent), prepend=os.pathsep)
    with serving(checkpoint, "--max-num-seqs", "2", log=tmp_path / "log") as (_, process):
        process.terminate()
        assert process.wait(90) == 0
    end = time.monotonic() + 90
    while (left := list(Path(temporary).glob("pelton-*"))) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left
