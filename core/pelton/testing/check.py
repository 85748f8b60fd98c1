"""Put an installed package through the conformance suites: what `pelton plugins check` runs.

`check_package` gives results one by one, a line each; it needs pytest, which runs the suites in this process.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import io
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

from pelton.errors import ConfigError, PluginError
from pelton.plugins import GROUP, SLOW_LOAD_S, Plugins, load_plugins

OK, FAILED, SKIPPED = "ok", "FAIL", "skip"


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the report."""

    status: str
    what: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.status.ljust(4)}  {self.what}{f': {self.reason}' if self.reason else ''}"


def check_package(package: str) -> Iterator[Result]:
    """Check what an installed package registers: that it loads, that its entries resolve, and the suites of each.

    package: a distribution's name, a plugin's, or an import package's. Raises `ConfigError` where none is called that.
    """
    points = points_of(package)
    for point in points:
        began = time.perf_counter()
        try:
            plugins = load_plugins(only=[point.name])
        except PluginError as error:
            yield Result(FAILED, f"{point.name} loads", str(error))
            continue
        seconds = time.perf_counter() - began
        loaded = next(plugin for plugin in plugins.loaded if plugin.name == point.name)
        module = point.load()
        yield Result(OK, f"{point.name} loads, for hook API {module.PELTON_API}, in {loaded.load_s:.2f} s")
        if loaded.load_s > SLOW_LOAD_S:
            yield Result(FAILED, f"{point.name} imports nothing heavy", f"{seconds:.1f} s in every process")
        yield from _check_plugin(point.name, module, plugins)


def points_of(package: str) -> list[EntryPoint]:
    """Return the entry points of the package, by name."""
    wanted = _normalized(package)
    found: list[EntryPoint] = []
    known: set[str] = set()
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name):
        distribution = point.dist.name if point.dist else ""
        names = {_normalized(name) for name in (point.name, distribution, point.value.partition(".")[0])}
        known |= {point.name, distribution}
        if wanted in names and point.name not in {one.name for one in found}:
            found.append(point)
    if not found:
        close = difflib.get_close_matches(package, sorted(known), n=1)
        raise ConfigError(
            f"No installed package {package!r} has an entry point in the group {GROUP!r}."
            + (f" Did you mean {close[0]!r}?" if close else "")
        )
    return found


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _check_plugin(name: str, module: Any, plugins: Plugins) -> Iterator[Result]:
    from pelton.testing.suites import suites_of

    try:
        plan = suites_of(module, plugins, name)
    except Exception as error:
        yield Result(FAILED, f"{name}'s entries load", _one_line(f"{type(error).__name__}: {error}"))
        return
    yield Result(OK, f"{name}'s entries load")
    for label, reason in plan.without.items():
        yield Result(SKIPPED, label, reason)
    if plan.classes:
        yield from run_suites(plan.classes)


@dataclass(slots=True)
class _Recorder:
    """A plugin of pytest: outcomes by (class, test function), whose cases count together."""

    labels: dict[str, str]
    """Names of the classes in the report, by the names that pytest knows them under."""
    outcomes: dict[tuple[str, str], dict[str, list[str]]] = field(default_factory=dict)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._note("can be collected", "failed", report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._note(report.nodeid.partition("[")[0].rpartition("::")[2], report.outcome, report)

    def _note(self, test: str, outcome: str, report: Any) -> None:
        label = self.labels.get([*report.nodeid.split("::"), ""][1], "suites")
        case = report.nodeid.partition("[")[2].removesuffix("]")
        reasons = self.outcomes.setdefault((label, test), {}).setdefault(outcome, [])
        reasons.append((f"[{case}] " if case else "") + _reason(report))

    def results(self) -> Iterator[Result]:
        for (label, test), outcomes in self.outcomes.items():
            what = f"{label}: {test.removeprefix('test_').replace('_', ' ')}"
            num_cases = sum(map(len, outcomes.values()))
            failed, skipped = outcomes.get("failed", []), outcomes.get("skipped", [])
            if failed:
                yield Result(FAILED, what, f"{len(failed)} of {num_cases}: {failed[0]}" if num_cases > 1 else failed[0])
            elif len(skipped) == num_cases:
                yield Result(SKIPPED, what, skipped[0])
            else:
                yield Result(OK, what + (f" ({num_cases - len(skipped)} cases)" if num_cases > 1 else ""))


def run_suites(suites: Mapping[str, type[Any]]) -> Iterator[Result]:
    """Run suites with pytest, in this process and quietly. suites: by the label that the report shows."""
    try:
        import pytest
    except ImportError:
        raise ConfigError("pelton plugins check needs pytest: pip install 'pelton[test]'.") from None
    classes = {f"Test{index}": suite for index, suite in enumerate(suites.values())}

    class Module(pytest.Module):
        """A module of these classes, which no file holds."""

        def _getobj(self) -> ModuleType:
            module = ModuleType("conformance")
            vars(module).update(classes)
            return module

    class Source:
        def pytest_collect_file(self, file_path: Path, parent: Any) -> Any:
            return Module.from_parent(parent, path=file_path)

    recorder = _Recorder(dict(zip(classes, suites, strict=True)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "suites"
        file.write_text("")
        (Path(folder) / "pytest.ini").write_text("[pytest]\n")
        # Suites are plain: what else is installed for pytest has no part in them.
        others = [f"no:{name}" for name in ("cacheprovider", "asyncio", "xdist", "randomly")]
        options = [part for name in others for part in ("-p", name)]
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            status = pytest.main(
                [*options, "-c", f"{folder}/pytest.ini", "--rootdir", folder, str(file)], plugins=[Source(), recorder]
            )
    if not recorder.outcomes:
        yield Result(FAILED, "suites", f"pytest ran nothing (status {status}): {shown.getvalue().strip()[-300:]}")
    yield from recorder.results()


def _reason(report: Any) -> str:
    """The first line of what a test says."""
    if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
        return _one_line(str(report.longrepr[2]).removeprefix("Skipped: "))
    crash = getattr(report.longrepr, "reprcrash", None)
    return _one_line(crash.message if crash is not None else str(report.longrepr or ""))


def _one_line(text: str) -> str:
    lines: Sequence[str] = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[0] if lines else ""
