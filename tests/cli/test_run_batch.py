"""`pelton run-batch`: answers in OpenAI's batch format, gone on with where a run was cut off."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pelton.errors import ConfigError
from pelton.testing.models import make_tiny_checkpoint
from pelton_plugins.server import batch
from pelton_plugins.server.batch import open_output, read_lines

pytestmark = pytest.mark.usefixtures("script_forks")


def line(custom_id, url="/v1/completions", **body):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "tiny", **body}})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


def run(checkpoint, requests, answers):
    command = [
        sys.executable, "-m", "pelton", "run-batch", str(checkpoint), "-i", str(requests), "-o", str(answers),
        "--served-model-name", "tiny", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "2M", "--max-in-flight", "3",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_a_batch_is_answered_and_gone_on_with(checkpoint, tmp_path):
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line(f"r{i}", prompt=[5, i + 6], max_tokens=3, temperature=0) for i in range(6)]
    lines += [
        line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=2),
        line("bad", prompt="a", temperature=-1),
        line("nowhere", "/v1/nothing"),
        line("away", "http://169.254.169.254/latest/meta-data"),  # CVE-2026-34753: only this server's routes are asked
    ]
    requests.write_text("\n".join(lines) + "\n\n")
    first = json.dumps({"id": "x", "custom_id": "r0", "response": {"status_code": 200, "body": {}}, "error": None})
    answers.write_text(first + '\n{"id": "y", "custom_id": "r1", "resp')  # a run that was killed in mid-line
    done = run(checkpoint, requests, answers)
    assert done.returncode == 1, done.stderr[-3000:]
    found = [json.loads(one) for one in answers.read_text().splitlines()]
    assert sorted(one["custom_id"] for one in found) == sorted(json.loads(one)["custom_id"] for one in lines)
    by_id = {one["custom_id"]: one["response"] for one in found}
    assert found[0]["id"] == "x", "what was there stays"
    assert by_id["r1"]["body"]["usage"]["completion_tokens"] == 3
    assert by_id["chat"]["body"]["object"] == "chat.completion"
    assert [by_id[name]["status_code"] for name in ("bad", "nowhere", "away")] == [400, 404, 404]
    assert "9/9" in done.stderr and "3 of 10 with an error" in done.stderr
    again = run(checkpoint, requests, answers)
    assert again.returncode == 1 and "0 requests are left" in again.stderr


@pytest.mark.parametrize(
    "text, what",
    [
        ("{}", "line 1"),
        (line("a") + "\n" + line("a"), "there twice"),
        (json.dumps({"custom_id": "a", "url": "/x", "body": {}, "method": "GET"}), "POST alone"),
        ("nonsense", "line 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, what):
    (tmp_path / "in").write_text(text)
    with pytest.raises(ConfigError, match=what):
        read_lines(tmp_path / "in")


def test_another_file_is_not_overwritten(tmp_path):
    (tmp_path / "notes").write_text("dear diary\n")
    with pytest.raises(ConfigError, match="something other than answers"):
        open_output(tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "dear diary\n"


@pytest.mark.parametrize("flags, mode", [([], "throughput"), (["--performance-mode", "balanced"], "balanced")])
def test_steps_are_for_throughput_unless_told_otherwise(checkpoint, tmp_path, monkeypatch, flags, mode):
    async def answered(config, server_config, engine_config, explicit, lines):
        modes.append(engine_config.scheduler.performance_mode)
        return 0

    modes: list[str] = []
    monkeypatch.setattr(batch, "_run", answered)
    requests = tmp_path / "in.jsonl"
    requests.write_text(line("r0", prompt=[5]))
    assert batch.run([str(checkpoint), "-i", str(requests), "-o", str(tmp_path / "out.jsonl"), *flags]) == 0
    assert modes == [mode]
