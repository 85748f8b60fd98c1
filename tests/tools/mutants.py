"""Count the mutants of a folder that its tests kill.

    python tests/tools/mutants.py plugins/pelton_plugins/scheduler --tests tests/plugins/scheduler --count 40 --results found.jsonl

A mutant is a module with one small fault: a comparison, a constant or an `and` changed, a statement or a `not` left out. The
sample depends on the sources and `--seed` alone. Third-party modules are imported once; each mutant is a fork of that process,
which runs the tests that reach the changed line, quick ones first, up to the first failure. `--results` is resumed when it is
there already, so that a long count can be made in slices (`--seconds`). Survivors are printed: a test is missing, or the
mutant does the same as the original.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
REMOVED = (ast.Expr, ast.AugAssign, ast.Continue, ast.Break, ast.Raise)
KINDS = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant, ast.BinOp, ast.Return, ast.Assign, *REMOVED)
OUR_MODULES = ("pelton", "tests", "conftest", "test_")
FLAGS = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "--hypothesis-seed=0"]


@dataclass(frozen=True)
class Mutant:
    """The `index`-th node of its file's tree, changed."""

    path: str
    index: int
    line: int
    change: str

    def code(self) -> CodeType:
        tree = ast.parse(Path(self.path).read_text())
        mutate(tree, self.index)
        return compile(tree, os.path.abspath(self.path), "exec")


def mutate(tree: ast.Module, index: int) -> None:
    """Change the node in place."""
    node = list(ast.walk(tree))[index]
    changed = _changed(node)
    if changed is not node:
        parent = next(one for one in ast.walk(tree) if node in ast.iter_child_nodes(one))
        _replace(parent, node, changed)
    ast.fix_missing_locations(tree)


def _words(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:100]


def _changed(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.Compare(ops=[op]) if type(op) in FLIPPED:
            node.ops = [FLIPPED[type(op)]()]
        case ast.BoolOp(op=op):
            node.op = ast.Or() if isinstance(op, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            node.value = value + 1
        case ast.BinOp(op=ast.Add() | ast.Sub() as op):
            node.op = ast.Sub() if isinstance(op, ast.Add) else ast.Add()
        case ast.Return(value=value) if not (
            value is None or (isinstance(value, ast.Constant) and value.value is None)
        ):
            node.value = None
        case ast.Expr(value=ast.Constant()) | ast.Expr(value=ast.Yield()):
            return None
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return ast.copy_location(ast.Pass(), node)
        case _ if isinstance(node, REMOVED):
            return ast.copy_location(ast.Pass(), node)
        case _:
            return None
    return node


def _replace(parent: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for name, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, name, new)
        elif isinstance(value, list):
            value[:] = [new if one is old else one for one in value]


def candidates(path: Path) -> Iterator[Mutant]:
    """Every mutant of a file; annotations and what only type checkers read have none."""
    tree = ast.parse(path.read_text())
    inert = {id(part) for root in _inert(tree) for part in ast.walk(root)}
    for index, node in enumerate(ast.walk(tree)):
        if isinstance(node, KINDS) and id(node) not in inert and (changed := _changed(copy.deepcopy(node))):
            yield Mutant(str(path), index, node.lineno, f"{_words(node)}  ->  {_words(changed)}")


def _inert(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        match node:
            case ast.arg(annotation=ast.AST() as part) | ast.AnnAssign(annotation=part):
                yield part
            case ast.FunctionDef(returns=ast.AST() as part):
                yield part
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield node


def sample(folder: Path, count: int, seed: int) -> list[Mutant]:
    found = [mutant for path in sorted(folder.rglob("*.py")) for mutant in candidates(path)]
    return random.Random(seed).sample(found, min(count, len(found)))


class Reach:
    """Pytest plugin: the lines of a folder that each test reaches, and how long each test takes."""

    def __init__(self, folder: Path) -> None:
        self.prefix, self.lines, self.seconds = (
            str(folder.resolve()),
            dict[str, set[tuple[str, int]]](),
            dict[str, float](),
        )
        self._current: set[tuple[str, int]] = set()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        start, self._current = time.perf_counter(), set()
        sys.settrace(self._call), threading.settrace(self._call)
        yield
        sys.settrace(None), threading.settrace(None)  # type: ignore[arg-type]
        self.lines[item.nodeid], self.seconds[item.nodeid] = self._current, time.perf_counter() - start

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.prefix):
            return None
        self._current.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._current.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line


class Choice:
    """Pytest plugin: only these tests, in this order."""

    def __init__(self, chosen: list[str]) -> None:
        self.places = {name: place for place, name in enumerate(chosen)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.places), key=lambda item: self.places[item.nodeid]
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        os.dup2(nothing.fileno(), 1), os.dup2(nothing.fileno(), 2)
        yield


def in_a_fork(call: Callable[[], int], limit_s: float) -> int | None:
    """What `call` returned in a process of its own; None when it took longer."""
    pid = os.fork()
    if not pid:
        os.setsid()
        code = 99
        try:
            with quiet():
                code = int(call())
        finally:
            os._exit(code)
    end = time.monotonic() + limit_s
    try:
        while time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return None
    finally:  # and what its tests have left running
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def forget_ours() -> None:
    for name in [name for name in sys.modules if name.startswith(OUR_MODULES)]:
        del sys.modules[name]


def measure(folder: Path, tests: list[str], where: Path) -> None:
    """Write the lines that each test reaches, and its time."""

    def call() -> int:
        reach = Reach(folder)
        code = pytest.main([*FLAGS, *tests], plugins=[reach])
        lines = {name: sorted(lines) for name, lines in reach.lines.items()}
        where.write_text(json.dumps({"lines": lines, "seconds": reach.seconds}))
        return code

    code = in_a_fork(call, 3600)
    if code:
        raise SystemExit(f"The tests fail without a mutant (exit {code}).")


def reaching(mutant: Mutant, known: dict[str, Any]) -> list[str]:
    """Tests that run the statement of the mutant, quick ones first; all of them when it runs at import."""
    path, lines = os.path.abspath(mutant.path), _lines_of_statement(mutant)
    found = {name for name, reached in known["lines"].items() if any(p == path and n in lines for p, n in reached)}
    return sorted(found or (known["lines"] if _is_at_import(mutant) else ()), key=known["seconds"].__getitem__)


def _lines_of_statement(mutant: Mutant) -> range:
    node = list(ast.walk(tree := ast.parse(Path(mutant.path).read_text())))[mutant.index]
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    while not isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case)):
        node = parents[node]
    if isinstance(node, ast.match_case):
        node = node.pattern
    body = getattr(node, "body", None)
    last = body[0].lineno - 1 if body else node.end_lineno
    return range(node.lineno, max(last or node.lineno, node.lineno) + 1)


def _is_at_import(mutant: Mutant) -> bool:
    tree = ast.parse(Path(mutant.path).read_text())
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return not any(one.body[0].lineno <= mutant.line <= (one.end_lineno or 0) for one in functions)


def run(mutant: Mutant, chosen: list[str], limit_s: float) -> str:
    def call() -> int:
        code, path, plain = mutant.code(), os.path.abspath(mutant.path), SourceFileLoader.get_code
        SourceFileLoader.get_code = lambda self, name: code if self.path == path else plain(self, name)  # type: ignore
        files = list(dict.fromkeys(name.partition("::")[0] for name in chosen))
        return pytest.main([*FLAGS, *files], plugins=[Choice(chosen)])

    match in_a_fork(call, limit_s):
        case None:
            return "killed: too slow"
        case 0:
            return "survived"
        case pytest.ExitCode.NO_TESTS_COLLECTED:
            raise RuntimeError(f"None of {chosen[:3]} was collected.")
        case _:
            return "killed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tests", nargs="+", required=True)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, required=True, help="a line of JSON a mutant; resumed when there")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no mutant after so long")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # with the fork under way
    end = time.monotonic() + given.seconds
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        pytest.main([*FLAGS, "--collect-only", *given.tests])
    forget_ours()
    reach = given.results.with_suffix(".reach.json")
    if not reach.exists():
        measure(given.folder, given.tests, reach)
    known = json.loads(reach.read_text())
    mutants = sample(given.folder, given.count, given.seed)
    done = [json.loads(line) for line in given.results.read_text().splitlines()] if given.results.exists() else []
    for mutant in mutants[len(done) :]:
        if time.monotonic() > end:
            break
        chosen, start = reaching(mutant, known), time.perf_counter()
        limit_s = 20 + 10 * sum(known["seconds"][name] for name in chosen)
        verdict = run(mutant, chosen, limit_s) if chosen else "not reached"
        done.append(asdict(mutant) | {"verdict": verdict, "seconds": round(time.perf_counter() - start, 1)})
        with given.results.open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
    killed = sum(one["verdict"].startswith("killed") for one in done)
    for one in done:
        if not one["verdict"].startswith("killed"):
            print(f"{one['verdict']}: {one['path']}:{one['line']}  {one['change']}")
    print(f"{given.folder}: {killed} of {len(done)} mutants killed ({len(mutants) - len(done)} to come)")


if __name__ == "__main__":
    main()
