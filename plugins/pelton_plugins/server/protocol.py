"""Bodies of requests and responses, as structs that are decoded and encoded once.

Requests take null wherever OpenAI's clients send it, and accept fields that are not listed here (they
are logged at debug level). Responses keep null fields, as clients expect of whole bodies.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from pelton.sampling_params import StructuredOutputsParams
from pelton_plugins.server.tools import Tool, ToolChoice

NOT_EMPTY = msgspec.Meta(extra_json_schema={"minItems": 1})
"""For the description of the API; the check names the field in its own words."""
Prompts = str | Annotated[list[int | str | list[int]], NOT_EMPTY]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    """Of a structural tag, with `triggers`; or `format`."""
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """Fields that completions and chat completions have in common."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    timeout_s: float | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    logits_processor_args: dict[str, Any] | None = None
    use_beam_search: bool | None = None
    """Answer with the `n` likeliest continuations."""
    length_penalty: float | None = None
    """Of beam search."""
    kv_transfer_params: dict[str, Any] | None = None
    return_metrics: bool | None = None
    """Say in `metrics` how long the request waited, and how long its parts took."""
    # Accepted, and without effect on the answer.
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    session_id: str | None = None
    # Known, and refused unless they ask for nothing: see `rules`.
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    watermarking: Any = None
    logprob_token_ids: Any = None
    ec_transfer_params: Any = None
    stream_interval: int | None = None
    return_token_offsets: bool | None = None
    return_weight_versions: bool | None = None
    mm_payload: Any = None
    logits_processors: Any = None
    guided_decoding_backend: str | None = None


class CompletionRequest(GenerateRequest, kw_only=True):
    DESCRIBED_AS_REQUIRED: ClassVar[tuple[str, ...]] = ("prompt",)
    """Fields whose absence has an error of its own, which says what to send."""

    prompt: Prompts | None = None
    """A text, texts, token ids, or lists of token ids; not a mixture."""
    max_tokens: int | None = None
    """16 when left out."""
    logprobs: int | None = None
    best_of: int | None = None
    """Samples that are made of each prompt; the `n` likeliest are returned."""
    suffix: str | None = None
    prompt_embeds: str | list[str] | None = None
    """Embeddings in place of a prompt, or before those in `prompt`: base64 of a safetensors file with one tensor
    [tokens, hidden size], or of what `torch.save` writes of it. Needs --enable-prompt-embeds."""


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    """Of a part of that type, in an assistant's message."""


class Message(msgspec.Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """An older name of `reasoning`."""


class ChatCompletionRequest(GenerateRequest, kw_only=True):
    messages: Annotated[list[Message], NOT_EMPTY]
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    """"auto" when left out."""
    parallel_tool_calls: bool | None = None
    """false: at most one call."""
    include_reasoning: bool | None = None
    """false: leave the reasoning out of the answer."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """For the chat template, as its variable of that name."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    return_prompt_text: bool | None = None
    # Known, and refused unless they ask for nothing: see `rules`.
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    functions: Any = None
    moderation: Any = None
    function_call: Any = None
    web_search_options: Any = None
    verbosity: str | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: dict[str, int] | None = None


class RequestTimes(msgspec.Struct, kw_only=True):
    """Seconds of one prompt's parts; null for what did not happen. Of several prompts the longest."""

    time_to_first_token_s: float | None = None
    queue_time_s: float | None = None
    prefill_time_s: float | None = None
    decode_time_s: float | None = None
    inference_time_s: float | None = None
    e2e_latency_s: float | None = None
    num_preemptions: int = 0


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: str | None = None
    system_fingerprint: str | None = None
    usage: Usage
    kv_transfer_params: dict[str, Any] | None = None
    metrics: RequestTimes | None = None


class ChatTopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatLogprob(ChatTopLogprob, kw_only=True):
    top_logprobs: list[ChatTopLogprob] = []


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ChatLogprob] | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """As `reasoning`, under the name that older clients look for."""
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None
    tool_calls: list[dict[str, Any]] = []


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: str | None = None
    system_fingerprint: str | None = None
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    metrics: RequestTimes | None = None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "pelton"
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    permission: list[dict[str, Any]] = []


class LoadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    lora_name: str
    lora_path: str
    """A PEFT folder on the server."""
    load_inplace: bool = False
    """Read a folder again whose name is served already; requests that run go on with the old content."""


class ScaleRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    new_data_parallel_size: int
    """Engines, 1 or more."""
    drain_timeout: float = 120.0
    """Seconds that requests of engines that leave have to finish."""


class ScaleAnswer(msgspec.Struct, kw_only=True):
    message: str


class ScalingAnswer(msgspec.Struct, kw_only=True):
    is_scaling_elastic_ep: bool


class UnloadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None
    """Accepted for vLLM's clients; the name decides."""


class AdapterAnswer(msgspec.Struct, kw_only=True):
    message: str


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]
