"""`EngineRequest`: one sequence to generate, as it crosses from a front end to the engine.

Plain data, validated by `engine/input_processor.py` before it gets here. n > 1 is n of these. Sizes are checked by the
structs themselves, on both sides of a process border. What a model or an engine does not offer is refused by
the scheduler. Its own record of a running request is what `pelton.scheduler.request` describes.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgspec

from pelton import limits
from pelton.errors import RequestError
from pelton.sampling_params import SamplingParams, _integer

DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
"""Bytes of one number, by the dtypes that a tensor may cross a border in."""


class TensorData(msgspec.Struct, frozen=True, array_like=True):
    """A tensor as bytes: row-major, little-endian. Raises `RequestError` where bytes, dtype and shape disagree."""

    data: bytes
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        size = DTYPE_BYTES.get(self.dtype)
        if size is None:
            raise RequestError(
                f"A tensor's dtype must be one of {', '.join(DTYPE_BYTES)}", param="dtype", value=self.dtype
            )
        if any(length < 0 for length in self.shape) or len(self.shape) > limits.MAX_TENSOR_DIMENSIONS:
            raise RequestError(
                f"A tensor's shape must be at most {limits.MAX_TENSOR_DIMENSIONS} numbers, none below 0",
                param="shape",
                value=list(self.shape),
            )
        wanted = math.prod(self.shape) * size
        if len(self.data) != wanted:
            raise RequestError(
                f"A tensor of {self.dtype} {list(self.shape)} has {len(self.data)} bytes; it needs {wanted}.",
                param="data",
            )

    def content_hash(self) -> str:
        """Equal for tensors of equal content."""
        head = f"{self.dtype} {list(self.shape)}\0".encode()
        return "sha256:" + hashlib.sha256(head + self.data).hexdigest()


class MultiModalItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One image, video or sound of a prompt, and the placeholder tokens whose embeddings it brings."""

    kind: str
    """"image", "video", "audio" or a plugin's own word."""
    hash: str
    """Of the content and of how it was prepared: equal hashes share cached blocks and encoder outputs."""
    offset: int
    """Of its first placeholder in the prompt."""
    length: int
    """Placeholder tokens."""
    tensors: dict[str, TensorData] = {}
    """What the model's encoder reads, by the names of its arguments."""

    def __post_init__(self) -> None:
        for name, value in (("kind", self.kind), ("hash", self.hash)):
            _text(f"multi_modal_items.{name}", value, limits.MAX_ITEM_TEXT_CHARS)
        for name, number, least in (("offset", self.offset, 0), ("length", self.length, 1)):
            if not least <= number < 2**31:
                raise RequestError(
                    f"multi_modal_items.{name} must be an integer from {least} to {2**31 - 1}",
                    param=f"multi_modal_items.{name}",
                    value=number,
                )
        size = sum(len(tensor.data) for tensor in self.tensors.values())
        if size > limits.MAX_ITEM_BYTES:
            raise RequestError(
                f"multi_modal_items.tensors of an item have {size} bytes; at most {limits.MAX_ITEM_BYTES}.",
                param="multi_modal_items.tensors",
            )


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A LoRA adapter."""

    id: int
    """A number from 1 that is never given to another adapter: cached blocks are told apart by it."""
    name: str
    path: str | None = None
    """Folder of its weights; None when the engine has it already."""

    def __post_init__(self) -> None:
        if not 1 <= self.id < 2**63:
            raise RequestError(
                f"adapter.id must be an integer from 1 to {2**63 - 1}", param="adapter.id", value=self.id
            )
        _text("adapter.name", self.name, limits.MAX_ADAPTER_NAME_CHARS)
        if self.path is not None:
            _text("adapter.path", self.path, limits.MAX_ADAPTER_PATH_CHARS)


TOKEN_TASKS = ("token_embed", "token_classify")
EMBED_TASKS = ("embed", "token_embed")
POOLING_TASKS = ("embed", "classify", "score", "reward", "token_embed", "token_classify")


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request for a vector or scores instead of tokens: vLLM's names and meaning."""

    task: str = "embed"
    """embed (a vector), classify (probabilities), score (of a pair of texts), reward (a head's bare numbers), token_embed or
    token_classify (a row for each token)."""
    dimensions: int | None = None
    """Numbers to keep of each vector, where the model was trained for that; all when unset."""
    use_activation: bool | None = None
    """Normalize vectors, or turn scores into probabilities; as the model says when unset."""
    second_text_start: int | None = None
    """The prompt's first token of a second text, for encoders that tell the texts of a pair apart."""
    skip_reading_prefix_cache: bool | None = None
    """Compute all tokens; in any case where the result needs every token's hidden state."""

    def __post_init__(self) -> None:
        if self.task not in POOLING_TASKS:
            raise RequestError(f"task must be one of {', '.join(POOLING_TASKS)}", param="task", value=self.task)
        if self.dimensions is not None:
            _integer(1, limits.MAX_POOLING_DIMENSIONS, "dimensions", self.dimensions)
        if self.second_text_start is not None:
            _integer(0, 2**31 - 1, "second_text_start", self.second_text_start)

    def asked(self) -> tuple[str, int | None, bool | None]:
        """Return what is to be made of a prompt's hidden states: equal for requests that can be made together."""
        return self.task, self.dimensions, self.use_activation


class EngineRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    request_id: str
    """Unique among unfinished requests of this engine."""
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    """Unused defaults for a request that pools."""
    pooling_params: PoolingParams | None = None
    """Set for a request that pools instead of generating."""
    eos_token_ids: list[int] = []
    """Stop with reason "stop" unless ignore_eos; masked until min_tokens."""
    bad_words_token_ids: list[list[int]] = []
    seed: int = 0
    """Random numbers are a function of (seed, position): always set, drawn by the front end when the user gave none."""
    priority: int = 0
    """Lower value first, with the priority policy."""
    cache_salt: str | None = None
    """Requests share cached blocks only with requests of the same salt."""
    tenant: str = ""
    """Whose share of the engine it is charged to, where the scheduling policy has shares."""
    adapter: AdapterRef | None = None
    multi_modal_items: list[MultiModalItem] = []
    """In prompt order; their placeholders do not overlap."""
    prompt_embeds: TensorData | None = None
    """[len(prompt_token_ids), hidden size], in place of the embeddings of the prompt's tokens."""
    timeout_s: float | None = None
    """Time limit from the engine's receipt of the request."""
    kv_transfer_params: dict[str, Any] | None = None
    """For the KV connector, which says what it understands."""
    client_index: int = 0
    """Which front end sent it, and gets its outputs."""

    def __post_init__(self) -> None:
        num_tokens = len(self.prompt_token_ids)
        if self.multi_modal_items:
            self._check_items(num_tokens)
        embeds = self.prompt_embeds
        if embeds is not None:
            if len(embeds.shape) != 2 or embeds.shape[0] != num_tokens:
                raise RequestError(
                    f"prompt_embeds is {embeds.dtype} {list(embeds.shape)}; expected [{num_tokens}, hidden size], a row "
                    "for each prompt token.",
                    param="prompt_embeds",
                )
            if len(embeds.data) > limits.MAX_PROMPT_EMBEDS_BYTES:
                raise RequestError(
                    f"prompt_embeds has {len(embeds.data)} bytes; at most {limits.MAX_PROMPT_EMBEDS_BYTES}.",
                    param="prompt_embeds",
                )
        if self.kv_transfer_params is not None:
            check_plain_data("kv_transfer_params", self.kv_transfer_params, limits.MAX_KV_TRANSFER_PARAMS_BYTES)

    def _check_items(self, num_tokens: int) -> None:
        if len(self.multi_modal_items) > limits.MAX_ITEMS:
            raise RequestError(
                f"multi_modal_items has {len(self.multi_modal_items)} entries; at most {limits.MAX_ITEMS}.",
                param="multi_modal_items",
            )
        end = 0
        for item in self.multi_modal_items:
            if item.offset < end or item.offset + item.length > num_tokens:
                raise RequestError(
                    f"multi_modal_items has an item at tokens {item.offset} to {item.offset + item.length}; items follow "
                    f"each other without overlap inside the prompt's {num_tokens} tokens, and the next may begin at {end}.",
                    param="multi_modal_items.offset",
                )
            end = item.offset + item.length

    @property
    def adapter_id(self) -> int:
        """0 without an adapter."""
        return 0 if self.adapter is None else self.adapter.id

    def placeholders(self) -> list[tuple[int, int, str]]:
        """(offset, length, content hash) of what tells prompts of equal token ids apart."""
        found = [(item.offset, item.length, item.hash) for item in self.multi_modal_items]
        if self.prompt_embeds is not None:
            found.append((0, len(self.prompt_token_ids), self.prompt_embeds.content_hash()))
        return found


def check_plain_data(name: str, value: Any, most_bytes: int) -> None:
    """Raise `RequestError` when `value` cannot be packed, or is too large."""
    try:
        size = len(msgspec.msgpack.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(f"{name} must be plain data: {error}", param=name) from None
    if size > most_bytes:
        raise RequestError(f"{name} has {size} bytes; at most {most_bytes}", param=name)


def _text(name: str, value: str, most: int) -> None:
    if not 1 <= len(value) <= most:
        raise RequestError(f"{name} has {len(value)} characters; give 1 to {most}", param=name)
