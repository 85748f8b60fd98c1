"""Random lives of requests in small pools, by the tool that looks for more of them: `tests/tools/fuzz_lives.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[1] / "tools/fuzz_lives.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_lives", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind, seed, connector", [
    ("llama", 1, True), ("llama", 8, False), ("gemma4", 2, False), ("deepseek_v3", 3, True), ("bamba", 4, False),
])  # fmt: skip
def test_answers_blocks_and_counts(
    tool: ModuleType, kind: str, seed: int, connector: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    num_found = tool.look(tmp_path, seed, [kind], connector=connector)
    tool.plain_engine(tmp_path, kind).shutdown()
    tool.plain_engine.cache_clear()
    out = capsys.readouterr().out
    assert num_found == 0 and "refused" not in out, out
