"""`EngineRequest`: one sequence to generate, as it crosses from a front end to the engine.

Plain data, validated by `engine/input_processor.py` before it gets here. n > 1 is n of these. The
scheduler's own record of a running request is `scheduler/request.py`.
"""

from __future__ import annotations

import msgspec

from pelton.sampling_params import SamplingParams


class EngineRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    request_id: str
    """Unique among unfinished requests of this engine."""
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: list[int] = []
    """Stop with reason "stop" unless ignore_eos; masked until min_tokens."""
    bad_words_token_ids: list[list[int]] = []
    seed: int = 0
    """Random numbers are a function of (seed, position): always set, drawn by the front end when the user gave none."""
    priority: int = 0
    """Lower value first, with the priority policy."""
    cache_salt: str | None = None
    """Requests share cached blocks only with requests of the same salt."""
    adapter_id: int = 0
    """LoRA adapter: a number that is never reused; 0 for none."""
    block_extra_hashes: dict[int, list[str]] = {}
    """Multimodal content hashes by index of the block whose placeholders they fill."""
    timeout_s: float | None = None
    """Time limit from the engine's receipt of the request."""
    kv_transfer_params: dict[str, str] | None = None
