"""Libraries that only some models need: what is in them, when they are made, and what an op loads."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pelton_isas import AVAILABLE

from pelton_backends.native import build
from pelton_backends.native.build import BASE, GROUPS, CannotBuildError, build_libraries
from pelton_backends.native.isa import ISAS

OPS = Path(__file__).parents[2] / "support" / "pelton_native_groups.py"
WITHOUT_LORA = """#!/bin/sh
case "$*" in *lora.c*) echo 'lora.c:1: error: no such luck' >&2; exit 1;; esac
exec {compiler} "$@"
"""
NOTES = """#!/bin/sh
case "$*" in *--version*) exit 0;; esac
for last; do :; done
echo "+ $*" >> {log}
sleep 0.2
echo "- $*" >> {log}
: > "$last"
"""
"""A compiler that writes down when it begins and ends, and makes an empty file."""


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A base, and a group that calls it."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    shared = '__attribute__((visibility("protected")))'
    (folder / "one.c").write_text(f"{shared} int one(void) {{ return 1; }}\n")
    (folder / "two.c").write_text(
        'int one(void);\n__attribute__((visibility("default"))) int two(void) { return one() + 1; }\n'
    )
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setattr(build, "GROUPS", {"more": ("two",)})
    return folder


@pytest.fixture
def made(tmp_path):
    folder = tmp_path / "made"
    folder.mkdir()
    return folder


def test_a_group_is_made_when_it_is_asked_for(sources, made, caplog):
    caplog.set_level("INFO")
    (base,) = build_libraries(ISAS[0], folder=made).values()
    before = base.stat().st_mtime_ns
    libraries = build_libraries(ISAS[0], ["more"], folder=made)
    assert [*libraries] == [BASE, "more"] and libraries[BASE] == base and base.stat().st_mtime_ns == before
    assert sorted(made.iterdir()) == sorted(libraries.values()), "nothing else is left behind"
    assert [record.args[0] for record in caplog.records] == ["base", "more"]
    build_libraries(ISAS[0], ["more"], folder=made)
    assert len(caplog.records) == 2


def test_a_group_calls_the_base_that_is_loaded_wherever_both_lie(sources, made, tmp_path):
    libraries = build_libraries(ISAS[0], ["more"], folder=made)
    made.rename(tmp_path / "moved")
    paths = [tmp_path / "moved" / path.name for path in libraries.values()]
    code = f"import ctypes; found = [ctypes.CDLL(path) for path in {[*map(str, paths)]}]; print(found[1].two())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "2\n", result.stderr


def test_a_group_without_its_base_is_not_loaded(sources, made):
    """A base of the same content in another folder would be another base."""
    libraries = build_libraries(ISAS[0], ["more"], folder=made)
    with pytest.raises(OSError, match=libraries[BASE].name):
        ctypes.CDLL(str(libraries["more"]))


def test_as_many_files_as_cores_are_compiled_at_once_the_longest_first(tmp_path, monkeypatch, made):
    log, compiler = tmp_path / "log", tmp_path / "cc"
    compiler.write_text(NOTES.format(log=log))
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "COMPILERS", (str(compiler),))
    monkeypatch.setattr(build, "_num_cores", lambda: 2)
    build_libraries(ISAS[0], folder=made)
    lines = [line for line in log.read_text().splitlines() if " -c " in line]
    running = most = 0
    for line in lines:
        running += 1 if line[0] == "+" else -1
        most = max(most, running)
    assert most == 2
    begun = [Path(line.split(" -c ")[1].split()[0]).stem for line in lines if line[0] == "+"]
    assert {*begun[:2]} == {*build.LONGEST[:2]}
    assert (
        len(begun)
        == len({*begun})
        == len([*build.SOURCES.glob("*.c")]) - sum(len(names) for group, names in GROUPS.items() if group != "float")
    )


def test_every_file_of_a_group_is_there():
    names = [name for files in GROUPS.values() for name in files]
    assert len(names) == len({*names})
    assert {*names, *build.LONGEST} <= {source.stem for source in build.SOURCES.glob("*.c")}


def test_a_failure_in_a_group_is_told_before_a_file_is_left(sources, made):
    (sources / "two.c").write_text("no C\n")
    with pytest.raises(CannotBuildError, match=r"the C compiler failed: .*two\.c"):
        build_libraries(ISAS[0], ["more"], folder=made)
    assert [*made.iterdir()] == []
    build_libraries(ISAS[0], folder=made)


@pytest.mark.usefixtures("script_forks")
def test_a_group_that_cannot_be_compiled_is_a_reason_against_its_ops_alone(tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text(WITHOUT_LORA.format(compiler=shutil.which("gcc") or shutil.which("cc")))
    compiler.chmod(0o755)
    code = """
from pelton_backends.native import library
library.EXTRA_FLAGS[:] = ["-O0"]
library.use_isa("plain")
print(library.reason_against("lora"), "|", library.reason_against())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True,
        env={**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    assert result.stdout == "the C compiler failed: lora.c:1: error: no such luck | None\n", result.stderr


@pytest.mark.usefixtures("script_forks")
@pytest.mark.skipif(AVAILABLE[-1] != ISAS[-1].name, reason=f"this CPU has no {ISAS[-1].name}")
def test_an_op_loads_what_it_calls_and_no_more():
    """A function that was not loaded would end the process: each op has one of its own."""
    result = subprocess.run(
        [sys.executable, str(OPS)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(OPS.parent), *sys.path])},
    )  # fmt: skip
    found = json.loads(result.stdout)
    assert {name: found[name] for name in ("bfloat16", "silu", "logits", "attention")} == {
        name: [] for name in ("bfloat16", "silu", "logits", "attention")
    }, result.stderr
    assert found["experts"] == found["experts in blocks"] == ["quant"] and found["adapter"] == ["lora"], result.stderr
    others = [*found][[*found].index("float32") :]
    assert len(others) == 11 and all("float" in (found[name] or []) for name in others), (found, result.stderr)
