"""`pelton bench busy`: engines in processes of their own, loops beside them, and what becomes of both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pelton.cli.main import main
from pelton.errors import EngineError
from pelton_plugins.bench.cpu import busy
from pelton_plugins.bench.cpu.busy import BusyArguments, Engine

TINY = ["--num-seqs", "2", "--input-len", "4", "--output-len", "3", "--seconds", "0.05", "--rounds", "2"]
SITUATIONS = ["alone", "beside one busy loop", "beside two", "two engines, the one", "two engines, the other"]


@pytest.fixture(scope="module", autouse=True)
def all_servers_are_forks() -> None:
    """None is: all children of this process are looked at, a zygote too."""


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_every_situation_is_measured_and_nothing_goes_on_running(model, fake_flags, tmp_path, capsys, monkeypatch):
    counts, popen, before = [], subprocess.Popen, children()

    def count(command, *arguments, **options):
        counts.append(busy.LOOP in command)
        return popen(command, *arguments, **options)

    monkeypatch.setattr(busy.subprocess, "Popen", count)
    out = tmp_path / "busy.json"
    assert main(["bench", "busy", model, *TINY, "--output-json", str(out), *fake_flags]) == 0
    result = json.loads(out.read_text())
    assert [*result["medians"]] == [*result["shares"]] == SITUATIONS
    for situation in SITUATIONS:
        figures = result["all"][situation]
        assert len(figures["ms_a_token"]) == len(figures["out_tok_s"]) == 2
        assert min(figures["ms_a_token"]) > 0 and min(figures["out_tok_s"]) > 0
    alone, beside = result["medians"]["alone"], result["medians"]["beside two"]
    assert result["shares"]["alone"] == {"one_request": 1.0, "many_requests": 1.0}
    assert result["shares"]["beside two"] == pytest.approx(
        {
            "one_request": alone["ms_a_token"] / beside["ms_a_token"],
            "many_requests": beside["out_tok_s"] / alone["out_tok_s"],
        }
    )
    assert result["device"] == "fake" and result["num_seqs"] == 2
    assert counts == [False, False, *[True] * 6], "two engines; one loop and then two, in each round"
    assert children() <= before, "what other tests have left may end meanwhile"
    text = capsys.readouterr().out
    assert "4 in, 3 out, medians of 2 rounds, fake" in text and "two engines, the other" in text and "100%" in text


def test_an_engine_that_does_not_start_is_an_error(tmp_path):
    engine = Engine({"model": str(tmp_path / "none"), "log_level": "error"}, BusyArguments())
    try:
        with pytest.raises(EngineError, match=r"ended with status 1; its own message is above"):
            engine.wait_until_ready()
    finally:
        engine.end()
