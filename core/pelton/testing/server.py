"""A server of a tiny random model, for tests of what plugins add to it: routes, middleware, stat loggers, processors.

with serve_tiny("--api-key", "k") as server:
    reply = server.ask("GET", "/v1/models")
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pelton.testing.models import EOS_ID, VOCAB_SIZE, make_tiny_tokenizer

_START_S = 120.0
_LISTENS = re.compile(r"(https?://[\w.\[\]:-]+:\d+)")


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the server."""

    status: int
    text: str
    headers: Mapping[str, str]

    def json(self) -> Any:
        return json.loads(self.text)


@dataclass(frozen=True, slots=True)
class TinyServer:
    """A running server."""

    url: str
    key: str | None = None
    lines: list[str] = field(default_factory=list)
    """What it has written to stdout and stderr, once the block has ended."""

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str | None = "own",
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send a request; body is sent as JSON. key: in place of the server's own; None: without one."""
        sent = {"content-type": "application/json", **(headers or {})}
        shown = self.key if key == "own" else key
        if shown is not None:
            sent["authorization"] = f"Bearer {shown}"
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return Reply(reply.status, reply.read().decode(), dict(reply.headers))
        except urllib.error.HTTPError as error:
            return Reply(error.code, error.read().decode(), dict(error.headers))


def write_tiny_model(folder: Path) -> Path:
    """Write config.json and a tokenizer of a Llama of a few thousand parameters; `--load-format dummy` draws its weights."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": True, "eos_token_id": EOS_ID, "dtype": "float32",
    }  # fmt: skip
    make_tiny_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def serve_tiny(*flags: str, key: str | None = None) -> Iterator[TinyServer]:
    """Run `pelton serve` on a free port of this machine; it ends with the block. flags: more of the command's."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "tiny")
        command = [
            sys.executable, "-m", "pelton", "serve", str(model), "--load-format", "dummy", "--port", "0", "--device", "cpu",
            "--max-num-seqs", "4", "--max-model-len", "256", "--kv-cache-memory-bytes", str(2**22),
            *(("--api-key", key) if key else ()), *flags,
        ]  # fmt: skip
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        server = None
        try:
            server = TinyServer(_url(process, log), key)
            _wait(server, process, log)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if server is not None:
                server.lines.extend(log.read_text(errors="replace").splitlines())


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        found = _LISTENS.search(log.read_text(errors="replace"))
        if found is not None:
            return found[1]
        _check(process, log)
        time.sleep(0.05)
    raise AssertionError(f"the server does not say where it listens: {log.read_text()[-2000:]}")


def _wait(server: TinyServer, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        try:
            if server.ask("GET", "/health").status == 200:
                return
        except OSError:
            pass  # not listening yet
        _check(process, log)
        time.sleep(0.1)
    raise AssertionError(f"the server is not ready after {_START_S:.0f} s: {log.read_text()[-2000:]}")


def _check(process: subprocess.Popen[bytes], log: Path) -> None:
    status = process.poll()
    assert status is None, f"pelton serve ended with status {status}: {log.read_text()[-2000:].strip()}"
