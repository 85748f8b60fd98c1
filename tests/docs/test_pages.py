"""What the docs say is made from, or checked against, the code."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from pelton import hookspecs
from pelton.entries import BackendEntry
from pelton_backends.native import library
from pelton_backends.sdpa.backend import SDPABackend

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
OTHER_TOOLS = (
    "--habits",
    "--impl",
    "--models",
    "--page",
    "--readers",
    "--save",
    "--table",
    "--no-deps",
    "--no-binary",
    "--index-url",
    "--covering",
    "--tests",
    "--times",
    "--trees",
    "--turns",
    "--settings",
)  # of pip, pytest, tests/tools and a skeleton


def make_tables():
    spec = importlib.util.spec_from_file_location("make_tables", ROOT / "docs/make_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLES = make_tables()


def test_a_captured_decode_step_takes_few_calls():
    page = (ROOT / "docs/call_path.md").read_text()
    assert page.count("| caller |") + page.count("| worker |") <= 14


@pytest.mark.parametrize("name", TABLES.PAGES)
def test_a_made_page_is_what_the_code_says(name):
    if name == "call_path.md" and library.reason_against():
        pytest.skip("without a C compiler no step is captured")
    assert (ROOT / "docs" / name).read_text() == TABLES.PAGES[name]() + "\n", "run `make docs`"


@pytest.mark.parametrize(
    "sizes, words",
    [
        (range(1, 1025), "any"),
        (range(16, 1025, 16), "%16"),
        (range(16, 257, 8), "%8 from 16 to 256"),
        (range(3, 1025), "any from 3"),
        (range(1, 65), "any to 64"),
        ([64, 128, 256], "64, 128, 256"),
        ([], "none"),
    ],
)
def test_sizes_are_spelled_as_multiples_and_bounds(sizes, words):
    assert TABLES.spelled_sizes(sizes) == words


class Narrow(SDPABackend):
    """Heads of 64 or 128 numbers, 8-bit caches from capability 8.9, and no compiler on this machine."""

    handles = frozenset({"has_sinks"})

    @classmethod
    def unsupported(cls, needs, capability=None):
        reasons = ["no compiler is here"]
        if needs.head_dim not in (64, 128):
            reasons.append(f"head size {needs.head_dim}")
        if capability is not None and capability < ((8, 9) if needs.kv_dtype.startswith("fp8") else (8, 0)):
            reasons.append(f"capability {capability}")
        return reasons


def test_a_backends_column_is_what_its_class_answers():
    entry = BackendEntry(name="narrow", load=f"{__name__}:Narrow", doc="few heads")
    column = TABLES.features(entry, "cuda")
    answers = {what: column[what] for what in ("head sizes", "block sizes", "sinks", "ALiBi", "compute capability")}
    assert answers == {
        "head sizes": "%64 to 128", "block sizes": "any", "sinks": "yes", "ALiBi": "no",
        "compute capability": "8.0; 8.9 for fp8, fp8_e4m3, fp8_e5m2",
    }  # fmt: skip


def test_the_hooks_page_has_every_hook_with_its_arguments():
    text = (ROOT / "docs/hooks.md").read_text()
    for hook in hookspecs.hooks().values():
        assert f"## {hook.name}\n" in text
        assert f"`{hook.name}({', '.join(hook.arguments)}) -> " in text


def test_the_request_flow_names_every_hook_and_only_files_that_exist():
    text = (ROOT / "docs/request_flow.md").read_text()
    named = set(re.findall(r"`(pelton_\w+)`", text))
    assert named == hookspecs.hooks().keys()
    for name in re.findall(r"[\w/]+\.py", text):
        assert (ROOT / "core/pelton" / name).exists() or (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_and_modules_that_a_page_names_exist(page):
    from pelton_plugins.bench.cpu.busy import BusyArguments
    from pelton_plugins.bench.cpu.table import CpuTableArguments
    from pelton_plugins.bench.embed.command import EmbedArguments
    from pelton_plugins.bench.host.command import HostArguments
    from pelton_plugins.bench.latency import LatencyArguments
    from pelton_plugins.bench.load import LoadArguments
    from pelton_plugins.bench.lora import LoraArguments
    from pelton_plugins.bench.serve import ServeArguments
    from pelton_plugins.bench.simulator.command import SimulateArguments
    from pelton_plugins.bench.soak.chaos import ChaosArguments
    from pelton_plugins.bench.soak.command import SoakArguments
    from pelton_plugins.bench.sparse import SparseArguments
    from pelton_plugins.bench.speculation import SpeculationArguments
    from pelton_plugins.bench.states import StatesArguments
    from pelton_plugins.bench.steps import StepsArguments
    from pelton_plugins.bench.stream.command import StreamArguments
    from pelton_plugins.bench.table.chain import ChainArguments
    from pelton_plugins.bench.table.command import TableArguments
    from pelton_plugins.bench.throughput import ThroughputArguments
    from pelton_plugins.bench.tune import TuneArguments
    from pelton_plugins.commands.chat import ChatArguments
    from pelton_plugins.commands.generate import GenerateArguments
    from pelton_plugins.commands.plugins import PluginsArguments
    from pelton_plugins.commands.sampling import SamplingFlags
    from pelton_plugins.flags.table import make_flags
    from pelton_plugins.server.batch import BatchConfig
    from pelton_plugins.server.config import ServerConfig

    known = {"--help", "--config", "--plugin-config", "--max_num_seqs", "--flag"}
    for structs in (
        [ServerConfig, BatchConfig],
        [ChatArguments, SamplingFlags],
        [GenerateArguments, SamplingFlags],
        [PluginsArguments],
        [BusyArguments],
        [ChainArguments],
        [CpuTableArguments],
        [EmbedArguments],
        [HostArguments],
        [LatencyArguments],
        [LoadArguments],
        [LoraArguments],
        [SoakArguments],
        [SparseArguments],
        [StatesArguments],
        [SpeculationArguments],
        [TableArguments],
        [ThroughputArguments],
        [TuneArguments],
    ):
        known |= {name for flag in make_flags(structs).values() for name in flag.names}
    for struct in (ChaosArguments, ServeArguments, SimulateArguments, StepsArguments, StreamArguments):
        known |= {name for flag in make_flags([struct], engine=False).values() for name in flag.names}
    text = re.sub(r"```(toml|mermaid).*?```", "", page.read_text(), flags=re.DOTALL)
    for flag in set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text)):
        is_section = flag.removeprefix("--").endswith("-config")
        assert flag in known or is_section or flag in OTHER_TOOLS, f"{page.name} names {flag}"
    for module in set(re.findall(r"`(pelton(?:\.\w+)+)`", text)):
        parts = module.split(".")
        found = any(
            (ROOT / "core" / Path(*parts[:n])).with_suffix(".py").exists() or (ROOT / "core" / Path(*parts[:n])).is_dir()
            for n in range(len(parts), 1, -1)
        ) or hasattr(__import__("pelton"), parts[1])  # fmt: skip
        assert found, f"{page.name} names {module}"


def test_the_performance_page_has_every_measurement_and_what_the_table_aims_at():
    from pelton_plugins.bench.command import MEASUREMENTS
    from pelton_plugins.bench.table import peers
    from pelton_plugins.bench.table.command import WORKLOADS

    text = (ROOT / "docs/performance.md").read_text()
    for name in MEASUREMENTS:
        assert f"pelton bench {name}" in text and f"**{name}**" in text
    lines = {line.split("|")[1].split(",")[0].strip(): line for line in text.splitlines() if line.startswith("|")}
    for name in WORKLOADS:
        assert name in " ".join(lines), name
    aims = text[text.index("## What is aimed at") :]
    for name, model in peers.AIMS.items():
        for row in peers.ROWS:
            aim = model.get(row.name)
            if aim is not None:
                best = peers.better_peer(row, aim)
                for figure in filter(None, (aim.target, aim.stretch)):
                    assert re.search(rf"(?<![\d.,]){figure:,g}0?(?![\d,.]*\d)", aims), f"{row.name}: {figure:,g}"
                # Rows of ranks and of weights in FP8 stand together, their peers' figures in one bracket.
                if best is not None and aim.target is not None and " " not in name:
                    assert f"({best:,g})" in aims or f"({best:,.0f})" in aims, f"{row.name}: {best}"


def test_the_http_page_lists_the_routes_there_are():
    from pelton_plugins.server.plugin import pelton_http_routes

    text = (ROOT / "docs/http.md").read_text()
    offered = set()
    for entry in pelton_http_routes():
        module = entry.load.partition(":")[0].replace(".", "/")
        source = (ROOT / "plugins" / f"{module}.py").read_text()
        for paths in re.findall(r'@(?:get|post|delete|route)\(\s*\[?((?:"/[\w/.{}:]+"(?:, )?)+)', source):
            offered |= {re.sub(r":\w+}", "}", path) for path in re.findall(r'"(/[\w/.{}:]+)"', paths)}
    listed = set(re.findall(r"`(?:GET|POST|DELETE) (/[\w/.{}]+)`", text))
    assert offered and listed == offered


def curl_commands(text: str) -> list[list[str]]:
    """The words of each, over as many lines as its quotation marks and backslashes take it."""
    found, lines = [], text.splitlines()
    for index, line in enumerate(lines):
        if re.match(r" *curl ", line):
            for end in range(index + 1, len(lines) + 1):
                with contextlib.suppress(ValueError):
                    found.append(shlex.split("\n".join(lines[index:end]).replace("\\\n", " "), comments=True))
                    break
    return found


def test_what_pages_send_with_curl_is_what_the_server_takes():
    """Without a header curl says that it sends a form, which is refused."""
    commands = [words for page in PAGES for words in curl_commands(page.read_text())]
    bodies = [words for words in commands if "-d" in words]
    assert len(bodies) >= 8
    for words in bodies:
        assert any(word.lower() == "content-type: application/json" for word in words), words
        assert isinstance(json.loads(words[words.index("-d") + 1]), dict)


def test_the_http_page_has_the_servers_error_types():
    from pelton_plugins.server.errors import ERROR_TYPES

    rows = dict(re.findall(r"\| (\d{3}) \| (\w+) \|", (ROOT / "docs/http.md").read_text()))
    assert rows.items() <= {str(status): kind for status, kind in ERROR_TYPES.items()}.items()
    assert len(rows) >= 8


def test_the_changelog_has_the_version():
    import pelton

    assert f"## {pelton.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f'version = "{pelton.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_the_licence_is_apache_2_in_full():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text and len(text) > 11_000


def test_the_servers_metrics_are_named_as_they_are_exported():
    from pelton_plugins.server.http_metrics import HttpMetrics

    http = HttpMetrics()
    http.observe("/v1/models", "GET", 200, 0.1)
    http.count_tool_answer("hermes", 1)
    with http.sleep_operation("wake"):
        pass
    section = (ROOT / "docs/metrics.md").read_text().partition("## Of the HTTP server")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)`", section, re.MULTILINE) == list(
        dict.fromkeys(metric.name for metric in http.snapshot())
    )
