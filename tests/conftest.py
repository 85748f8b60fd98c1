"""Tests marked `gpu` are skipped, with the reason, where there is no CUDA device. Grids marked `covering` are thinned."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import itertools
import logging
import os
import ssl
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pelton_checkpoints
import pelton_references
import pelton_reports
import pytest
from hypothesis import HealthCheck, settings
from pelton_covering import covering
from pelton_e2e import serving
from pelton_forked import AnyForkingPopen, forked_starts

from pelton import plugins
from pelton.utils import garbage
from pelton_platforms.cuda.driver import torch_cuda_version, why_not_here
from pelton_platforms.device import sleeping


@functools.cache
def _why_no_cuda() -> str | None:
    return why_not_here() or (None if torch_cuda_version() else "torch was built without CUDA")


# Read where a kernel is declared and where triton is imported: other folders' files may come before those of backends/triton,
# and that folder's conftest before any hook here.
if _why_no_cuda():
    os.environ["TRITON_INTERPRET"] = "1"


pelton_checkpoints.keep()  # before a test's file imports the function
pelton_reports.catch_own_logs()

# The first draw of a process reads the constants of all modules, which takes seconds on a busy machine.
settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pelton")
    group.addoption(
        "--covering", type=int, metavar="N",
        help="of every grid so many cases that any N values are met together, whatever its marker says; 0: all cases",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "cache"):  # not with `-p no:cacheprovider`
        pelton_references.folder = config.cache.mkdir("references")
    pelton_reports.send_what_is_shown(config)
    os.environ.setdefault(
        "PYTEST_ADDOPTS", "-p no:langsmith_plugin -p no:faker -p no:schemathesis -p no:anyio"
    )  # of runs that tests start; see addopts


def pytest_runtest_setup() -> None:
    """What a test draws without a seed of its own is the same in each run, whatever ran before in its process."""
    if (torch := sys.modules.get("torch")) is not None:
        # `torch.manual_seed` keeps the stack for a CUDA device that is not there yet: half a millisecond for each test.
        (torch.default_generator if _why_no_cuda() else torch).manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing of what is collected is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[pytest.CollectReport]:
    """Every other worker imports the last files first: in a fresh checkout each then compiles one half, and reads the other."""
    report = yield
    if isinstance(collector, pytest.Dir) and report.passed and _is_backward(collector.config):
        report.result.reverse()
    return report


def _is_backward(config: pytest.Config) -> bool:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return worker.isdecimal() and int(worker) % 2 == 1 and len(config.args) == 1


_starts_in_file: list[int] = []
"""Numbers of the engines that have started since what is there was last frozen."""


@pytest.fixture(scope="session", autouse=True)
def quick_collections() -> Iterator[None]:
    """Thousands of tests and what they import live as long as the session does. Of the engines that start one in 32 looks at all of
    a file's objects, so that the memory of those before comes back; the others at none.

    The collector itself is tested in core/utils/test_garbage.py."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 1000)  # what comes and goes has no cycles, mostly
    plain = {name: getattr(gc, name) for name in ("get_threshold", "set_threshold", "isenabled", "disable", "enable")}
    with pytest.MonkeyPatch.context() as patch:
        nothing = lambda: None  # noqa: E731

        starts = itertools.count(1)

        def collect() -> int:
            _starts_in_file.append(next(starts))
            return 0 if _starts_in_file[-1] % 32 else gc.collect()

        calm = SimpleNamespace(collect=collect, freeze=nothing, unfreeze=nothing, **plain)
        for module in (garbage, sleeping):
            patch.setattr(module, "gc", calm)
        yield
    # All stays frozen: pytest collects twice when it ends, which would look at everything.


@pytest.fixture(autouse=True)
def log_reaches_pytest() -> None:
    """An engine or command that ran in this process before has sent the log to stderr alone, and pytest would take some lines twice."""
    logging.getLogger("pelton").propagate = True


@pytest.fixture(scope="module", autouse=True)
def engines_of_a_file_are_gone(quick_collections: None) -> Iterator[None]:
    """What a file with engines leaves is not looked at again: modules, and pytest's own. A quarter to half a second each time."""
    yield
    if _starts_in_file:
        _starts_in_file.clear()
        gc.collect()
        gc.freeze()


@functools.cache
def _packages_in(folder: str, changed_ns: int) -> frozenset[str]:
    """What tells importlib of packages in a folder that was last changed then: other files come and go in a checkout's."""
    return frozenset(name for name in os.listdir(folder) if name.endswith((".dist-info", ".egg-info")))


@pytest.fixture(scope="session", autouse=True)
def known_entry_points() -> Iterator[None]:
    """Thousands of tests load the plugins, and each time the files of all installed packages are read for their entry points. They
    are kept for as long as the folders of `sys.path` hold the same packages as when the session began, in the same order."""
    find, kept = plugins._entry_points, dict[Any, Any]()

    def state() -> Any:
        held = [(path, _packages_in(path, os.stat(path).st_mtime_ns)) for path in sys.path if os.path.isdir(path)]
        others = [path for path in sys.path if os.path.isfile(path)]
        return importlib.metadata.entry_points, [pair for pair in held if pair[1]], others

    first = state()

    def found() -> Any:
        if state() != first:
            return find()
        if not kept:
            kept.update(find())
        return dict(kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "_entry_points", found)
        yield


@pytest.fixture(scope="session", autouse=True)
def known_checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tiny checkpoints are made once (pelton_checkpoints.py)."""
    cache = request.config.cache.mkdir("checkpoints") if hasattr(request.config, "cache") else None
    pelton_checkpoints.keep_in(tmp_path_factory.mktemp("checkpoints"), cache)
    yield
    pelton_checkpoints.forget()


@pytest.fixture(scope="session", autouse=True)
def known_certificates() -> Iterator[None]:
    """A client of HTTP reads those of all authorities (24 ms), also for a server of this machine without TLS: here once a session."""
    make, kept = ssl.create_default_context, dict[Any, ssl.SSLContext]()

    def context(*given: Any, **named: Any) -> ssl.SSLContext:
        key = given, tuple(sorted(named.items()))
        if key not in kept:
            kept[key] = make(*given, **named)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", context)
        yield


@pytest.fixture(scope="module")
def forks() -> Iterator[None]:
    """Pelton's processes that a file's tests start are forks of one that has imported what they import."""
    with forked_starts():
        yield


@pytest.fixture(scope="module")
def script_forks() -> Iterator[None]:
    """Scripts, too."""
    with forked_starts(AnyForkingPopen):
        yield


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server over the demo model, for tests that do not change it."""
    log = tmp_path_factory.mktemp("demo") / "log"
    with serving("smollm2", "--max-model-len", "1024", "--kv-cache-memory-bytes", "64M", log=log) as (url, _):
        yield url


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    if _is_backward(config):
        items.sort(key=lambda item: item.path.parts)
    yield
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_cuda()
    for item in marked:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif item.get_closest_marker("timeout") is None:  # no signal is handled by a thread that waits for a GPU
            item.add_marker(pytest.mark.timeout(method="thread"))
    _thin(config, items, config.getoption("--covering"))
    # None of the long ones is begun last, with idle cores beside it.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def _thin(config: pytest.Config, items: list[pytest.Item], wanted: int | None) -> None:
    """Leave out the cases of a grid that ask for combinations of values which others ask for, too."""
    grids: dict[tuple[str, int], list[Any]] = {}
    for item in items:
        marker = item.get_closest_marker("covering")
        strength = wanted if wanted is not None else marker.args[0] if marker else 0
        if strength and hasattr(item, "callspec"):
            grids.setdefault((item.nodeid.partition("[")[0], strength), []).append(item)
    left_out: set[int] = set()
    for (_, strength), grid in grids.items():
        # A value is one object in all cases. Not `callspec.indices`: those of a test's own parameters count its cases (pytest 9).
        names = sorted(grid[0].callspec.params)
        kept = set(covering([tuple(id(item.callspec.params[name]) for name in names) for item in grid], strength))
        left_out |= {id(item) for index, item in enumerate(grid) if index not in kept}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
        items[:] = [item for item in items if id(item) not in left_out]
