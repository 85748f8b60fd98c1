"""`pelton bench embed --http`: inputs a second through a server's /v1/embeddings, sent by clients in other processes.

The clients make their requests while they send. The share of a core that each of them takes is told: near one, the figures are theirs.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from pelton import env
from pelton.cli.table import format_table
from pelton.errors import ConfigError, EngineError
from pelton_plugins.bench.cpu import engines as cpu_engines
from pelton_plugins.bench.embed.client import Job, Result
from pelton_plugins.bench.embed.engines import word_list
from pelton_plugins.bench.metrics import percentile
from pelton_plugins.bench.record import circumstances, number, write_json

if TYPE_CHECKING:
    from pelton_plugins.bench.embed.command import EmbedArguments

VOCAB_SIZE = 10_000
"""Token ids are below it: most vocabularies have so many. That of a model's folder is read."""


def run(arguments: EmbedArguments, settings: dict[str, Any]) -> int:
    found: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="pelton-bench-") as folder,
        _server(arguments, settings, Path(folder)) as url,
    ):
        model = _model_of(url)
        vocab_size = _vocab_size(settings)
        words, num_special = word_list(model_path(settings)) if arguments.texts else ([], 0)
        for length in arguments.lengths:
            turns = []
            for turn in range(arguments.repeats):
                print(f"{length} tokens, turn {turn + 1} of {arguments.repeats}", file=sys.stderr)
                turns.append(_turn(arguments, url, model, length, vocab_size, words, num_special, turn))
            found[str(length)] = turns
    result = {
        "num_clients": arguments.num_clients, "connections": arguments.connections, "batch_size": arguments.batch_size,
        "inputs": "texts" if arguments.texts else "token ids", "lengths": found,
    }  # fmt: skip
    result |= circumstances(f"server {urlsplit(url).netloc}", settings)
    print(render(result))
    write_json(arguments.output_json, result)
    return 0


@contextlib.contextmanager
def _server(arguments: EmbedArguments, settings: dict[str, Any], folder: Path) -> Iterator[str]:
    if arguments.url is not None:
        yield arguments.url.rstrip("/").removesuffix("/v1")
        return
    port, config, log = cpu_engines.free_port(), folder / "server.json", folder / "server.log"
    config.write_text(json.dumps({"port": port, **settings}))
    command = [sys.executable, "-m", "pelton.cli.main", "serve", "--config", str(config)]
    try:
        with cpu_engines.running_server(command, port, log, {}) as server:
            yield server.url
    except EngineError:
        sys.stderr.write(log.read_text(errors="replace")[-4000:])
        raise


def model_path(settings: dict[str, Any]) -> str:
    from pelton.config import EngineConfig
    from pelton.model.resolve import locate
    from pelton.plugins import load_plugins

    if "model" not in settings:
        raise ConfigError("--texts needs the model, whose words they are made of.")
    config = EngineConfig.from_flat(**settings)
    return locate(config.model.model, config, load_plugins())


def _vocab_size(settings: dict[str, Any]) -> int:
    """Return how many ids there are to choose from: those of a server at a URL are not known."""
    config = Path(model_path(settings)) / "config.json" if "model" in settings else None
    if config is None or not config.is_file():
        return VOCAB_SIZE
    return int(json.loads(config.read_text()).get("vocab_size", VOCAB_SIZE))


def _headers() -> str:
    key = env.api_key()
    return f"Authorization: Bearer {key}\r\n" if key else ""


def _model_of(url: str) -> str:
    key = env.api_key()
    request = urllib.request.Request(url + "/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(json.load(answer)["data"][0]["id"])


def _turn(
    arguments: EmbedArguments,
    url: str,
    model: str,
    length: int,
    vocab_size: int,
    words: list[str],
    num_special: int,
    turn: int,
) -> dict[str, Any]:
    """Figures of all clients together."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(f"--url is {url!r}; use an address such as http://127.0.0.1:8000.")
    command = [sys.executable, "-m", "pelton_plugins.bench.embed.client"]
    clients: list[subprocess.Popen[str]] = []
    try:
        for index in range(arguments.num_clients):
            job = Job(
                host=parts.hostname, port=parts.port or 80, path=f"{parts.path}/v1/embeddings", headers=_headers(), model=model,
                length=length, batch_size=arguments.batch_size, connections=arguments.connections, vocab_size=vocab_size,
                words=words, num_special=num_special, warm_s=arguments.warm_s, seconds=arguments.seconds,
                seed=time.time_ns() + 7919 * turn + index,
            )  # fmt: skip
            client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            clients.append(client)
            _tell(client, msgspec.json.encode(job).decode())
        for client in clients:
            _hear(client)
        for client in clients:
            _tell(client, "go")
        results = [msgspec.json.decode(_hear(client), type=Result) for client in clients]
    finally:
        for client in clients:
            client.kill()
            client.wait()
    wrong = next((one.error for one in results if one.error), None)
    if wrong is not None:
        raise EngineError(f"A client ended: {wrong}.")
    latencies = [latency for one in results for latency in one.latencies_s]
    inputs = sum(one.num_requests for one in results) * arguments.batch_size / arguments.seconds
    return {
        "inputs_per_s": inputs, "tokens_per_s": inputs * length, "dimensions": results[0].dimensions,
        "client_core_share": max(one.core_share for one in results),
        "latency_ms": {f"p{share}": 1e3 * percentile(latencies, share) for share in (50, 99)} if latencies else {},
    }  # fmt: skip


def _tell(client: subprocess.Popen[str], line: str) -> None:
    assert client.stdin is not None
    client.stdin.write(line + "\n")
    client.stdin.flush()


def _hear(client: subprocess.Popen[str]) -> str:
    assert client.stdout is not None
    line = client.stdout.readline()
    if not line:
        raise EngineError(f"A client ended with status {client.wait()}; its messages are above.")
    return line


def render(result: dict[str, Any]) -> str:
    rows = []
    for length, turns in result["lengths"].items():
        rates = [one["inputs_per_s"] for one in turns]
        latency = [one["latency_ms"] for one in turns if one["latency_ms"]]
        rows.append(
            (
                length, number(statistics.median(rates), 5), f"{number(min(rates), 5)} to {number(max(rates), 5)}",
                number(statistics.median(rates) * int(length), 6),
                *(number(statistics.median(one[share] for one in latency)) if latency else "-" for share in ("p50", "p99")),
                f"{max(one['client_core_share'] for one in turns):.0%}",
            )
        )  # fmt: skip
    what = (
        f"{result['num_clients']} clients with {result['connections']} connections, requests of {result['batch_size']} inputs "
        f"({result['inputs']}), answers in base64"
    )
    header = ("tokens", "inputs/s", "least to most", "tokens/s", "request p50, ms", "p99", "of a core, a client")
    return f"{what}\n{format_table(header, rows, indent='  ')}"
