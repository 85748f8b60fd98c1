"""The `pelton` program: light to start, one line for what a user did wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

import pelton
from pelton.cli import main as main_module
from pelton.cli.main import main
from pelton.entries import CommandEntry
from pelton.errors import EngineError, PluginError

HEAVY = (
    "torch", "transformers", "litestar", "uvicorn", "numpy", "zmq", "jinja2", "tokenizers", "huggingface_hub",
    "prometheus_client", "safetensors", "triton", "asyncio", "ssl", "http.client",
)  # fmt: skip


def modules_after(code: str) -> set[str]:
    """Modules that a fresh interpreter has loaded after `code`."""
    report = "import sys; sys.stderr.write('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True)
    return set(done.stderr.splitlines())


COMMANDS = {
    "help": "from pelton.cli.main import main; main(['--help'])",
    "version": "from pelton.cli.main import main; main(['version'])",
    "flag-version": "from pelton.cli.main import main; main(['--version'])",
    "plugins": "from pelton.cli.main import main; main(['plugins'])",
    "collect-env": "from pelton.cli.main import main; main(['collect-env'])",
    "import": "import pelton",
    "config": "import pelton; pelton.EngineConfig, pelton.SamplingParams, pelton.hookimpl",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_starts_without_heavy_modules(name):
    loaded = modules_after(COMMANDS[name])
    assert not {module for module in HEAVY if module in loaded}


def test_help_loads_no_command():
    loaded = modules_after(COMMANDS["help"])
    assert not {module for module in loaded if module.startswith("pelton.cli.")} - {"pelton.cli.main"}
    assert not {module for module in loaded if module.startswith("pelton_plugins.server.")} - {
        "pelton_plugins.server.plugin"
    }


def test_serve_help_loads_no_torch():
    loaded = modules_after("from pelton.cli.main import main; main(['serve', '--help'])")
    assert not {"torch", "transformers"} & loaded


def test_import_of_pelton_loads_only_what_finds_moved_modules():
    own = {module for module in modules_after("import pelton") if module.startswith("pelton")}
    assert own == {"pelton", "pelton.moved"}


def test_help_lists_every_command_with_its_help(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("serve", "chat", "generate", "plugins", "backends", "collect-env", "version"):
        line = next(line for line in text.splitlines() if line.startswith(f"  {name} "))
        assert len(line.split()) > 2


@pytest.mark.parametrize("argv", [[], ["-h"], ["help"]])
def test_help_has_several_spellings(argv, capsys):
    assert main(argv) == 0
    assert "usage: pelton COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["serve", "chat", "generate", "plugins", "backends", "collect-env", "version"])
def test_each_command_has_help(name, capsys):
    assert main([name, "--help"]) == 0
    assert f"usage: pelton {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name, shown", [("complete", "generate"), ("collect_env", "collect-env")])
def test_vllms_names_of_commands(name, shown, capsys):
    assert main([name, "--help"]) == 0
    assert f"usage: pelton {shown}" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--version"], ["-V"], ["version"]])
def test_version(argv, capsys):
    assert main(argv) == 0
    assert f"pelton {pelton.__version__}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, message",
    [
        (["serv"], "error: Unknown command 'serv'. Did you mean 'serve'? Commands: backends, bench, chaos, chat,"),
        (["--hlep"], "error: Unknown flag '--hlep'."),
        (["plugins", "--chek"], "error: Unknown flag --chek. Did you mean '--check'?"),
        (
            ["plugins", "chek"],
            "error: pelton plugins has no 'chek'. Did you mean 'check'? Write pelton plugins [list], new KIND",
        ),
        (["version", "now"], "error: pelton version takes no arguments; got 'now'."),
        (["generate", "x", "--max-num-seqs", "many"], "error: --max-num-seqs is 'many'; expected a whole number"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(argv, message, capsys):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(message)
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    "error, status",
    [
        (EngineError("boom"), 1),
        (PluginError("boom"), 2),
        (KeyboardInterrupt(), 130),
        (SystemExit(3), 3),
        (SystemExit("x"), 1),
    ],
)
def test_exit_status_by_error(error, status, monkeypatch):
    def fail(argv):
        raise error

    monkeypatch.setattr(main_module, "_run", fail)
    assert main([]) == status


def test_a_broken_plugin_stops_all_commands_but_those_that_tell(monkeypatch, capsys):
    monkeypatch.setenv("PELTON_PLUGINS", "no-such-plugin")
    for command in ("serve", "generate", "backends"):
        assert main([command, "--help"]) == 2
        assert "PELTON_PLUGINS names 'no-such-plugin'" in capsys.readouterr().err
    assert main(["version"]) == 0
    assert main(["collect-env"]) == 0
    assert "broken: PELTON_PLUGINS names 'no-such-plugin'" in capsys.readouterr().out
    assert main(["plugins", "--check"]) == 1
    assert "FAIL all together" in capsys.readouterr().out


def test_a_reader_that_goes_away_is_no_traceback():
    process = subprocess.Popen(
        [sys.executable, "-c", "from pelton.cli.main import main; import sys; sys.exit(main(['--help']))"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 141


def test_ctrl_c_is_no_traceback(tmp_path):
    """Interrupted while it waits for prompts on stdin."""
    code = (
        "import signal, sys, pathlib; from pelton.cli.main import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a runner in the background hands down SIG_IGN
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "sys.exit(main(['generate']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(1.0)  # past the imports of the command, into the read
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (
            ValueError("boom"),
            2,
            "error: Command 'mine' (acme:run) fails: ValueError: boom. Fix the plugin, or leave it out with",
        ),
        (KeyError("x"), 2, "error: Command 'mine' (acme:run) fails: KeyError: 'x'. Fix the plugin, or"),
        (EngineError("no engine"), 1, "error: no engine"),
        (BrokenPipeError(), 141, ""),
    ],
    ids=str,
)
@pytest.mark.parametrize("level", [None, "debug"])
def test_a_plugins_command_that_fails_is_one_line(error, status, line, level, capfd, monkeypatch):
    """The traceback comes with the level that has all that is known, and no mistake in that setting hides the line."""

    def fail(argv):
        raise error

    monkeypatch.setattr(main_module, "find_commands", lambda name: {"mine": CommandEntry(name="mine", load="acme:run")})
    monkeypatch.setattr(CommandEntry, "resolve", lambda self: fail)
    monkeypatch.setattr(os, "dup2", lambda *ends: None)  # stdout stays the test's
    monkeypatch.setenv("PELTON_LOG_LEVEL", level) if level else monkeypatch.delenv("PELTON_LOG_LEVEL", raising=False)
    assert main(["mine"]) == status
    told = capfd.readouterr().err
    assert ("Traceback" in told) == (level == "debug" and bool(line))
    assert told.splitlines()[-1].startswith(line) if line else told == ""


def test_our_own_mistakes_keep_their_traceback(monkeypatch):
    entry = CommandEntry(name="mine", load="pelton_plugins.commands.version:run")
    monkeypatch.setattr(main_module, "find_commands", lambda name: {"mine": entry})
    monkeypatch.setattr(CommandEntry, "resolve", lambda self: lambda argv: [][1])
    with pytest.raises(IndexError):
        main(["mine"])


def test_files_that_cannot_be_written_are_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["plugins", "new", "op", "mine", "--folder", str(tmp_path / "file/mine")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: The package cannot be written to ")
    assert told.endswith("Give another --folder.\n")
    assert len(told.splitlines()) == 1


def test_a_commands_usage_names_it(capsys, monkeypatch):
    """Whoever writes a command need not tell `parse_flags` what it is called."""
    from pelton_plugins.flags import parse_flags

    monkeypatch.setattr(
        "pelton.cli.main.find_commands", lambda name: {"mine": CommandEntry(name="mine", load=f"{__name__}:x")}
    )
    monkeypatch.setattr(CommandEntry, "resolve", lambda self: lambda argv: parse_flags(argv, positional=None) and 0)
    assert main(["mine", "--help"]) == 0
    assert "usage: pelton mine" in capsys.readouterr().out
