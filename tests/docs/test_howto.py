"""The code of how-to pages is that of the example packages, which other tests install and run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(set((ROOT / "docs/howto").glob("*.md")) - {ROOT / "docs/howto/kinds.md"})  # which is made
BLOCK = re.compile(r"(?:<!-- (\S+) -->\n)?```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_code_is_an_examples(page):
    blocks = BLOCK.findall(page.read_text())
    assert blocks
    for path, code in blocks:
        assert path, f"this code is of no file:\n{code}"
        assert code in (ROOT / path).read_text(), f"{path} does not have:\n{code}"
