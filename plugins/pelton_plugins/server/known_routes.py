"""Routes that clients of other servers know and this one does not offer: each is a 404 that says why, or what to do instead."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

NO_SOUND = "no model here reads sound"
NO_TRAINING = (
    "weights do not change while the server runs; start another server, or load an adapter with /v1/load_lora_adapter"
)
NO_MEDIA = "this server takes text and token ids, and keeps nothing of other inputs"
PAUSE = "a server that is to take no requests is sent SIGTERM; one whose memory is wanted sleeps (/sleep)"

NOT_OFFERED: Mapping[str, str] = {
    "/v1/audio/transcriptions": NO_SOUND,
    "/v1/audio/translations": NO_SOUND,
    "/v1/realtime": NO_SOUND,
    "/v1/images/generations": "no model here makes images",
    "/v1/moderations": "use /classify with a model that was trained for it",
    "/v1/files": "pelton run-batch reads a file and writes one",
    "/v1/batches": "pelton run-batch reads a file and writes one",
    "/v1/decisions": "use /v1/chat/completions with a response_format",
    "/v1/systemone": "use /v1/chat/completions",
    "/generative_scoring": "send the text with each label to /v1/completions, with echo, logprobs and max_tokens 0",
    "/kv_event_sources": "blocks of the KV cache send no events; --data-parallel-routing prefix sends what begins alike to one engine",
    "/fault_tolerance/apply": "an engine that dies or hangs is started again by itself",
    "/fault_tolerance/status": "see /health, and engine_up and engine_restarts of /metrics",
    "/pause": PAUSE,
    "/resume": PAUSE,
    "/is_paused": PAUSE,
    "/abort_requests": "a request ends when its client closes the connection, or by its timeout_s",
    "/init_weight_transfer_engine": NO_TRAINING,
    "/start_weight_update": NO_TRAINING,
    "/update_weights": NO_TRAINING,
    "/finish_weight_update": NO_TRAINING,
    "/weight_info": NO_TRAINING,
    "/weight_checker": NO_TRAINING,
    "/get_world_size": "see /server_info",
    "/collective_rpc": "clients may not call methods of the workers; see /server_info",
    "/reset_mm_cache": NO_MEDIA,
    "/reset_encoder_cache": NO_MEDIA,
    "/release_kv_cache_memory": "use /sleep, which gives the weights' memory back too",
}
"""Path: why not, or what instead."""


def why_not(path: str) -> str | None:
    """The words of the 404, of a route that is known and not offered."""
    advice = NOT_OFFERED.get(path.rstrip("/"))
    return None if advice is None else f"{path.rstrip('/')} is not offered: {advice}."


def not_found(path: str, routes: Collection[str]) -> str:
    """The words of any other 404: which of `routes` may be meant. Most often the client's base URL lacks /v1, or has it twice."""
    shown = path if len(path) <= 100 else path[:100] + "..."
    moved = [f"/v1{path}", path.removeprefix("/v1")]
    near = [one for one in moved if one in routes] or difflib.get_close_matches(path[:100], routes, n=1, cutoff=0.8)
    return f"There is no route {shown!r}." + (f" Did you mean {near[0]}?" if near else "")
