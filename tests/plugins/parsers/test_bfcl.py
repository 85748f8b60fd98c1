"""Berkeley's function-calling data, read by each parser and judged by its own checker: see tests/tools/bfcl_parsers.py.

PELTON_BFCL names a folder that holds bfcl-eval's wheel, unpacked; CONTRIBUTING.md says how to get one.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

FOLDER = os.environ.get("PELTON_BFCL")
TOOL = Path(__file__).parents[2] / "tools/bfcl_parsers.py"
UNTYPED = {"qwen3_coder"}
"""Its format has no word for a type: a null, a truth value or a number that the schema calls a text comes as a text."""


@pytest.mark.skipif(FOLDER is None, reason="no PELTON_BFCL: see CONTRIBUTING.md, Other clients")
def test_every_parser_reads_what_a_model_of_its_format_writes():
    judged = runpy.run_path(str(TOOL))["judge"](Path(FOLDER))
    assert len(judged) == 12
    for name, (num_right, num_cases, first_wrong) in judged.items():
        assert num_cases > 2000
        assert num_right == num_cases or (name in UNTYPED and num_right > 0.9 * num_cases), f"{name}: {first_wrong}"
