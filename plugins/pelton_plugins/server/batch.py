"""`pelton run-batch`: the requests of a file in OpenAI's batch format, answered by an engine of this process's own.

Each line of the input is {"custom_id", "method", "url", "body"}; it goes through the server's own application, so that every route
answers as it would over HTTP. Answers are appended as they come, and a file that is there already is gone on with: lines whose
custom_id is in it are not run again.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

import msgspec

from pelton.config import EngineConfig
from pelton.errors import ConfigError, PeltonError
from pelton.logging import get_logger, setup
from pelton_plugins.flags import parse_flags
from pelton_plugins.server.config import ServerConfig

logger = get_logger(__name__)

HELP = "Answer the requests of a file in OpenAI's batch format (JSON lines), and write the answers to another."
MAX_LINE_BYTES = 64 * 2**20


class BatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `pelton run-batch`."""

    input_file: str = ""
    """File of requests, a JSON object a line: custom_id, method, url, body."""
    output_file: str = ""
    """File that the answers are appended to; requests that it has answers to are not run again."""
    max_in_flight: int = 256
    """Requests that are under way at once."""

    def __post_init__(self) -> None:
        if self.max_in_flight < 1:
            raise ConfigError(f"max_in_flight is {self.max_in_flight}; use at least 1, such as 256.")


class BatchLine(msgspec.Struct, kw_only=True):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


def run(argv: list[str]) -> int:
    """The `run-batch` command: 0 when every line has an answer, 1 when some are errors, 2 for a wrong setting."""
    short = {"-i": "--input-file", "-o": "--output-file"}
    try:
        parsed = parse_flags(
            [short.get(argument, argument) for argument in argv], [ServerConfig, BatchConfig], positional="model",
            program="pelton run-batch", doc=HELP,
        )  # fmt: skip
        config: BatchConfig = parsed.structs["BatchConfig"]
        for name in ("input_file", "output_file"):
            if not getattr(config, name):
                raise ConfigError(f"{name} is missing; give --{name.replace('_', '-')} FILE.")
        setup(parsed.config.observability.log_level)
        lines = read_lines(Path(config.input_file))
        engine_config = _for_throughput(parsed.config)
        return asyncio.run(_run(config, parsed.structs["ServerConfig"], engine_config, parsed.explicit, lines))
    except PeltonError as error:
        print(f"pelton run-batch: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def read_lines(path: Path) -> list[BatchLine]:
    """Raises `ConfigError` that names the line."""
    found: list[BatchLine] = []
    seen: set[str] = set()
    decoder = msgspec.json.Decoder(BatchLine)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes.")
                try:
                    one = decoder.decode(line)
                except msgspec.MsgspecError as error:
                    raise ConfigError(
                        f"{path}, line {number}: {error}. A line is custom_id, method, url, body."
                    ) from None
                if one.method != "POST":
                    raise ConfigError(f"{path}, line {number}: method is {one.method[:20]!r}; batches have POST alone.")
                if one.custom_id in seen:
                    raise ConfigError(f"{path}, line {number}: custom_id {one.custom_id[:100]!r} is there twice.")
                seen.add(one.custom_id)
                found.append(one)
    except OSError as error:
        raise ConfigError(f"input_file {path} cannot be read: {error.strerror}.") from None
    return found


def open_output(path: Path) -> tuple[IO[bytes], set[str], int]:
    """The file to append to, the ids that it answers, and how many of these are errors; a last line that was cut off goes."""
    done: set[str] = set()
    num_errors = 0
    try:
        file = path.open("a+b")
        file.seek(0)
        end = 0
        for line in file:
            try:
                answer = json.loads(line)
                if not line.endswith(b"\n"):
                    break
                done.add(answer["custom_id"])
                num_errors += answer["error"] is not None or answer["response"]["status_code"] >= 400
            except (ValueError, KeyError, TypeError):
                break
            end += len(line)
        file.seek(0, 2)
        if file.tell() - end > MAX_LINE_BYTES:
            raise ConfigError(
                f"output_file {path} holds something other than answers to a batch; give the path of a new file."
            )
        if end == 0 and file.tell() > 0:
            raise ConfigError(
                f"output_file {path} holds something other than answers to a batch; give the path of a new file."
            )
        file.truncate(end)
    except OSError as error:
        raise ConfigError(f"output_file {path} cannot be written: {error.strerror}.") from None
    return file, done, num_errors


def _for_throughput(config: EngineConfig) -> EngineConfig:
    """Nobody reads the answers before all are there."""
    mode = config.scheduler.performance_mode or "throughput"
    scheduler = msgspec.structs.replace(config.scheduler, performance_mode=mode)
    return msgspec.structs.replace(config, scheduler=scheduler)


async def _run(
    config: BatchConfig,
    server_config: ServerConfig,
    engine_config: EngineConfig,
    explicit: Collection[str],
    lines: list[BatchLine],
) -> int:
    from pelton.plugins import load_plugins
    from pelton.sdk.async_llm import AsyncLLM
    from pelton_plugins.server.app import build_app
    from pelton_plugins.server.state import ServerState

    file, done, num_errors = open_output(Path(config.output_file))
    left = [line for line in lines if line.custom_id not in done]
    if done:
        print(f"{config.output_file} has {len(done)} answers; {len(left)} requests are left.", file=sys.stderr)
    if not left:
        return 1 if num_errors else 0
    plugins = load_plugins()
    names = engine_config.model.served_model_name or [engine_config.model.model]
    quiet = msgspec.structs.replace(server_config, api_key=[], access_log=False, max_concurrent_requests=None)
    state = ServerState(config=quiet, model_names=names)
    app = build_app(state, plugins)
    llm = await asyncio.to_thread(AsyncLLM, engine_config, plugins=plugins, explicit=explicit)
    try:
        await llm.start()
        state.llm = llm
        num_errors += await answer_all(app, left, file, config.max_in_flight)
    finally:
        llm.shutdown()
        file.close()
    print(f"{len(left)} requests answered, {num_errors} of {len(done) + len(left)} with an error.", file=sys.stderr)
    return 1 if num_errors else 0


async def answer_all(app: Any, lines: list[BatchLine], file: IO[bytes], max_in_flight: int) -> int:
    """Answer every line and write it; returns how many are errors."""
    from pelton.sdk.progress import ProgressBar

    bar = ProgressBar("run-batch", len(lines))
    waiting = iter(lines)
    num_errors = 0

    async def work() -> None:
        nonlocal num_errors
        for line in waiting:
            request_id = f"batch-{uuid.uuid4().hex}"
            status, body = await call(app, line, request_id)
            answer = {
                "id": f"batch_req_{request_id[6:]}",
                "custom_id": line.custom_id,
                "response": {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)},
                "error": None,
            }
            num_errors += status >= 400
            file.write(msgspec.json.encode(answer) + b"\n")
            file.flush()
            usage = _usage(body)
            bar.update(1, usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(max_in_flight, len(lines))):
                group.create_task(work())
    finally:
        bar.close()
    return num_errors


def _usage(body: bytes) -> dict[str, Any]:
    found = msgspec.json.decode(body)
    usage = found.get("usage") if isinstance(found, dict) else None
    return usage if isinstance(usage, dict) else {}


async def call(app: Any, line: BatchLine, request_id: str) -> tuple[int, bytes]:
    """One request through the application, without a socket."""
    path = "/" + line.url.split("://", 1)[-1].split("/", 1)[-1].lstrip("/") if "://" in line.url else line.url
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "server": ("batch", 0),
        "client": ("batch", 0), "extensions": {}, "state": {},
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost"), (b"x-request-id", request_id.encode())],
    }  # fmt: skip
    is_sent = False
    status, parts = 500, []

    async def receive() -> dict[str, Any]:
        nonlocal is_sent
        if is_sent:
            await asyncio.Event().wait()
        is_sent = True
        return {"type": "http.request", "body": bytes(line.body), "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    body = b"".join(parts)
    try:
        msgspec.json.decode(body)
    except msgspec.DecodeError:  # a stream: the line asked for one
        body = msgspec.json.encode(body.decode("utf-8", "replace"))
    return status, body
