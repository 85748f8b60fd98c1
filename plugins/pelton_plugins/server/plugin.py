"""Offers the `serve` command and the built-in HTTP routes."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import CommandEntry, Entry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_cli_commands() -> Sequence[CommandEntry]:
    return [
        CommandEntry(
            name="serve",
            load="pelton_plugins.server.command:run",
            help="serve a model over an OpenAI-compatible HTTP API",
            doc="pelton serve MODEL [--host H] [--port P] [--api-key K] ...",
        ),
        CommandEntry(
            name="run-batch",
            load="pelton_plugins.server.batch:run",
            help="answer the requests of a file in OpenAI's batch format",
            doc="pelton run-batch MODEL -i requests.jsonl -o answers.jsonl",
        ),
    ]


@hookimpl
def pelton_http_routes() -> Sequence[Entry]:
    return [
        Entry(
            name="openai",
            load="pelton_plugins.server.routes.openai:routes",
            doc="/v1/models, /v1/completions, /v1/chat/completions",
        ),
        Entry(name="responses", load="pelton_plugins.server.routes.responses:routes", doc="/v1/responses"),
        Entry(
            name="anthropic",
            load="pelton_plugins.server.routes.anthropic:routes",
            doc="/v1/messages, /v1/messages/count_tokens",
        ),
        Entry(
            name="pooling",
            load="pelton_plugins.server.routes.pooling:routes",
            doc="/v1/embeddings, /classify, /score, /rerank, /pooling",
        ),
        Entry(
            name="lora",
            load="pelton_plugins.server.routes.lora:routes",
            doc="/v1/load_lora_adapter, /v1/unload_lora_adapter",
        ),
        Entry(name="cohere", load="pelton_plugins.server.routes.cohere:routes", doc="/cohere/v2/chat, /v2/embed"),
        Entry(
            name="extras",
            load="pelton_plugins.server.routes.extras:routes",
            doc="/invocations, batches of chats, /render, /derender, /inference/v1/generate, /reset_prefix_cache",
        ),
        Entry(name="profile", load="pelton_plugins.server.routes.profile:routes", doc="/start_profile, /stop_profile"),
        Entry(name="sleep", load="pelton_plugins.server.routes.sleep:routes", doc="/sleep, /wake_up, /is_sleeping"),
        Entry(
            name="elastic",
            load="pelton_plugins.server.routes.elastic:routes",
            doc="/scale_elastic_ep, /is_scaling_elastic_ep",
        ),
        Entry(name="tokens", load="pelton_plugins.server.routes.tokens:routes", doc="/tokenize, /detokenize"),
        Entry(
            name="operations",
            load="pelton_plugins.server.routes.operations:routes",
            doc="/health, /ping, /load, /version, /server_info, /metrics, /openapi.json, /docs",
        ),
    ]
