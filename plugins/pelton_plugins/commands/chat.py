"""`pelton chat`: talk with a model, in this process or (`--url`) at a server that speaks the OpenAI protocol.

At a terminal it is a conversation; with stdin from a pipe or file all of it is one message. Answers stream.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator
from typing import Any, Protocol

import msgspec

from pelton import env
from pelton.errors import ConfigError, PeltonError, RequestError
from pelton.sampling_params import RequestOutputKind
from pelton_plugins.commands.sampling import SamplingFlags, check, make_params
from pelton_plugins.flags import Parsed, parse_flags

DOC = """Talk with a model: in this process, or with --url at a running server.

  pelton chat smollm2
  pelton chat --url http://127.0.0.1:8000
  echo "Name three colours." | pelton chat smollm2 --max-tokens 40

At the prompt: /clear forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer."""

Message = dict[str, Any]


class ChatArguments(msgspec.Struct, frozen=True, kw_only=True):
    """With whom to talk."""

    url: str | None = None
    """A running server, such as http://127.0.0.1:8000; PELTON_API_KEY is sent as its key. The model runs here when unset."""
    system: str | None = None
    """System message that the conversation begins with."""


class Partner(Protocol):
    """Engine or server that answers."""

    def reply(self, messages: list[Message]) -> Generator[str]:
        """The answer, piece by piece. Closing the generator stops it. Raises `PeltonError`."""
        ...

    def close(self) -> None: ...


def run(argv: list[str]) -> int:
    parsed = parse_flags(argv, [ChatArguments, SamplingFlags], positional="model", program="pelton chat", doc=DOC)
    arguments: ChatArguments = parsed.structs["ChatArguments"]
    partner = _at_server(arguments.url, parsed) if arguments.url is not None else _in_process(parsed)
    messages: list[Message] = [{"role": "system", "content": arguments.system}] if arguments.system else []
    with contextlib.closing(partner):
        if not sys.stdin.isatty():
            text = sys.stdin.read().strip()
            if not text:
                raise ConfigError("There is no message on stdin; pipe one in, or start pelton chat at a terminal.")
            _answer(partner, [*messages, {"role": "user", "content": text}])
            return 0
        return _converse(partner, messages)


def _converse(partner: Partner, messages: list[Message]) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()
    num_fixed = len(messages)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return 0
        if text in ("/exit", "/quit"):
            return 0
        if text == "/clear":
            del messages[num_fixed:]
        elif text.startswith("/"):
            print("/clear forgets the conversation, /exit ends.")
        elif text:
            messages.append({"role": "user", "content": text})
            try:
                messages.append({"role": "assistant", "content": _answer(partner, messages)})
            except RequestError as error:
                print(f"error: {error}", file=sys.stderr)
                messages.pop()  # such as a conversation that became too long: the message is not part of it


def _answer(partner: Partner, messages: list[Message]) -> str:
    """Print the answer as it comes; Ctrl-C at a terminal keeps what there is."""
    pieces: list[str] = []
    with contextlib.closing(partner.reply(messages)) as reply:
        try:
            for piece in reply:
                pieces.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
    print()
    return "".join(pieces)


# In this process.


def _in_process(parsed: Parsed) -> Partner:
    from pelton.sdk.llm_engine import LLMEngine

    # An answer ends where the model ends it, or where the context does.
    given = {"max_tokens": None, **parsed.structs["SamplingFlags"].given()}
    check(given)
    return LocalPartner(LLMEngine(parsed.config, explicit=parsed.explicit), given)


class LocalPartner:
    """An engine of our own."""

    def __init__(self, engine: Any, given: dict[str, Any]) -> None:
        self.engine = engine
        defaults = engine.input_processor.get_default_sampling_params()
        self.params = make_params(defaults, given, RequestOutputKind.DELTA)
        self._count = 0

    def reply(self, messages: list[Message]) -> Generator[str]:
        prompt = self.engine.front_end.render_chat(messages, tokenize=True, add_generation_prompt=True)
        self._count += 1
        request_id = str(self._count)
        self.engine.add_request(request_id, {"prompt_token_ids": prompt}, self.params.clone())
        try:
            while self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    if output.error is not None:
                        raise PeltonError(output.error.message)
                    yield output.outputs[0].text
        finally:
            self.engine.abort_request(request_id)

    def close(self) -> None:
        self.engine.shutdown()


# At a server.


def _at_server(url: str, parsed: Parsed) -> Partner:
    from pelton_plugins.commands.server_client import ServerClient

    client = ServerClient(url, api_key=env.api_key())
    model = parsed.config.model.model if "model" in parsed.explicit else client.first_model()
    return ServerPartner(client, model, parsed.structs["SamplingFlags"].given())


class ServerPartner:
    """A server that speaks the OpenAI protocol."""

    def __init__(self, client: Any, model: str, given: dict[str, Any]) -> None:
        self.client = client
        self.body: dict[str, Any] = {"model": model, "stream": True, **given}

    def reply(self, messages: list[Message]) -> Generator[str]:
        chunks: Iterator[dict[str, Any]] = self.client.stream(
            "/v1/chat/completions", {**self.body, "messages": messages}
        )
        for chunk in chunks:
            for choice in chunk.get("choices", ()):
                text = choice.get("delta", {}).get("content")
                if text:
                    yield text

    def close(self) -> None:
        pass
