"""A server over a fake engine, on a free loopback port: real uvicorn, real sockets, no model."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import msgspec
import uvicorn

from pelton.config import EngineConfig
from pelton.entries import Entry
from pelton.errors import ConfigError, EngineDeadError, NotSupportedError, RequestError
from pelton.messages.report import DeviceReport, EngineInfo
from pelton.messages.request import TensorData
from pelton.metrics.snapshot import Gauge, Metric
from pelton.model.pooling import PoolingSpec
from pelton.model.resolved import ResolvedModel
from pelton.outputs import CompletionOutput, Logprob, PoolingOutput, PoolingRequestOutput, RequestOutput
from pelton.sampling_params import RequestOutputKind, SamplingParams
from pelton_plugins.server.app import build_app
from pelton_plugins.server.config import ServerConfig
from pelton_plugins.server.state import ServerState
from pelton_plugins.server.wire import BoundedHttpProtocol

VOCAB = "\x00abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789.,:<>|?!'\n/_{}[]\"=`*-()\\"


class CharTokenizer:
    """One token a character."""

    max_token_chars = 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [max(VOCAB.find(char), 0) for char in text]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(VOCAB[i] for i in ids)


def fake_info() -> EngineInfo:
    report = DeviceReport(device="fake", platform="fake", attention_backend="fake", attention_reason="a test")
    return EngineInfo(
        report=report, num_blocks=9, block_size=16, kv_cache_bytes=1024, max_num_seqs=8, max_num_batched_tokens=64,
        max_model_len=256,
    )  # fmt: skip


class FakeAsyncLLM:
    """`AsyncLLM`'s interface over a scripted answer, one token at a time; sample i of a prompt starts with its index."""

    def __init__(self, answer: str = "Hello, world.") -> None:
        self.answer = answer
        self.tokenizer: CharTokenizer | None = CharTokenizer()
        self.info = fake_info()
        self.config = EngineConfig()
        self.model = ResolvedModel(
            name="fake", path="fake", weights_format="dummy", hf_config={}, architecture="Fake", dtype="float32",
            max_model_len=256, vocab_size=len(VOCAB), eos_token_ids=[0], generation_config={}, tokenizer_path=None,
        )  # fmt: skip
        self.requests: list[tuple[dict[str, Any], SamplingParams, dict[str, Any]]] = []
        self.aborted: list[str] = []
        self.tenants: list[str] = []
        self.last_ids: list[str] = []
        self.running: set[str] = set()
        self.step_s = 0.0
        self.late_prompt: list[int] | None = None  # answered after the others
        self.last_progress_age_s = self.silence_s = 0.0
        self.down: EngineDeadError | None = None
        self.fail_before: Exception | None = None
        self.constrains = False
        """Takes constraints, and does not keep them."""
        self.rendered: dict[str, Any] = {}
        self.fail_after: tuple[int, Exception] | None = None

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, *, priority: int = 0, cache_salt: str | None = None,
        timeout_s: float | None = None, kv_transfer_params: dict[str, Any] | None = None, on_text: Any = None,
        tenant: str = "",
    ) -> AsyncIterator[RequestOutput]:  # fmt: skip
        self._check(prompt, params)
        self.tenants.append(tenant)
        rest = {"priority": priority, "cache_salt": cache_salt, "timeout_s": timeout_s}
        if kv_transfer_params is not None:
            if self.kv_transfer_params is None:
                raise NotSupportedError("No KV connector runs here.", param="kv_transfer_params")
            rest["kv_transfer_params"] = kv_transfer_params
        self.requests.append((prompt, params, rest))
        self.running.add(request_id)
        self.last_ids = [*self.last_ids[-2:], request_id]
        is_finished = False
        try:
            async for output in self._outputs(prompt, params, request_id):
                output.kv_transfer_params = self.kv_transfer_params if output.finished else None
                is_finished = output.finished
                yield output
        finally:
            self.running.discard(request_id)
            if not is_finished:
                self.aborted.append(request_id)

    kv_transfer_params: dict[str, Any] | None = None  # of every answer

    def _check(self, prompt: Any, params: SamplingParams) -> None:
        if self.down:
            raise self.down
        if self.fail_before:
            raise self.fail_before
        ids = prompt["prompt_token_ids"]
        if min(ids) < 0 or max(ids) >= len(VOCAB):
            raise RequestError(f"Token id {max(ids)} is not in the vocabulary.", param="input_tokens")
        if params.structured_outputs is not None and not self.constrains:
            raise NotSupportedError("No structured-output backend is here.", param="structured_outputs")

    async def _outputs(self, prompt: Any, params: SamplingParams, request_id: str) -> AsyncIterator[RequestOutput]:
        ids, text = list(prompt["prompt_token_ids"]), prompt.get("prompt")
        answers = [self.answer if params.n == 1 else f"{i}{self.answer}" for i in range(params.n)]
        await asyncio.sleep(0.05 if ids == self.late_prompt else 0)
        most = 1000 if params.max_tokens is None else params.max_tokens
        whole = [CompletionOutput(i, "", [], logprobs=None if params.logprobs is None else []) for i in range(params.n)]
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(self._logprobs(i, params.prompt_logprobs) for i in ids[1:])]
        for step in range(10_000):
            await asyncio.sleep(self.step_s)
            if self.fail_after and step >= self.fail_after[0]:
                raise self.fail_after[1]
            outputs: list[CompletionOutput] = []
            for index, answer in enumerate(answers):
                if whole[index].finish_reason is not None:
                    continue
                token = VOCAB.find(answer[step % len(answer)])
                is_last = step + 1 >= most or (step + 1 >= len(answer) and not params.ignore_eos)
                reason = None if not is_last else "length" if step + 1 >= most else "stop"
                rows = None if params.logprobs is None else [self._logprobs(token, params.logprobs)]
                outputs.append(CompletionOutput(index, VOCAB[token], [token], logprobs=rows, finish_reason=reason))
                whole[index].text += VOCAB[token]
                whole[index].token_ids = [*whole[index].token_ids, token]
                whole[index].finish_reason = reason
                if rows:
                    whole[index].logprobs += rows
            finished = all(one.finish_reason for one in whole)
            is_delta = params.output_kind == RequestOutputKind.DELTA
            if is_delta or finished:
                yield RequestOutput(
                    request_id, text, ids, outputs if is_delta else whole, finished,
                    prompt_logprobs=prompt_logprobs if step == 0 or not is_delta else None, num_cached_tokens=2,
                )  # fmt: skip
            if finished:
                return

    @staticmethod
    def _logprobs(token: int, count: int) -> dict[int, Logprob]:
        """The chosen token has rank 2; id 1 ("a") and so on are the others."""
        found = {token: Logprob(-1.5, 2, VOCAB[token])}
        for rank, other in enumerate(range(1, count + 1), 1):
            found.setdefault(
                other,
                Logprob(-float(rank), rank, VOCAB[other]) if rank != 3 else Logprob(float("-inf"), 3, VOCAB[other]),
            )
        return found

    async def reset_prefix_cache(self) -> bool:
        return not self.running

    async def check_health(self) -> None:
        if self.down:
            raise self.down

    def render_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        self.rendered = {"messages": messages, **options}
        text = "".join(f"<{m['role']}>{m['content']}\n" for m in messages)
        return text + ("<assistant>" if options.get("add_generation_prompt") else "")

    def get_metrics(self) -> list[Metric]:
        return [Gauge(name="pelton_num_requests_running", value=len(self.running), documentation="Running.")]


class FakePoolingLLM(FakeAsyncLLM):
    """Makes vectors of two numbers, of token ids."""

    def __init__(self) -> None:
        super().__init__()
        spec = PoolingSpec(tasks=["embed", "classify", "token_embed"], pooling_type="last", labels=["a", "b"])
        self.model = msgspec.structs.replace(self.model, pooling=spec)

    async def encode_all(self, prompts: Any, params: Any, request_id: str, **rest: Any) -> list[PoolingRequestOutput]:
        self.requests.append((prompts, params, rest))
        found = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            numbers = struct.pack("<2f", 1.0 + sum(ids), float(len(ids)))
            output = PoolingOutput(TensorData(numbers, "float32", (2,)))
            found.append(PoolingRequestOutput(request_id, output, ids, True))
        return found


class RoutesOnly:
    """Stands in for `Plugins`: the built-in routes and what a test adds, and the built-in parsers."""

    def __init__(self, *more: Entry) -> None:
        from pelton_plugins.parsers import plugin as parsers
        from pelton_plugins.server.plugin import pelton_http_routes
        from pelton_plugins.web.plugin import pelton_http_routes as page_routes

        self._entries = {
            "pelton_http_routes": [*pelton_http_routes(), *page_routes(), *more],
            "pelton_tool_parsers": list(parsers.pelton_tool_parsers()),
            "pelton_reasoning_parsers": list(parsers.pelton_reasoning_parsers()),
        }

    def entries(self, hook: str) -> list[Entry]:
        return self._entries.get(hook, [])

    def find(self, hook: str, name: str, *, setting: str) -> Entry:
        found = [entry for entry in self._entries[hook] if entry.name == name]
        if not found:
            raise ConfigError(f"{setting} is {name!r}")
        return found[0]


class _Server(uvicorn.Server):
    """uvicorn's looks ten times a second whether it should end, and gives connections another tenth to close."""

    _loop: asyncio.AbstractEventLoop | None = None

    async def main_loop(self) -> None:
        self._end = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if not await self.on_tick(0):  # which also sets headers of all answers
            await self._end.wait()

    def end(self) -> None:
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end.set)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        for _ in range(20):
            if not self.server_state.connections and not self.server_state.tasks:
                return
            await asyncio.sleep(0.001)
        await super().shutdown(sockets)


class Running:
    """A server in a thread."""

    def __init__(self, config: ServerConfig, llm: FakeAsyncLLM | None, plugins: Any = None) -> None:
        self.llm = llm
        self.state = ServerState(config=config, model_names=["fake", "alias"], llm=llm)
        self.app = build_app(self.state, plugins or RoutesOnly())
        self._server = _Server(
            uvicorn.Config(
                self.app,
                port=0,
                log_config=None,
                lifespan="off",
                ws="none",
                http=BoundedHttpProtocol,
                root_path=config.root_path,
            )
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> Running:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            threading.Event().wait(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=60)
        return self

    def __exit__(self, *exc: object) -> None:
        self.client.close()
        self._server.end()
        self._thread.join(10)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 90.0) -> bool:
        for _ in range(int(seconds / 0.01)):
            if condition():
                return True
            threading.Event().wait(0.01)
        return condition()
