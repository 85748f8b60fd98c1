"""The library's build: what its cache does, and what happens without a compiler."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pelton_isas
import pytest

from pelton.attention.interface import AttentionNeeds
from pelton.attention.selector import select_backend
from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton_backends.native import build, isa, library
from pelton_backends.native import plugin as native_plugin
from pelton_backends.native.build import CannotBuildError, build_library, content_key
from pelton_backends.native.isa import ISAS
from pelton_backends.native.settings import take_settings
from pelton_backends.sdpa import plugin as sdpa_plugin

pytestmark = pytest.mark.usefixtures("script_forks")

NEEDS = AttentionNeeds(head_dim=64, num_heads=8, num_kv_heads=2, block_size=16, dtype="float32")

BUILD = """
from pathlib import Path
from pelton_backends.native import build, isa
build.SOURCES = Path({sources!r})
print(build.build_library(isa.ISAS[0]))
"""


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Two files that are compiled at once."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.c").write_text(f"int {name}(void) {{ return 1; }}\n")
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=240
    )


def test_the_library_is_compiled_once_for_its_content(tmp_path, sources):
    made = tmp_path / "made"
    made.mkdir()
    first = build_library(ISAS[0], folder=made)
    changed = first.stat().st_mtime_ns
    assert build_library(ISAS[0], folder=made) == first and first.stat().st_mtime_ns == changed
    assert [path.name for path in made.iterdir()] == [first.name], "nothing else is left behind"


def test_the_key_follows_sources_and_flags(tmp_path, monkeypatch):
    compiler = build.find_compiler()
    keys = {content_key(compiler, build.FLAGS), content_key(compiler, (*build.FLAGS, "-g"))}
    for source in build.SOURCES.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert content_key(compiler, build.FLAGS) in keys
    (tmp_path / "common.h").write_text("\n")
    keys.add(content_key(compiler, build.FLAGS))
    assert len(keys) == 3


@pytest.mark.parametrize("has_locks", [True, False])
def test_of_two_processes_one_compiles_where_there_are_locks(tmp_path, sources, has_locks):
    asked, compiler = tmp_path / "asked", tmp_path / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\nsleep 0.3\necho "$*" >> {asked}\nexec {build.find_compiler()} "$@"\n')
    compiler.chmod(0o755)
    code = BUILD.format(sources=str(sources))
    if not has_locks:
        code = f"import fcntl\ndef flock(*given): raise OSError\nfcntl.flock = flock\n{code}"
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": f"{compiler.parent}:{os.environ['PATH']}"}
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: run_python(code, **environment), range(2)))
    (made,) = (tmp_path / "pelton/native").iterdir()
    assert [result.stdout.split() for result in results] == [[str(made)]] * 2, results
    assert asked.read_text().count("-shared") == (1 if has_locks else 2)


def test_without_a_compiler_the_torch_reference_is_used(tmp_path):
    code = """
from pelton.attention.interface import AttentionNeeds
from pelton.attention.selector import select_backend
from pelton.ops.interface import LinearNeeds, LinearSpec
from pelton_backends.native import plugin as native_plugin
from pelton_backends.native.linear import NativeLinear
from pelton_backends.sdpa import plugin as sdpa_plugin
entries = [*native_plugin.pelton_attention_backends("cpu"), *sdpa_plugin.pelton_attention_backends("cpu")]
needs = AttentionNeeds(head_dim=64, num_heads=8, num_kv_heads=2, block_size=16, dtype="float32")
found = select_backend(entries, needs)
print(found.name, "|", found.verdicts[0], "|", NativeLinear.unsupported(
    LinearNeeds(dtype="float32", linear=LinearSpec(in_features=8, out_features=8))))
"""
    result = run_python(code, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert result.stdout.startswith("sdpa"), result.stderr
    assert result.stdout.count("no C compiler on the PATH") == 2


def test_a_compiler_that_fails_is_a_reason(tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'x.c:1: error: no such luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    result = run_python(
        "from pelton_backends.native import library; print(library.reason_against())",
        PATH=f"{tmp_path}:/usr/bin:/bin", XDG_CACHE_HOME=str(tmp_path / "cache"),
    )  # fmt: skip
    assert "the C compiler failed" in result.stdout and "no such luck" in result.stdout, result.stderr


def test_a_cache_that_cannot_be_written_gives_way_to_a_private_folder(tmp_path, sources):
    (tmp_path / "pelton").write_text("a file where the folder should be")
    result = run_python(BUILD.format(sources=str(sources)), XDG_CACHE_HOME=str(tmp_path))
    assert result.stdout.endswith(".so\n") and str(tmp_path) not in result.stdout, result.stderr
    assert result.stderr.count("the cache folder cannot be written") == 1


def test_the_compiler_that_is_missing_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CannotBuildError, match="no C compiler on the PATH"):
        build_library(ISAS[0])


@pytest.fixture
def restored():
    yield
    library.use_isa(None)


def test_the_setting_chooses_the_instruction_set(restored):
    chosen = take_settings(EngineConfig.from_flat(plugin_config={"native": {"isa": "plain"}}))
    assert library.kernels().isa == "plain" and chosen["instructions"].startswith("plain (this CPU has plain")
    take_settings(EngineConfig())
    assert library.isa_in_use() == build.available_sets()[-1]


@pytest.mark.parametrize(
    "own, message",
    [
        pytest.param({"isa": "z80"}, "isa is 'z80': there is no such set. Use one of plain", id="unknown"),
        pytest.param(
            {"isa": "avx2_vnni"}, "'avx2_vnni': this CPU or its compiler lacks it. Use one of plain", id="lacking"
        ),
        pytest.param({"isa": 3}, r"plugin_config\.native\.isa is 3: .* Example:", id="no-name"),
        pytest.param({"izza": "plain"}, r"Unknown setting plugin_config\.native\.izza\. It takes isa\.", id="misspelt"),
    ],
)
def test_a_setting_that_is_wrong_is_named(monkeypatch, restored, own, message):
    monkeypatch.setattr(library, "_available_sets", lambda: [ISAS[0]])
    with pytest.raises(ConfigError, match=message):
        take_settings(EngineConfig.from_flat(plugin_config={"native": own}))


def test_without_a_compiler_a_named_set_is_an_error_and_the_default_is_not(monkeypatch, restored):
    def fail():
        raise CannotBuildError("no C compiler on the PATH")

    monkeypatch.setattr(library, "_available_sets", fail)
    monkeypatch.setattr(library, "_best_set", fail)
    assert take_settings(EngineConfig()) == {}
    with pytest.raises(ConfigError, match="isa is 'plain', and there are no kernels in C: no C compiler"):
        take_settings(EngineConfig.from_flat(plugin_config={"native": {"isa": "plain"}}))


@pytest.mark.parametrize("name", [one.name for one in ISAS])
def test_a_set_of_this_cpu_is_loaded(restored, name):
    if name not in pelton_isas.AVAILABLE:
        pytest.skip(f"this CPU has no {name}")
    library.use_isa(name)
    assert library.kernels().isa == name


@pytest.mark.parametrize("name", [one.name for one in ISAS if one.name.endswith("_vnni")])
def test_sets_that_most_tests_leave_out_differ_in_products_of_bytes_alone(name, tmp_path):
    """tests/support/pelton_isas.py. The system's headers are empty files: what they say does not depend on the set's number."""
    numbers = [one.number for one in ISAS if one.name in (name, name.removesuffix("_vnni"))]
    sources = [path for path in build.SOURCES.glob("*.c") if path.stem not in ("common", "quant")]
    assert len(numbers) == 2 and len(sources) > 5
    for header in {
        name for path in build.SOURCES.iterdir() for name in re.findall(r"#include <(.+)>", path.read_text())
    }:
        (tmp_path / header).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / header).touch()
    alone = ["-nostdinc", f"-I{tmp_path}"]
    for source in sources:
        texts = [
            subprocess.run(
                [build.find_compiler(), "-E", "-P", *alone, *ISAS[-1].flags[:-1], f"-DPELTON_ISA={number}", str(source)],
                capture_output=True, text=True, check=True,
            ).stdout
            for number in numbers
        ]  # fmt: skip
        folded = [  # comparisons that C itself makes with the set's number
            re.sub(rf"\b{number} < (\d)\b", lambda found, number=number: str(number < int(found[1])), text)
            for number, text in zip(numbers, texts, strict=True)
        ]
        assert folded[0] == folded[1], f"{source.name} depends on {name}"


@pytest.mark.parametrize(
    "machine, features, names",
    [
        ("x86_64", "sse2", ["plain"]),
        ("x86_64", "sse2 avx2 fma f16c", ["plain", "avx2"]),
        ("x86_64", "avx2 fma f16c avx_vnni", ["plain", "avx2", "avx2_vnni"]),
        ("x86_64", "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_bf16", ["plain", "avx2", "avx512"]),
        ("aarch64", "asimd bf16", ["plain"]),
    ],
)
def test_a_cpu_has_a_set_when_it_has_all_of_its_features(monkeypatch, machine, features, names):
    monkeypatch.setattr(isa.platform, "machine", lambda: machine)
    monkeypatch.setattr(isa, "cpu_features", lambda: frozenset(features.replace("_", "").split()))
    assert [one.name for one in isa.sets_of_cpu()] == names


def test_a_set_that_the_compiler_does_not_know_is_not_offered(tmp_path, monkeypatch):
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\ncase "$*" in *avx512bf16*) exit 1;; esac\nexit 0\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "COMPILERS", (str(compiler),))
    monkeypatch.setattr(build, "sets_of_cpu", lambda: ISAS)
    assert [one.name for one in build.available_sets()] == [one.name for one in ISAS[:-1]]
    assert build.best_set().name == "avx512_vnni"


def test_the_native_backend_is_chosen_before_sdpa():
    entries = [*sdpa_plugin.pelton_attention_backends("cpu"), *native_plugin.pelton_attention_backends("cpu")]
    assert select_backend(entries, NEEDS).name == "native"
