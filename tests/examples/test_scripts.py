"""Every example script runs as it stands: three as programs, without a main guard, others in this process, which has imported all.

Programs are forks of a process that has imported all. As `python` starts them they run in docs/test_readme.py."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from pelton_e2e import eventually, free_port

pytestmark = pytest.mark.usefixtures("script_forks")
SCRIPTS = Path(__file__).resolve().parents[2] / "examples/scripts"


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(name: str) -> str:
        monkeypatch.setattr(sys, "argv", [name])
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_script_has_a_test():
    text = Path(__file__).read_text()
    for path in SCRIPTS.glob("*.py"):
        assert f'"{path.name}"' in text, path.name


def test_offline_generate():
    out = run("offline_generate.py")
    assert "Paris" in out.splitlines()[0] and len(out.splitlines()) == 3


def test_offline_chat(run_here):
    out = run_here("offline_chat.py")
    assert "Paris" in out
    cached = [int(number) for number in re.findall(r", (\d+) of them from the cache", out)]
    assert len(cached) == 2 and cached[1] >= 16


def test_async_stream():
    out = run("async_stream.py")
    assert out.count("[length]") + out.count("[stop]") == 2
    assert "'The sky is'" in out and "'Bread is made of'" in out


def test_prefix_caching(run_here):
    pattern = r": (\d+) of (\d+) prompt tokens were cached"
    found = [(int(a), int(b)) for a, b in re.findall(pattern, run_here("prefix_caching.py"))]
    assert len(found) == 3 and found[0][0] == 0
    assert all(cached > 0.8 * total for cached, total in found[1:])


def test_llm_engine_loop(run_here):
    out = run_here("llm_engine_loop.py")
    assert "first is done" in out and "second is done" in out and "third is done" not in out


def test_openai_client(demo_server):
    out = run("openai_client.py", f"{demo_server}/v1")
    assert "Paris" in out and "total_tokens" in out


def test_tool_calls(demo_server):
    out = run("tool_calls.py", f"{demo_server}/v1")
    assert (
        re.match(r'The model calls get_weather\(\{"city":"(Paris|Lima|Oslo)"\}\)', out) and len(out.splitlines()) >= 2
    )


def test_demo_server():
    port = free_port()
    process = subprocess.Popen([sys.executable, str(SCRIPTS / "demo_server.py"), "smollm2", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=60) as client:
            assert eventually(lambda: is_up(client), 240), process.poll()
            body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 4}
            whole = client.post("/generate", json=body).json()["text"][0]
            assert whole.startswith("The capital of France is") and "Paris" in whole
            lines = client.post("/generate", json={**body, "stream": True}).text.splitlines()
            assert body["prompt"] + "".join(json.loads(line)["text"][0] for line in lines) == whole
            assert client.post("/generate", json={**body, "temperature": 9}).status_code == 400
    finally:
        process.terminate()
        process.wait(90)


def is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False
