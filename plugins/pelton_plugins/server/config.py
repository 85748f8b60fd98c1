"""Settings of the HTTP server, and of nothing else."""

from __future__ import annotations

import ipaddress
import re
from typing import Literal

import msgspec

from pelton import limits
from pelton.config import EngineConfig
from pelton.errors import ConfigError

MAX_API_SERVERS = 64
FAIRNESS_KEY = re.compile(r"api-key|header:[A-Za-z0-9_-]{1,64}")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the server listens, who may use it, and what it bounds."""

    host: str = "127.0.0.1"
    """Address to listen on. One that other machines reach needs an api_key."""
    port: int = 8000
    """0 takes a free one, which the start message names."""
    api_server_count: int | None = None
    """Processes that serve HTTP beside the engines, at one port; unset: as many as engines (data_parallel_size). One is enough below
    some ten thousand tokens a second."""
    api_key: list[str] = msgspec.field(default_factory=list)
    """Keys that clients send as `Authorization: Bearer KEY`; any of them opens every route."""
    allow_unauthenticated: bool = False
    """Listen on a reachable address without a key. Anyone who can reach the port may then use and read everything."""
    public_routes: list[str] = msgspec.field(default_factory=lambda: ["/health", "/ready", "/readyz", "/live", "/ping"])
    """Paths that need no key. All others do, also those that plugins add; the files of the page at / need none."""
    ui: bool = True
    """Serve a page for people at /: a chat, and figures of the engine. It asks for the key that its requests need."""
    allowed_origins: list[str] = msgspec.field(default_factory=list)
    """Origins of web pages that may use the server from a browser (CORS), such as https://chat.example; * for all."""
    allowed_hosts: list[str] = msgspec.field(default_factory=list)
    """Further names in the Host header that are served without a key, beside those of this machine; * for all."""
    root_path: str = ""
    """Path prefix that a proxy strips before it hands requests on."""
    ssl_certfile: str | None = None
    """TLS certificate (PEM); ssl_keyfile belongs to it."""
    ssl_keyfile: str | None = None
    """Private key (PEM) of ssl_certfile."""
    max_body_bytes: int = limits.MAX_BODY_BYTES
    """Longest request body; a longer one is refused with status 413 before it is parsed."""
    max_body_bytes_at_once: int = 16 * limits.MAX_BODY_BYTES
    """Bytes of request bodies in work at once; one more is refused with status 503."""
    body_timeout_s: float = 30.0
    """Seconds that a client may send nothing of a body that it began."""
    max_concurrent_requests: int | None = None
    """Most generating requests at once; one more is refused with status 503. See also max_num_queued_reqs."""
    fairness_key: str | None = None
    """Who shares the engine, with --scheduling-policy fair: api-key, or header:NAME for a header that a proxy sets."""
    graceful_shutdown_s: float = 30.0
    """Seconds that running requests get to finish after SIGTERM or SIGINT; then each gets an error."""
    timeout_keep_alive_s: int = 5
    """Seconds that an idle connection stays open."""
    headless: bool = False
    """Serve nothing here: run this host's engines for the server at data_parallel_address."""
    max_engine_restarts: int = 5
    """How often in a row a dead engine is started again; one that lived for ten minutes begins a new row."""
    max_engine_silence_s: float = 120.0
    """Seconds without a sign of progress, while requests wait, after which /health answers 503."""
    sse_keep_alive_interval: float | None = None
    """Seconds of silence after which a stream gets a comment line, for proxies that close quiet connections."""
    enable_auto_tool_choice: bool | None = None
    """Let models decide by themselves whether they call a tool; unset: where a tool parser is known."""
    tool_call_parser: str | None = None
    """Format of the model's tool calls, such as hermes, llama3_json or mistral; unset: what the checkpoint says, if it does."""
    reasoning_parser: str | None = None
    """Format of the model's reasoning, such as think, deepseek_r1 or gpt_oss; unset: what the checkpoint says, if it does."""
    max_stored_responses: int = 0
    """Answers of /v1/responses kept in memory, for previous_response_id, GET and background; 0 keeps none."""
    response_role: str = "assistant"
    """Role of the messages that chat completions return."""
    enable_request_id_headers: bool = False
    """Return the X-Request-Id header (the client's own, or a new one)."""
    enable_force_include_usage: bool = False
    """Send token usage in every stream, also when the client did not ask."""
    trust_request_chat_template: bool = False
    """Let requests bring their own chat template."""
    disable_fastapi_docs: bool = False
    """Offer neither /openapi.json nor /docs, the page made of it. The name is vLLM's."""
    enable_tokenizer_info_endpoint: bool = True
    """Answer /tokenizer_info: names of special tokens, and the chat template."""
    enable_sleep_mode: bool = False
    """Let clients send the engine to sleep and wake it: /sleep, /wake_up, /is_sleeping."""
    profile_dir: str | None = None
    """Let clients profile the engine, /start_profile and /stop_profile: torch's traces are written to this folder."""
    special_tokens_in_messages: bool = False
    """Read special tokens, such as <|im_end|>, in messages of users and tools as what they are; else they are text."""
    return_errors_in_detail: bool = False
    """Show causes of status 500 to clients as they are, unscrubbed; for debugging on a private machine."""
    otlp_traces_endpoint: str | None = None
    """Where OpenTelemetry spans of requests go, over HTTP, such as http://127.0.0.1:4318/v1/traces. Needs the extra `otel`."""
    collect_detailed_traces: bool | Literal["all", "model", "worker"] = False
    """Spans also of the server's own stages: reading the body, preparing the prompt, sending the answer. On, or all."""
    log_requests: bool = False
    """Log each generating request's id, model, lengths and sampling settings; not what was said."""
    log_request_prompts: bool = False
    """With log_requests: the prompts and messages too. They may hold private text."""
    access_log: bool = True
    """Log one line a request."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; use 1 to 65535, or 0 for a free one.")
        if any(not key for key in self.api_key):
            raise ConfigError("api_key has an empty key; give a non-empty one, or leave the setting out.")
        if self.api_server_count is not None and not 1 <= self.api_server_count <= MAX_API_SERVERS:
            raise ConfigError(f"api_server_count is {self.api_server_count}; use 1 to {MAX_API_SERVERS}.")
        if self.max_engine_restarts < 0:
            raise ConfigError(f"max_engine_restarts is {self.max_engine_restarts}; use 0 or more.")
        for name in ("max_body_bytes", "max_body_bytes_at_once", "max_concurrent_requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; use at least 1.")
        if not 0 <= self.max_stored_responses <= 100_000:
            raise ConfigError(f"max_stored_responses is {self.max_stored_responses}; use 0 to 100000, such as 1000.")
        for name in ("body_timeout_s", "graceful_shutdown_s", "timeout_keep_alive_s", "max_engine_silence_s"):
            if not getattr(self, name) >= 0:  # NaN too
                raise ConfigError(f"{name} is {getattr(self, name)}; use 0 or more seconds.")
        if self.sse_keep_alive_interval is not None and not self.sse_keep_alive_interval > 0:
            raise ConfigError(f"sse_keep_alive_interval is {self.sse_keep_alive_interval}; use seconds above 0.")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile belong together; give both or neither.")
        if self.fairness_key is not None and not FAIRNESS_KEY.fullmatch(self.fairness_key):
            raise ConfigError(
                f"fairness_key is {self.fairness_key!r}; use api-key, or header:NAME such as header:X-Tenant."
            )
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_traces_endpoint is {endpoint!r}; use an address such as http://127.0.0.1:4318/v1/traces."
            )
        if self.collect_detailed_traces in ("model", "worker"):
            raise ConfigError(
                f"collect_detailed_traces is {self.collect_detailed_traces!r}; use all. Times of steps are in the metrics "
                "step_host_seconds and step_device_wait_seconds, and --profile-dir traces workers."
            )
        if self.log_request_prompts and not self.log_requests:
            raise ConfigError("log_request_prompts is set without log_requests; set both, or neither.")
        for path in self.public_routes:
            if not path.startswith("/"):
                raise ConfigError(f"public_routes has {path!r}; paths start with a slash, such as /metrics.")

    def num_servers(self, config: EngineConfig) -> int:
        """Processes that serve, beside the engines of these settings. One where adapters are loaded by requests: each has its own list."""
        if self.api_server_count is not None:
            return self.api_server_count
        return (
            1 if config.lora.allow_runtime_lora_updating else min(len(config.parallel.served_indexes), MAX_API_SERVERS)
        )

    def check_policy(self, scheduling_policy: str) -> None:
        """Refuse a key that nothing asks for. Raises `ConfigError`."""
        if self.fairness_key is not None and scheduling_policy in ("fcfs", "priority"):
            raise ConfigError(
                f"fairness_key is set, and scheduling_policy is {scheduling_policy}, which has no shares. "
                "Set --scheduling-policy fair."
            )

    def check_exposure(self) -> None:
        """Refuse a reachable address without a key. Raises `ConfigError`."""
        if not self.api_key and not self.allow_unauthenticated and not is_loopback(self.host):
            raise ConfigError(
                f"host is {self.host!r}, which other machines may reach, and no api_key is set. "
                "Set --api-key, keep --host 127.0.0.1, or accept the risk with --allow-unauthenticated."
            )


def is_loopback(host: str) -> bool:
    """True for localhost and loopback addresses; any other name counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
