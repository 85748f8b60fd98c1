"""Our own programs import from where this process does, and pass the user's PYTHONPATH on."""

import argparse
import subprocess

import pytest

from pelton.utils.own_process import own_program, read_arguments

PROGRAM = """
import argparse, os
from pelton.utils.own_process import read_arguments
parser = argparse.ArgumentParser()
parser.add_argument("--some-number", type=int)
print(read_arguments(parser, None).some_number, os.environ.get("PYTHONPATH"))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "own_program_of_a_test.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_program_of_a_test"


@pytest.mark.parametrize("users", [None, "/somewhere:/else"])
@pytest.mark.parametrize("is_bound", [True, False])
def test_imports_from_here_and_gives_the_users_path_on(program, monkeypatch, users, is_bound):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if users is not None:
        monkeypatch.setenv("PYTHONPATH", users)
    command, environment = own_program(program, is_bound=is_bound, some_number=3)
    assert ("--parent-pid" in command) == ("--die-with-parent" in command) == is_bound
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", str(users)]


def test_ends_at_once_when_the_process_that_started_it_is_gone(program):
    command, environment = own_program(program, some_number=3)
    command[command.index("--parent-pid") + 1] = "0"
    command.remove("--die-with-parent")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")


def test_arguments_of_the_program_are_checked(capsys):
    with pytest.raises(SystemExit):
        read_arguments(argparse.ArgumentParser(prog="program"), ["--unknown", "3"])
    assert "unrecognized arguments: --unknown 3" in capsys.readouterr().err
