"""The README's examples run as they stand, against the demo model."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
SERVER_URL = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def block_with(language: str, word: str) -> str:
    [found] = [block for block in blocks(language) if word in block]
    return found


def run_python(code: str, tmp_path: Path) -> str:
    """As a script without a main guard; what it printed."""
    script = tmp_path / "readme_example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.usefixtures("script_forks")
def test_the_offline_example(tmp_path):
    lines = run_python(block_with("python", "from pelton import LLM"), tmp_path).splitlines()
    assert lines[0].startswith("The capital of France is ->") and "Paris" in lines[0]
    assert any(line.startswith("Water boils at ->") for line in lines)


def test_the_asyncio_example(tmp_path):
    out = run_python(block_with("python", "AsyncLLM"), tmp_path)
    assert len(out.split()) >= 5


@pytest.mark.usefixtures("script_forks")
def test_the_openai_example(demo_server, tmp_path):
    code = block_with("python", "from openai import OpenAI")
    assert SERVER_URL in code
    assert len(run_python(code.replace(SERVER_URL, demo_server), tmp_path).split()) >= 3


def test_the_curl_example(demo_server, tmp_path):
    command = block_with("bash", "curl")
    assert SERVER_URL in command
    done = subprocess.run(
        ["bash", "-c", command.replace(SERVER_URL, demo_server)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert '"object":"chat.completion"' in done.stdout.replace(": ", ":")
    assert "France" in done.stdout or "Paris" in done.stdout


def test_the_shell_examples_are_commands_that_exist(capsys):
    from pelton.cli.main import find_commands

    commands = find_commands("version")
    named = re.findall(r"^pelton (\S+)", block_with("bash", "pelton generate"), re.MULTILINE)
    assert len(named) == 5 and set(named) <= commands.keys()


def test_the_shell_generate_example(capsys):
    from pelton.cli.main import main

    line = next(
        line for line in block_with("bash", "pelton generate").splitlines() if line.startswith("pelton generate")
    )
    argv = shlex.split(line)[1:]
    assert main([*argv, "--max-model-len", "1024", "--kv-cache-memory-bytes", "64M", "--log-level", "error"]) == 0
    assert "Paris" in capsys.readouterr().out


def test_the_plugin_example_is_a_plugin(tmp_path, monkeypatch):
    from types import ModuleType

    from pelton.testing.plugins import plugins_of

    module = ModuleType("readme_plugin")
    code = block_with("python", "def pelton_models")
    exec(compile(code, "README.md", "exec"), module.__dict__)  # noqa: S102  our own README
    assert "mine" in [entry.name for entry in plugins_of(module).entries("pelton_models")]


def test_the_two_commands_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", block_with("bash", "make serve"), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
