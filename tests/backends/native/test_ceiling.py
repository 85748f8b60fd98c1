"""The measured ceilings: numbers that a CPU can have, printed as asked."""

import io
import json
import sys

from pelton_backends.native import ceiling, library


def test_ceilings_are_speeds_of_a_cpu(isa, capsys):
    ceiling.main(["--isa", isa, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["isa"] == isa
    assert 0.1 < found["gflops"] < 1e6
    assert 0.1 < found["read_gb_s"] < 1e5


def test_ceilings_in_words(capsys):
    ceiling.main([])
    assert capsys.readouterr().out.startswith(f"{library.isa_in_use().name}: ")


def test_ceilings_are_measured_again_for_each_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n"))
    monkeypatch.setattr(ceiling, "READ_BYTES", 8 << 20)
    ceiling.main(["--json", "--follow"])
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 2
