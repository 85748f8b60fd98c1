"""`pelton bench stream`: many clients that stream at once, and how evenly their tokens come.

Without a URL the server is our own, over an engine without a device that gives every request a token at a set pace: what is
measured is the way from the engine's socket to the clients. Clients run in processes of their own, on the same cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pelton.cli.table import format_table
from pelton.errors import EngineError
from pelton_plugins.bench.bounds import check_at_least
from pelton_plugins.bench.host.paced_settings import SETTINGS
from pelton_plugins.bench.metrics import summary
from pelton_plugins.bench.record import circumstances, number, write_json
from pelton_plugins.flags import parse_flags

CLIENT = "pelton_plugins.bench.stream.client"
START_S = 120.0
DOC = """Streams of many clients: output tokens and chunks a second, time between chunks, time to the first.

  pelton bench stream                                            own server over an engine without a device
  pelton bench stream --api-server-count 2 --token-rate 60000
  pelton bench stream --url http://127.0.0.1:8000 --client-processes 4"""


class StreamArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The server, its clients, and for how long."""

    url: str | None = None
    """Of a running server; without one our own is started."""
    api_server_count: int = 1
    """Processes of our own server."""
    token_rate: float = 40_000.0
    """Tokens a second that the engine without a device gives all clients together."""
    num_clients: int = 256
    """Connections, each with one request at a time."""
    client_processes: int = 1
    """Processes that they are divided among."""
    input_len: int = 128
    """Tokens of each prompt."""
    output_len: int = 128
    """Tokens of each answer."""
    vocab_size: int = 250
    """Prompts are random token ids below this."""
    warm_up_s: float = 3.0
    """Seconds before anything is counted."""
    seconds: float = 10.0
    """Seconds that count."""
    output_json: str | None = None
    """Write the result here."""

    def __post_init__(self) -> None:
        check_at_least(
            self, num_clients=1, client_processes=1, input_len=1, output_len=1, vocab_size=11, seconds=0.1, warm_up_s=0.0,
            api_server_count=1, token_rate=1.0,
        )  # fmt: skip


def run(argv: list[str]) -> int:
    parsed = parse_flags(
        argv, [StreamArguments], positional=None, program="pelton bench stream", doc=DOC, engine=False, environ={}
    )
    arguments: StreamArguments = parsed.structs["StreamArguments"]
    with contextlib.ExitStack() as stack:
        url = arguments.url
        if url is None:
            step_s = arguments.num_clients / arguments.token_rate
            longest = arguments.input_len + arguments.output_len + 1
            url, _ = stack.enter_context(
                own_server(arguments.api_server_count, step_s, num_seqs=arguments.num_clients, max_model_len=longest)
            )
        result = measure(url, arguments)
    result |= circumstances(f"server {url}" if arguments.url else "no device", msgspec.to_builtins(arguments))
    print(render(result))
    write_json(arguments.output_json, result)
    return 0


def measure(url: str, arguments: StreamArguments) -> dict[str, Any]:
    """Raises `EngineError` when a client met one."""
    parts = urlsplit(url)
    rng = random.Random(0)
    bodies = [
        json.dumps(
            {
                "prompt": [rng.randrange(10, arguments.vocab_size) for _ in range(arguments.input_len)],
                "max_tokens": arguments.output_len, "temperature": 0.0, "ignore_eos": True, "stream": True,
            }
        )
        for _ in range(arguments.num_clients)
    ]  # fmt: skip
    begin = time.monotonic() + arguments.warm_up_s
    shared = {
        "host": parts.hostname, "port": parts.port, "path": "/v1/completions", "begin_s": begin,
        "seconds": arguments.seconds, "output_len": arguments.output_len,
        "vocab_size": arguments.vocab_size,
    }  # fmt: skip
    share = (arguments.vocab_size - 10) // arguments.client_processes  # of first tokens
    processes = []
    for index in range(arguments.client_processes):
        job = {**shared, "first_token": 10 + index * share, "bodies": bodies[index :: arguments.client_processes]}
        process = subprocess.Popen([sys.executable, "-m", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.close()
        process.stdin = None
        processes.append(process)
    found = []
    for process in processes:
        output, _ = process.communicate()
        if process.returncode:
            raise EngineError("A client's process failed; its message is above.")
        found.append(msgspec.msgpack.decode(output))
    errors = [one["error"] for one in found if one["error"]]
    if errors:
        raise EngineError(f"A client met an error: {errors[0]}")
    return figures(found, arguments)


def figures(found: list[dict[str, Any]], arguments: StreamArguments) -> dict[str, Any]:
    percents = (50.0, 90.0, 99.0)
    chunks_of = [count for one in found for count in one["chunks_of"]]
    # A request that began before or ends after the time that counts has a share of its tokens in it.
    num_chunks = sum(one["num_chunks"] for one in found)
    num_tokens = num_chunks * arguments.output_len / (sum(chunks_of) / len(chunks_of)) if chunks_of else num_chunks
    return {
        "output_tokens_per_s": num_tokens / arguments.seconds,
        "chunks_per_s": num_chunks / arguments.seconds,
        "num_requests": len(chunks_of),
        "chunks_per_request": sum(chunks_of) / max(len(chunks_of), 1),
        "itl_ms": summary([itl for one in found for itl in one["itls"]], percents, scale=1e3),
        "ttft_ms": summary([ttft for one in found for ttft in one["ttfts"]], percents, scale=1e3),
        "client_cpu_share": sum(one["cpu_s"] for one in found) / (arguments.seconds + arguments.warm_up_s),
    }


def render(result: dict[str, Any]) -> str:
    settings = result["settings"]
    rows = [
        (label, *(number(value) for value in result[name].values()))
        for label, name in (("time between chunks", "itl_ms"), ("time to first chunk", "ttft_ms"))
    ]
    return "\n".join(
        [
            f"{settings['num_clients']} clients, {settings['input_len']} in, {settings['output_len']} out, {result['device']}",
            f"  {number(result['output_tokens_per_s'], 4)} output tokens/s, {number(result['chunks_per_s'], 4)} chunks/s, "
            f"{number(result['chunks_per_request'], 4)} chunks a request of {result['num_requests']}",
            format_table(("ms", *result["itl_ms"]), rows, indent="  "),
        ]
    )


@contextlib.contextmanager
def own_server(
    num_processes: int,
    step_s: float | None,
    *more: str,
    num_seqs: int,
    max_model_len: int,
    temporary: str | None = None,
    num_ranks: int = 1,
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server over the executor `paced`, and more flags; gives its address and its process. step_s: None for a CPU and a tiny
    model of random weights instead. temporary: folder of its sockets. num_ranks: of tensor parallelism."""
    pace = ["--distributed-executor-backend", "paced", "--plugin-config", json.dumps({SETTINGS: {"step_s": step_s}})]
    with tempfile.TemporaryDirectory() as folder:
        make_model_folder(Path(folder), num_heads=num_ranks)
        command = [
            sys.executable, "-m", "pelton.cli.main", "serve", folder, "--port", "0", "--load-format", "dummy",
            *(["--device", "cpu"] if step_s is None else pace), "-tp", str(num_ranks),
            "--max-num-seqs", str(num_seqs), "--no-access-log", "--no-enable-prefix-caching",
            "--max-num-batched-tokens", str(8 * max(num_seqs, 128)), "--api-server-count", str(num_processes),
            "--served-model-name", "none", "--max-model-len", str(max_model_len),
            "--num-gpu-blocks-override", str(1 + num_seqs * (2 + max_model_len // 16)), *more,
        ]  # fmt: skip
        environ = {name: value for name, value in os.environ.items() if name != "PELTON_API_KEY"}
        if temporary is not None:
            environ["TMPDIR"] = temporary
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
        lines: list[str] = []
        threading.Thread(target=_keep_lines, args=(process, lines), daemon=True).start()
        try:
            yield _wait_ready(process, lines), process
        finally:
            if process.poll():
                sys.stderr.write("The server ended:\n" + "".join(lines[-40:]))
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _keep_lines(process: subprocess.Popen[str], lines: list[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)


def _wait_ready(process: subprocess.Popen[str], lines: list[str]) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"serves \S+ at (http\S+) ", "".join(lines))
        if found:
            with contextlib.suppress(urllib.error.URLError):
                urllib.request.urlopen(found[1] + "/health").close()
                return found[1]
        time.sleep(0.05)
    process.kill()
    raise EngineError("The server did not start:\n" + "".join(lines[-20:]))


def make_model_folder(folder: Path, vocab_size: int = 1000, *, num_heads: int = 1) -> None:
    """A small model's config.json, and a byte-level tokenizer whose every token is text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {f"Ġw{index}" if index else "Ġthe": index for index in range(vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "vocab_size": vocab_size,
        "max_position_embeddings": 1 << 20, "eos_token_id": 0, "hidden_size": 8 * num_heads, "num_attention_heads": num_heads,
        "num_key_value_heads": 1, "num_hidden_layers": 1, "intermediate_size": 8,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
