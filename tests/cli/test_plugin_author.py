"""`pelton plugins new` and `check`: every skeleton is a package that works, and what is broken is told in a line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pelton_site import install, place

from pelton import hookspecs
from pelton.cli.main import main
from pelton.errors import ConfigError
from pelton_plugins.commands.plugin_author import SKELETONS, kinds, write_skeleton

pytestmark = pytest.mark.usefixtures("script_forks")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A skeleton of each kind, called after it."""
    folder = tmp_path_factory.mktemp("written")
    return {kind: write_skeleton(kind, f"my-{kind}", str(folder / kind)) for kind in kinds()}


@pytest.fixture(scope="module")
def site(written: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them, one installed by pip: they share one pyproject.toml."""
    folder = tmp_path_factory.mktemp("site")
    for kind, source in written.items():
        (install if kind == "lora-resolver" else place)(source, folder)
    return folder


def run(site: Path, *command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=site, env=environ)


def check(site: Path, package: str) -> subprocess.CompletedProcess[str]:
    return run(site, "-m", "pelton", "plugins", "check", package)


def test_there_is_a_skeleton_for_every_hook():
    texts = "".join(file.read_text() for file in SKELETONS.glob("*/plugin.py"))
    assert {name for name in hookspecs.hooks() if f"def {name}(" not in texts} == set()


def test_every_skeleton_passes_its_suites(written, site):
    """All in one process. Of attention the cases alone: its other tests run over the example's like backend."""
    tests = [str(folder / "tests") for folder in written.values()]
    heavy = "Attention and (rubbish or captured or bound or selected or nan or blocks or wider)"
    done = run(
        site, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", "--rootdir", str(site),
        "-k", f"not ({heavy})", *tests,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    collected = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert collected > 5 * len(written)


def test_check_says_a_line_for_each_check(site):
    done = check(site, "pelton-my-lora-resolver")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ok    my_lora_resolver loads, for hook API >=1,<2")
    assert any(
        re.match(r"ok    MyLoraResolverResolver: a name that is not its own .* \(\d+ cases\)", line) for line in lines
    )
    assert all(re.match(r"(ok  |skip)  \S", line) for line in lines) and len(lines) >= 8
    assert re.search(r"\d+ passed, 0 failed", done.stderr)


def package(site: Path, name: str, **files: str) -> None:
    """A package as an installer leaves it, with these modules."""
    (site / name).mkdir(parents=True)
    for module, text in {"__init__": "", **files}.items():
        (site / name / f"{module}.py").write_text(text)
    facts = site / f"{name}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[pelton]\n{name} = {name}.plugin\n")


POLICY_PLUGIN = """
from pelton import hookimpl
from pelton.entries import Entry

PELTON_API = ">=1,<2"

@hookimpl
def pelton_scheduling_policies():
    return [Entry(name="unsteady", load="unsteady.policy:Unsteady")]
"""
POLICY = """
from pelton.scheduler.policy import SchedulingPolicy

class Unsteady(SchedulingPolicy):
    def rank(self, request):
        return (0,)
"""


def test_a_plugin_that_breaks_its_interface_fails_with_the_reason(tmp_path):
    """It names no suites of its own: those of what it offers are found."""
    package(tmp_path, "unsteady", plugin=POLICY_PLUGIN, policy=POLICY)
    done = check(tmp_path, "unsteady")
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert "every request gets its tokens" in failed[0] and "two requests have the same rank" in failed[0]


SEVERAL_PLUGIN = """
from pelton import hookimpl
from pelton.entries import Entry, OpEntry, StatLoggerEntry

PELTON_API = ">=1,<2"

@hookimpl
def pelton_ops(device_type):
    return [OpEntry(name="of_own_form", op="linear", load="several.parts:OwnForm")] if device_type == "cpu" else []

@hookimpl
def pelton_draft_proposers():
    return [Entry(name="again", load="several.parts:Again")]

@hookimpl
def pelton_stat_loggers():
    return [StatLoggerEntry(name="counts", load="several.parts:Counts")]
"""
SEVERAL_PARTS = """
from pelton.spec_decode.drafter import Drafter

class OwnForm:
    handles = frozenset({"weight_format", "has_bias"})

    @staticmethod
    def unsupported(needs):
        return [] if needs.linear.weight_format == "own" else ["another weight format"]

    @staticmethod
    def bind(needs, tensors):
        return lambda x: x

class Again(Drafter):
    def load_weights(self): ...
    def follow(self, step): ...
    def draft(self, rows): ...

class Counts:
    def __init__(self, config, engine_index=0): ...
    def record(self, scheduler_stats, iteration_stats): ...
    def log(self): ...
    def engine_started(self, info):
        self.name = info.no_such_field
"""


def test_what_an_author_has_to_write_is_said_by_its_name(tmp_path):
    """An op for a weight format of its own fails nothing, and a stat logger that fails at the start does."""
    package(tmp_path, "several", plugin=SEVERAL_PLUGIN, parts=SEVERAL_PARTS)
    lines = check(tmp_path, "several").stdout.splitlines()
    (op,) = (line for line in lines if "ops of_own_form" in line and "load" not in line)
    assert op.startswith("skip") and "pelton.testing.ops.OpConformance with op, implementation and cases" in op
    (drafter,) = (line for line in lines if "draft_proposers again" in line)
    assert drafter.startswith("skip") and "pelton.testing.draft_proposer.DrafterConformance with model" in drafter
    (failed,) = (line for line in lines if line.startswith("FAIL"))
    assert "an engine found when it started" in failed and "no_such_field" in failed


DECLARING_PLUGIN = """
from pelton import hookimpl
from pelton.entries import Entry

PELTON_API = ">=1,<2"

@hookimpl
def pelton_fused_ops():
    return [Entry(name="alone", load="declaring.ops:ALONE")]
"""
DECLARED_OP = """
from pelton.ops.interface import FusedOp

ALONE = FusedOp(name="alone", needs=type("Needs", (), {}), tensors=type("Tensors", (), {}))
"""


def test_a_declared_op_is_skipped_where_no_suite_has_it(site, tmp_path):
    of_skeleton = check(site, "pelton-my-fused-op")
    assert of_skeleton.returncode == 0 and "skip" not in of_skeleton.stdout, of_skeleton.stdout
    package(tmp_path, "declaring", plugin=DECLARING_PLUGIN, ops=DECLARED_OP)
    (line,) = (line for line in check(tmp_path, "declaring").stdout.splitlines() if "fused_ops alone" in line)
    assert (
        line.startswith("skip")
        and "a subclass of pelton.testing.ops.OpConformance with this op, an implementation" in line
    )


def test_new_renames_what_is_in_capitals_too(written):
    for folder in written.values():
        for file in folder.rglob("*.py"):
            assert "SKELETON" not in file.read_text(), file


@pytest.mark.parametrize(
    "plugin, line",
    [
        ("import no_such_module", r"FAIL  broken loads: .*No module named 'no_such_module'"),
        (POLICY_PLUGIN.replace(">=1,<2", ">=2,<3"), r"FAIL  broken loads: .*made for hook API '>=2,<3'"),
        (POLICY_PLUGIN.replace("unsteady.policy", "broken.nowhere"), r"FAIL  broken's entries load: .*broken\.nowhere"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_fails_with_the_reason(tmp_path, monkeypatch, capsys, plugin, line):
    package(tmp_path, "broken", plugin=plugin)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["plugins", "check", "broken"]) == 1
    out = capsys.readouterr().out
    assert re.search(line, out) and "Traceback" not in out
    for name in [name for name in sys.modules if name.partition(".")[0] == "broken"]:
        del sys.modules[name]


def test_a_package_that_is_not_there_is_named(capsys):
    assert main(["plugins", "check", "stat-loger"]) == 2
    assert "No installed package 'stat-loger' has an entry point" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind, name, message",
    [
        ("modle", "mine", "There is no kind 'modle'. Did you mean 'model'?"),
        ("model", "My Model", "cannot be a package's"),
        ("model", "class", "cannot be a package's"),
        ("model", "../up", "cannot be a package's"),
        ("model", "plugins", "is one of Pelton's own; use another, such as my-model"),
        ("scheduler", "pelton-scheduler", "is one of Pelton's own; use another, such as my-scheduler"),
    ],
)
def test_new_refuses_what_cannot_be_written(tmp_path, kind, name, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        write_skeleton(kind, name, str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_new_writes_into_no_folder_that_holds_something(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", "stat-logger", "hit-rate"]) == 0
    assert "pelton plugins check pelton-hit-rate" in capsys.readouterr().out
    assert 'hit_rate = "pelton_hit_rate.plugin"' in (tmp_path / "pelton-hit-rate/pyproject.toml").read_text()
    assert "class HitRateLogger" in (tmp_path / "pelton-hit-rate/pelton_hit_rate/logger.py").read_text()
    assert main(["plugins", "new", "stat-logger", "hit-rate"]) == 2
    assert "is there already, and not empty" in capsys.readouterr().err
    assert main(["plugins", "new", "stat-logger", "hit-rate", "--folder", "elsewhere"]) == 0
    assert (tmp_path / "elsewhere/tests/test_conformance.py").is_file()


def test_help_lists_every_kind(capsys):
    assert main(["plugins", "new", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^ *{kind} ", out, re.M) for kind in kinds())
