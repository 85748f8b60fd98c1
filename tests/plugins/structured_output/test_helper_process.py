"""A process that takes too long or too much memory: the reason is told, and the next question is answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from pelton_plugins.structured_output import helper_process
from pelton_plugins.structured_output.helper_process import HelperProcess, NoAnswerError

SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, {folder!r})
from helper_process import serve

def set_up(data):
    def answer(text):
        if text == "allocate":
            bytearray(5 << 30)
        if text == "abort":
            os.abort()
        if text == "overflow":
            os.kill(os.getpid(), signal.SIGSEGV)
        if text == "sleep":
            time.sleep(600)
        if text == "refuse":
            raise ValueError("not that")
        return data + text.encode()
    return answer

serve(set_up)
"""


@pytest.fixture
def process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(Path(helper_process.__file__).parent)))
    made = HelperProcess(str(script), b"set up: ")
    yield made
    made.close()


@pytest.mark.parametrize(
    "text, timeout_s, why, goes_on",
    [
        ("allocate", 60, "it takes more memory than it may", True),
        ("abort", 60, "it takes more memory than it may", False),  # as native code does that gets none
        ("overflow", 60, "its compiler descends without end, as for numbers near -2**63", False),
        ("sleep", 0.3, "it takes more than 0.3 s", False),
        ("refuse", 60, "not that", True),
    ],
)
def test_why_there_is_no_answer(process, text, timeout_s, why, goes_on):
    assert process.ask("a", 60) == b"set up: a"
    first = process._process
    with pytest.raises(NoAnswerError) as caught:
        process.ask(text, timeout_s)
    assert str(caught.value) == why
    assert process.ask("b", 60) == b"set up: b"
    assert (process._process is first) == goes_on
    assert goes_on or first.poll() is not None
