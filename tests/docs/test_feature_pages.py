"""The examples of the pages about single features run as they stand. Those of [parallelism.md](../../docs/parallelism.md) and of
tools.md are what tests/e2e and tests/plugins/server start; other pages have test files of their own."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from pelton_e2e import generate, make_llm, make_prompts
from pelton_pages import DOCS, blocks, command, commands, settings

from pelton import hookimpl
from pelton.attention.interface import AttentionBackend
from pelton.cli.main import find_commands, main
from pelton.config import EngineConfig
from pelton.config.plugin_settings import read_settings
from pelton.entries import Entry, SettingsEntry
from pelton.metrics.plugin_metrics import PluginMetrics
from pelton.ops.interface import FUSED_OPS, LinearSpec, LinearWeights
from pelton.plugins import load_plugins, register
from pelton.testing.draft_proposer import DrafterConformance, DraftProposerConformance
from pelton.testing.models import make_tiny_checkpoint
from pelton.testing.ops import OpConformance, op_cases
from pelton.testing.plugins import plugins_of

RUN_ELSEWHERE = {"lora.md", "pooling.md"}
SMALL = ("--max-model-len", "256", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "16M", "--log-level", "error")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("pages") / "tiny", "llama"))


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[int]]:
    with make_llm(model) as llm:
        return generate(llm, PROMPTS)


PROMPTS = make_prompts(320, (3, 40, 100))
PAGES = [
    ("speculative.md", "--speculative-config"),
    ("kv_transfer.md", "--kv-transfer-config"),
    ("transformers_models.md", "--model-impl"),
]


@pytest.mark.parametrize(("page", "flag"), PAGES)
def test_a_server_as_on_the_page_gives_the_same_ids(
    page: str, flag: str, model: str, expected: list[list[int]], tmp_path: Path
) -> None:
    found = settings(page, flag)
    folder = found.get("kv_connector_extra_config")
    if folder:
        assert folder == {"shared_storage_path": "/data/kv"}
        found["kv_connector_extra_config"] = {"shared_storage_path": str(tmp_path)}
    with make_llm(model, **found) as llm:
        assert generate(llm, PROMPTS) == expected
    assert not folder or list(tmp_path.rglob("*.safetensors"))


def test_the_text_that_repeats_itself_is_the_same_with_drafts(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = command("speculative.md", "generate", "--temperature")
    answers = []
    for words in (argv, [word for word in argv if word not in ("--speculative-config.method", "ngram")]):
        assert main([*words, "--model", model, *SMALL]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != ""


def names_of(page: str, index: int, **given: Any) -> dict[str, Any]:
    """What an example in Python leaves behind."""
    found: dict[str, Any] = {"__name__": "example", **given}
    exec(compile(blocks(page, "python")[index], page, "exec"), found)  # noqa: S102  our own pages
    return found


class TestTheProposerOfThePage(DraftProposerConformance):
    def make_proposer(self, context: Any) -> Any:
        return names_of("speculative.md", 0)["Repeat"](context)


def test_a_proposer_repeats_the_last_token() -> None:
    from pelton.config import SpeculativeConfig
    from pelton.spec_decode.interface import ProposerContext

    config = SpeculativeConfig(method="repeat", num_speculative_tokens=2)
    repeat = names_of("speculative.md", 0)["Repeat"](ProposerContext(config=config, vocab_size=9, max_model_len=9))
    assert repeat.propose("r", [4, 7]) == [7, 7]


class TestTheDrafterOfThePage(DrafterConformance):
    @pytest.fixture(autouse=True)
    def plugin(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        module: Any = ModuleType("drafter_page")
        module.Again = names_of("speculative.md", 1)["Again"]
        module.PELTON_API = ">=1,<2"
        module.pelton_draft_proposers = pelton_draft_proposers
        monkeypatch.setitem(sys.modules, "drafter_page", module)
        self.plugins = load_plugins(only=[])
        register(self.plugins.manager, module, "drafter_page", "test")
        self.model, self.speculative_config = model, {"method": "again", "num_speculative_tokens": 2}


@hookimpl
def pelton_draft_proposers() -> list[Entry]:
    return [Entry(name="again", load="drafter_page:Again")]


def test_a_server_with_a_draft_model_as_on_the_page(model: str, expected: list[list[int]]) -> None:
    found = settings("speculative.md", "--speculative-model")
    assert found.pop("speculative_model") == "DRAFT"
    with make_llm(model, **found, speculative_model=model) as llm:
        assert generate(llm, PROMPTS) == expected


def listed(page: str, capsys: pytest.CaptureFixture[str], **words: str) -> list[tuple[int, str, str]]:
    """(status, output, errors) of each command of a page but `serve`."""
    found = []
    for argv in commands(page):
        if argv[0] != "serve":
            status = main([words.get(word, word) for word in argv])
            found.append((status, *capsys.readouterr()))
    return found


def test_who_reads_quantized_weights_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """tests/e2e/test_quantized.py runs the engine of the page."""
    [(status, out, _)] = listed("quantization.md", capsys)
    assert status == 0 and "native.linear: weight format 'q4_1', only 'plain'" in out
    assert settings("quantization.md") == {"quantization": "gguf"}


def test_what_a_machine_has_is_listed(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plugins, backends = listed("cuda.md", capsys, MODEL=model)
    assert plugins[0] == backends[0] == 0
    assert re.search(r"platforms +cuda", plugins[1]) and "<- chosen" in backends[1]
    if not Path("/dev/kfd").exists():
        [(status, _, error)] = listed("rocm.md", capsys, MODEL=model)
        assert status == 2 and "device is 'rocm', and it cannot be used here: no AMD device (no /dev/kfd)" in error


def test_the_plugin_of_the_plugins_page_is_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ModuleType("plugins_page")
    found.__dict__.update(names_of("plugins.md", 0))
    [tiny] = [entry for entry in plugins_of(found).entries("pelton_models") if entry.name == "tiny"]
    package = DOCS.parent / "examples/plugins/pelton-tiny-model"
    assert blocks("plugins.md", "toml")[0] in (package / "pyproject.toml").read_text()
    monkeypatch.syspath_prepend(str(package))
    assert tiny.resolve().__name__ == "TinyForCausalLM"
    for name in [name for name in sys.modules if name.startswith("pelton_tiny_model")]:
        monkeypatch.delitem(sys.modules, name)


def test_the_settings_and_the_counter_of_the_plugins_page(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ModuleType("my_package.settings")
    found.__dict__.update(names_of("plugins.md", 1, msgspec=msgspec, hookimpl=hookimpl, SettingsEntry=SettingsEntry))
    monkeypatch.setitem(sys.modules, "my_package", ModuleType("my_package"))
    monkeypatch.setitem(sys.modules, "my_package.settings", found)
    found.__dict__["PELTON_API"] = ">=1,<2"
    [entry] = plugins_of(found).entries("pelton_settings")
    assert entry.name == "fair" and entry.resolve() is found.FairSettings  # type: ignore[attr-defined]
    config = EngineConfig.from_flat(plugin_config={"fair": {"weight": 2.5}})
    assert read_settings(config, "fair", entry.resolve()).weight == 2.5

    class Context:
        metrics = PluginMetrics()

    own = names_of(
        "plugins.md", 2, AttentionBackend=AttentionBackend, ClassVar=ClassVar, read_settings=read_settings,
        FairSettings=found.FairSettings,
    )["FairAttention"]  # fmt: skip
    assert (own.weight, own.configured(config).weight, own.weight) == (1.0, 2.5, 1.0)

    names_of("plugins.md", 3, context=Context)
    [hits] = Context.metrics.take()
    assert (hits.name, hits.labels) == ("fair_hits", {"tenant": "a"})


def test_the_comparison_with_transformers_of_the_plugins_page(tmp_path: Path) -> None:
    found = names_of("plugins.md", 4, folder=tmp_path / "olmo2")
    assert len(found["wanted"]) == 12


def test_the_suite_for_a_weight_format_of_the_plugins_page() -> None:
    """Over matrices of int8 numbers."""
    reads: list[Any] = []

    class Int8Linear:
        handles = frozenset({"weight_format", "has_bias"})

        @staticmethod
        def unsupported(needs: Any) -> list[str]:
            return [] if needs.linear.weight_format == "int8" else ["another format"]

        @staticmethod
        def bind(needs: Any, tensors: Any) -> Any:
            reads.append(needs)
            weight = tensors.linear.tensors["weight"].float()
            return lambda x: torch.nn.functional.linear(x, weight, tensors.linear.bias)

    def int8_weights(in_features: int, out_features: int, has_bias: bool) -> LinearWeights:
        spec = LinearSpec(in_features=in_features, out_features=out_features, weight_format="int8", has_bias=has_bias)
        numbers = torch.arange(out_features * in_features).view(out_features, in_features) % 7 - 3
        return LinearWeights(spec, {"weight": numbers.to(torch.int8)}, torch.ones(out_features) if has_bias else None)

    suite = names_of(
        "plugins.md", 5, OpConformance=OpConformance, FUSED_OPS=FUSED_OPS, op_cases=op_cases, Int8Linear=Int8Linear,
        int8_weights=int8_weights, Int8Reference=Int8Linear,
    )["TestInt8Linear"]()  # fmt: skip
    suite.test_gives_what_the_reference_gives()
    suite.test_names_only_needs_that_there_are()
    assert len(reads) == 12  # each case, and its reference


def test_every_line_of_flags_on_the_command_line_page_is_read(tmp_path: Path) -> None:
    from pelton_plugins.flags import parse_flags
    from pelton_plugins.server.config import ServerConfig

    text = (DOCS / "cli.md").read_text().split("## Flags\n\n")[1].split("\n\n")[0]
    (tmp_path / "settings.toml").write_text("max_num_seqs = 3\n")
    shown = [
        flags for line in text.splitlines() for flags in re.split(r"\s{2,}", line.strip()) if flags.startswith("-")
    ]
    given = [
        name
        for flags in shown
        for argv in [shlex.split(flags.replace("settings.toml", str(tmp_path / "settings.toml")))]
        for name in parse_flags(argv, [ServerConfig], environ={}).explicit
    ]
    assert len(shown) == 17 and {"max_num_seqs", "served_model_name", "plugin_config", "hf_overrides"} <= set(given)


def test_every_command_of_a_page_is_one() -> None:
    for page in DOCS.glob("*.md"):
        for argv in commands(page.name):
            assert argv[0] in find_commands("version"), (page.name, argv)


def test_no_page_about_a_feature_is_without_a_test() -> None:
    """Pages with commands are the ones above, or have a file of their own."""
    shown = {page.name for page in DOCS.glob("*.md") if commands(page.name)}
    here = {page for page, _ in PAGES} | {"quantization.md", "cuda.md", "rocm.md", "parallelism.md", "tools.md"}
    assert shown == here | RUN_ELSEWHERE
