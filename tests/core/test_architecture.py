"""What the design promises of the code as a whole, read from its syntax trees."""

from __future__ import annotations

import ast
import gc
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pelton import hookspecs, moved
from pelton.plugins import load_plugins

ROOT = Path(__file__).resolve().parents[2]
TREES = {
    "pelton": ROOT / "core/pelton",
    "pelton_platforms": ROOT / "platforms/pelton_platforms",
    "pelton_backends": ROOT / "backends/pelton_backends",
    "pelton_plugins": ROOT / "plugins/pelton_plugins",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def sources(*, with_examples: bool = True) -> list[Path]:
    folders = [*TREES.values(), *([ROOT / "examples"] if with_examples else [])]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


@pytest.fixture(scope="module", autouse=True)
def nothing_is_garbage() -> Iterator[None]:
    """All trees are kept: to look at their millions of nodes takes as long as to parse them."""
    gc.disable()
    yield
    gc.enable()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def walked(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of the tree, which a dozen rules look at."""
    return tuple(ast.walk(tree))


def trees(paths: list[Path]) -> Iterator[tuple[str, ast.Module]]:
    for path in paths:
        yield str(path.relative_to(ROOT)), parsed(path)


def offenders(rule: Callable[[ast.Module], list[Any]]) -> dict[str, list[Any]]:
    """What the rule finds, by file: one test for all files, since a test for each costs more than its parse."""
    found = {name: rule(tree) for name, tree in trees(sources())}
    return {name: places for name, places in found.items() if places}


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, inside functions too."""
    for node in walked(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or attribute; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


# Nothing that runs what comes over a wire.

FORBIDDEN_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "_pickle"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "pickle.loads", "pickle.load", "send_pyobj", "recv_pyobj", "os.system"}


def dangers(tree: ast.Module) -> list[str]:
    found = [f"line {line}: imports {name}" for line, name in imports(tree) if name.split(".")[0] in FORBIDDEN_IMPORTS]
    for node in walked(tree):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        last = name.rpartition(".")[2]
        if name in FORBIDDEN_CALLS or last in ("send_pyobj", "recv_pyobj"):
            is_safe_load = name == "torch.load" and any(
                k.arg == "weights_only" and isinstance(k.value, ast.Constant) and k.value.value is True
                for k in node.keywords
            )
            if not is_safe_load:
                found.append(f"line {node.lineno}: calls {name}")
        if any(k.arg == "shell" and isinstance(k.value, ast.Constant) and k.value.value for k in node.keywords):
            found.append(f"line {node.lineno}: starts a shell")
        if any(k.arg == "trust_remote_code" for k in node.keywords):
            found.append(f"line {node.lineno}: passes trust_remote_code")
    return found


def test_no_pickle_no_eval_no_unsafe_load():
    assert offenders(dangers) == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from cloudpickle import dumps", "eval('1')", "exec(x)", "torch.load(f)", "s.recv_pyobj()",
        "torch.load(f, weights_only=False)", "subprocess.run(x, shell=True)", "load(x, trust_remote_code=True)",
    ],
)  # fmt: skip
def test_the_lint_sees_what_it_looks_for(code):
    assert dangers(ast.parse(code))


def test_the_lint_lets_weights_only_loads_and_models_pass():
    assert dangers(ast.parse("torch.load(f, weights_only=True); model.eval(); self.exec_step()")) == []


# Who may import whom.


def own_files(tree: str) -> list[Path]:
    """Files of a tree, without the packages of others that `pelton plugins new` writes."""
    return sorted(path for path in TREES[tree].rglob("*.py") if "skeletons" not in path.parts)


def test_core_stays_small():
    """Core holds interfaces and the minimal engine. An implementation goes to the other trees: CONTRIBUTING.md."""
    folder = TREES["pelton"]
    files = [path for path in folder.rglob("*.py") if folder / "testing" not in path.parents]
    num_lines = sum(path.read_text().count("\n") for path in files)
    assert num_lines <= 19_000, f"core without testing has {num_lines} lines"


def test_the_device_worker_stays_short():
    """It says when a worker does what; a part that does it has a file of its own beside it."""
    tree = parsed(TREES["pelton_platforms"] / "device/worker.py")
    worker = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "DeviceWorker")
    num_lines = worker.end_lineno - worker.lineno + 1
    assert num_lines < 150, f"DeviceWorker has {num_lines} lines"


def test_core_names_no_other_tree():
    for name, tree in trees([path for path in sources(with_examples=False) if TREES["pelton"] in path.parents]):
        for line, module in imports(tree):
            assert module.split(".")[0] not in TREES.keys() - {"pelton"}, f"{name}:{line} imports {module}"
        for node in walked(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and ":" in node.value:
                match = re.match(r"(pelton_\w+)[\w.]*:", node.value)
                assert match is None, f"{name}:{node.lineno} loads {node.value}"


def test_the_other_trees_do_not_import_each_other():
    for name in TREES:
        if name == "pelton":
            continue
        for path, tree in trees(own_files(name)):
            for line, module in imports(tree):
                assert module.split(".")[0] not in TREES.keys() - {"pelton", name}, f"{path}:{line} imports {module}"


LIBRARIES = ("flags", "histograms", "weight_forms")
"""Folders that plugins share: they have no hooks."""


def test_every_plugin_folder_is_in_the_independence_contract():
    contract = next(
        c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["name"] == "plugins do not import each other"
    )
    folders = {f"pelton_plugins.{path.parent.name}" for path in TREES["pelton_plugins"].glob("*/__init__.py")}
    folder = TREES["pelton_plugins"]
    assert not any((folder / name / "plugin.py").exists() for name in LIBRARIES)
    assert set(contract["modules"]) == folders - {f"pelton_plugins.{name}" for name in LIBRARIES}


def test_plugins_of_one_folder_do_not_import_another():
    for path in own_files("pelton_plugins"):
        own = path.relative_to(TREES["pelton_plugins"]).parts[0]
        for line, module in imports(parsed(path)):
            if module.startswith("pelton_plugins."):
                assert module.split(".")[1] in (own, *LIBRARIES), f"{path}:{line} imports {module}"


def test_our_own_code_knows_moved_modules_by_their_new_names():
    used = {
        name: [line for line, module in imports(tree) if module in moved.modules()] for name, tree in trees(sources())
    }
    assert {name: lines for name, lines in used.items() if lines} == {}


TORCH_FREE = (
    "kv_cache",
    "scheduler",
    "config",
    "cli",
    "tokenizer",
    "metrics",
    "structured",
    "engine",
    "sdk",
    "messages",
    "executor",
    "pelton_plugins/executors",
    "pelton_plugins/kv_cache",
    "pelton_plugins/scheduler",
)


@pytest.mark.parametrize("folder", TORCH_FREE)
def test_modules_of_the_api_process_import_no_torch_at_their_top(folder):
    home = TREES["pelton_plugins"].parent if folder.startswith("pelton_plugins/") else TREES["pelton"]
    files = sorted((home / folder).rglob("*.py"))
    assert files, folder
    for name, tree in trees(files):
        top = ast.Module([node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))], [])
        for line, module in imports(top):
            assert module.split(".")[0] not in ("torch", "transformers"), f"{name}:{line} imports {module}"


def test_packages_at_the_root_have_one_name_only():
    """`core.pelton` would be a second copy of `pelton`, for which isinstance fails."""
    pattern = re.compile(r"^\s*(from|import) (core|platforms|backends|plugins)\b.*", re.MULTILINE)
    for path in [*sources(), *(ROOT / "tests").rglob("*.py")]:
        found = pattern.search(path.read_text())
        assert found is None, f"{path}: {found and found[0]}"


# No patching.


def foreign_assignments(tree: ast.Module) -> list[int]:
    """Lines that assign to an attribute of an imported module, or of a class that was imported. Triton's `knobs` are there to be
    set."""
    imported: set[str] = set()
    for node in walked(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name for alias in node.names}
    imported.discard("knobs")
    lines = []
    for node in walked(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            lines += [
                node.lineno for t in targets if isinstance(t, ast.Attribute) and dotted(t).split(".")[0] in imported
            ]
        is_setattr = isinstance(node, ast.Call) and dotted(node.func) == "setattr" and node.args
        if is_setattr and dotted(node.args[0]).split(".")[0] in imported:
            lines.append(node.lineno)
    return lines


def test_nothing_patches_what_it_imported():
    assert offenders(foreign_assignments) == {}


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.load = f",
        "from a import B\nB.run = f",
        "import a.b\na.b.c += 1",
        "import m\nsetattr(m, 'x', 1)",
    ],
)
def test_the_patch_lint_sees_what_it_looks_for(code):
    assert foreign_assignments(ast.parse(code))


# Hooks.

HOOK_USERS = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize("name", hookspecs.hooks())
def test_each_hook_has_docs_a_type_and_a_test(name):
    hook = hookspecs.hooks()[name]
    assert name.startswith("pelton_")
    assert len(hook.doc) > 30
    assert re.match(r"(Sequence|Mapping)\[", hook.returns)
    assert re.fullmatch(r"\d+\.\d+", hook.since)
    assert f"`{name}" in (ROOT / "docs/hooks.md").read_text() or f"## {name}" in (ROOT / "docs/hooks.md").read_text()
    tests = [path for path, text in HOOK_USERS.items() if name in text and path != Path(__file__)]
    assert tests, f"no test names {name}"


def test_each_hook_is_called_by_the_engine_with_its_arguments():
    """A hook that nothing calls is a promise that nobody keeps."""
    calls: dict[str, set[tuple[str, ...]]] = {}
    methods = {"entries", "find", "offers", "call_each"}
    for _, tree in trees(sources(with_examples=False)):
        constants = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in walked(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in methods
                and node.args
            ):
                first = node.args[0]
                name = first.value if isinstance(first, ast.Constant) else constants.get(dotted(first))
                if isinstance(name, str) and name.startswith("pelton_"):
                    given = tuple(sorted(k.arg for k in node.keywords if k.arg and k.arg != "setting"))
                    calls.setdefault(name, set()).add(given)
    hooks = hookspecs.hooks()
    assert calls.keys() <= hooks.keys()
    for name, argument_sets in calls.items():
        assert argument_sets == {tuple(sorted(hooks[name].arguments))}, name
    assert hooks.keys() == calls.keys()


def test_built_ins_implement_hooks_of_the_page_only():
    for plugin in load_plugins(only=[]).loaded:
        assert set(plugin.hooks) <= hookspecs.hooks().keys()


# The package.


def test_at_most_16_direct_dependencies_and_special_ones_are_extras():
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in PROJECT["project"]["dependencies"]]
    assert len(names) <= 16
    assert not {"triton", "ray", "gguf", "transformers", "xgrammar", "xxhash"} & set(names)


def test_dependencies_are_ranges_and_a_pin_has_its_reason_above_it():
    extras = [line for lines in PROJECT["project"]["optional-dependencies"].values() for line in lines]
    text = (ROOT / "pyproject.toml").read_text().splitlines()
    for line in [*PROJECT["project"]["dependencies"], *extras]:
        if "==" in line.split(";")[0] or "<" in line.split(";")[0]:
            place = next(index for index, written in enumerate(text) if line in written)
            assert text[place - 1].strip().startswith("#"), line
    for line in PROJECT["project"]["dependencies"]:
        assert "==" not in line.split(";")[0] and "<" not in line.split(";")[0], line


def test_each_tree_is_typed_and_holds_one_package():
    for name, folder in TREES.items():
        assert (folder / "py.typed").exists(), name
        others = {path.name for path in folder.parent.iterdir()} - {name, "__pycache__"}
        assert not others, f"{folder.parent} holds {others} beside {name}"


def test_each_module_says_what_it_is_for():
    for name, tree in trees(sources()):
        if name.endswith("__init__.py") and not tree.body:
            continue
        assert ast.get_docstring(tree), name


CALQUES = re.compile(r"(What|Of|Its|Their|By|Whether|Who|Whose|Whom)\b")


def unclear_docstrings(tree: ast.Module) -> list[str]:
    """First lines that neither name the thing nor say what is done."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in walked(tree) if isinstance(node, kinds)]
    lines = {getattr(node, "lineno", 1): (ast.get_docstring(node) or "").partition("\n")[0] for node in nodes}
    return [f"line {number}: {first}" for number, first in lines.items() if CALQUES.match(first)]


def test_a_docstring_names_the_thing_or_says_what_is_done():
    """An imperative for a function, a noun for a class or a module: CONTRIBUTING.md."""
    assert offenders(unclear_docstrings) == {}


@pytest.mark.parametrize("first", ["What it does.", "Of a row: its slot.", "Whether it fits.", "Its name.", "By hand."])
def test_the_prose_lint_sees_what_it_looks_for(first):
    assert unclear_docstrings(ast.parse(f'def f():\n    """{first}"""'))
    assert not unclear_docstrings(ast.parse('def f():\n    """Return whether it fits. What does not is refused."""'))


def test_the_project_names_no_machine_and_no_registry():
    """Paths of a developer's machine and hosts of registries have no place in a repository."""
    pattern = re.compile(
        re.escape(str(ROOT))
        + r"|--(extra-)?index-url[ =]\"?https?://|\bhttps?://[^\s/]*(pypi|pytorch|huggingface)[^\s/]*/"
    )
    suffixes = {".py", ".md", ".toml", ".yaml", ".cfg", ".sh", ".txt"}
    own = [
        p
        for f in ("core", "platforms", "backends", "plugins", "examples", "docs", "tests")
        for p in (ROOT / f).rglob("*")
    ]
    own += [ROOT / "Makefile", ROOT / ".ci/run", *ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob(".*.yaml")]
    for path in own:
        is_text = path.is_file() and (path.suffix in suffixes or path.name in ("Makefile", "run"))
        if is_text and path != Path(__file__):
            match = pattern.search(path.read_text())
            assert match is None, f"{path.relative_to(ROOT)} has {match[0] if match else ''}"
