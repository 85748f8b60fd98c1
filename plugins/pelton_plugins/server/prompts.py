"""From the prompt or messages of a request's body to token ids, checked against what the engine holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pelton import limits
from pelton.engine.input_processor import read_prompt_embeds
from pelton.errors import ConfigError, NotSupportedError, RequestError
from pelton.messages.request import TensorData
from pelton.sampling_params import SamplingParams
from pelton_plugins.server.custom_tools import call_of_function
from pelton_plugins.server.embeds_body import decode_embeds
from pelton_plugins.server.literal_text import mark as mark_specials
from pelton_plugins.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
    Message,
    TokenizeRequest,
)
from pelton_plugins.server.tools import Tool, template_tools

if TYPE_CHECKING:
    from pelton.sdk.async_llm import AsyncLLM

LONG_TEXT_CHARS = 20_000  # tokenizing more than this would hold up the event loop for milliseconds
MANY_TEXTS_CHARS = 2_000  # texts that have more together are tokenized beside the loop, on as many cores as there are

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Prompt:
    token_ids: list[int]
    """As many zeros as it has tokens, where it is given as embeddings."""
    text: str | None = None
    embeds: TensorData | None = None


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run `work` here when `size` (characters or tokens) is small, else on a thread."""
    return work() if size <= LONG_TEXT_CHARS else await asyncio.to_thread(work)


async def tokenize(
    llm: AsyncLLM | Any, text: str, *, add_special_tokens: bool, request: GenerateRequest | None = None
) -> list[int]:
    """Off the event loop where the text is long. request: what may ask to truncate it."""
    (token_ids,) = await tokenize_all(llm, [text], add_special_tokens=add_special_tokens, request=request)
    return token_ids


async def tokenize_all(
    llm: AsyncLLM | Any, texts: Sequence[str], *, add_special_tokens: bool, request: GenerateRequest | None = None
) -> list[list[int]]:
    """Off the event loop where the texts are many or long. Raises `RequestError` for one that cannot fit in the context."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise RequestError("The server runs without a tokenizer; send token ids.", param="prompt")
    size = sum(map(len, texts))
    if size <= (LONG_TEXT_CHARS if len(texts) == 1 else MANY_TEXTS_CHARS):
        return [list(tokenizer.encode(text, add_special_tokens=add_special_tokens)) for text in texts]

    def work() -> list[list[int]]:
        fitting = [_bounded(llm, text, request) for text in texts]
        found: list[list[int]] = tokenizer.encode_batch(fitting, add_special_tokens=add_special_tokens)
        return found

    return await asyncio.to_thread(work)


def _bounded(llm: Any, text: str, request: GenerateRequest | None) -> str:
    """`text`, unless it is longer than any that fits: to tokenize megabytes takes a hundred times their memory."""
    most, longest = max_model_len(llm), llm.tokenizer.max_token_chars
    if longest is None or len(text) <= most * longest:
        return text
    wanted = request.truncate_prompt_tokens if request is not None else None
    if request is not None and wanted is not None and wanted <= most:  # the rest has at least `most` tokens
        return text[: most * longest] if request.truncation_side == "right" else text[-most * longest :]
    raise RequestError(
        f"This model's maximum context length is {most} tokens. However, your prompt contains {len(text)} characters, and "
        f"no more than {most * longest} can fit, as no token has more than {longest}. Shorten the prompt.",
        param="input_text",
        value=len(text),
    )


def truncate(llm: AsyncLLM | Any, request: GenerateRequest, prompt: Prompt, max_tokens: int | None) -> Prompt:
    """Apply truncate_prompt_tokens; -1 leaves room for max_tokens."""
    most = request.truncate_prompt_tokens
    if most is None:
        return prompt
    if most == -1:
        most = max(max_model_len(llm) - max(max_tokens or 1, 1), 1)
    if len(prompt.token_ids) <= most:
        return prompt
    ids = prompt.token_ids[:most] if request.truncation_side == "right" else prompt.token_ids[-most:]
    return Prompt(token_ids=ids)


def max_model_len(llm: AsyncLLM | Any) -> int:
    """Length limit of the running engine, which may have shrunk the model's own to what fits."""
    return int(min(llm.model.max_model_len, llm.info.max_model_len))


def check_length(llm: AsyncLLM | Any, prompt: Prompt, max_tokens: int | None) -> None:
    """A client that asks for more than the context holds hears so, instead of getting less."""
    most, found = max_model_len(llm), len(prompt.token_ids)
    if found + (max_tokens or 1) > most:
        wanted = f" and max_tokens asks for {max_tokens} more" if max_tokens else ", and the output needs at least one"
        raise RequestError(
            f"This model's maximum context length is {most} tokens. However, your prompt contains {found} tokens"
            f"{wanted}. Shorten the prompt or lower max_tokens.",
            param="input_tokens" if prompt.text is None else "input_text",
        )


def check_fan_out(num_prompts: int, n: int, field: str = "prompt") -> None:
    """field: that holds the prompts."""
    if num_prompts > limits.MAX_PROMPTS_PER_REQUEST:
        raise RequestError(
            f"{field} has {num_prompts} entries; at most {limits.MAX_PROMPTS_PER_REQUEST} in one request", param=field
        )
    if num_prompts * n > limits.MAX_TOTAL_SEQUENCES_PER_REQUEST:
        raise RequestError(
            f"{num_prompts} prompts x n {n} are {num_prompts * n} sequences; at most "
            f"{limits.MAX_TOTAL_SEQUENCES_PER_REQUEST} in one request",
            param="n",
        )


async def read_prompts(llm: AsyncLLM | Any, request: CompletionRequest, params: SamplingParams) -> list[Prompt]:
    """Embeddings; then text, texts, token ids or lists of token ids. Raises `RequestError` before anything runs."""
    first = await _read_embeds(llm, request) if request.prompt_embeds is not None else []
    given = request.prompt
    if given is None and first:
        check_fan_out(len(first), params.n)
        return first
    if given is None or given == []:
        raise RequestError("prompt is empty; send text or token ids.", param="prompt")
    items: Any
    if isinstance(given, str) or all(isinstance(item, int) for item in given):
        items = [given]
    elif all(isinstance(item, str) for item in given) or all(isinstance(item, list) for item in given):
        items = given
    else:
        raise RequestError("prompt mixes texts, token ids and lists; send one kind.", param="prompt")
    check_fan_out(len(first) + len(items), params.n)
    special = True if request.add_special_tokens is None else request.add_special_tokens
    if isinstance(items[0], str):
        found = await tokenize_all(llm, items, add_special_tokens=special, request=request)
        read = [Prompt(token_ids=ids, text=text) for ids, text in zip(found, items, strict=True)]
    else:
        read = [Prompt(token_ids=ids) for ids in items]
    prompts = first
    for prompt in read:
        if not prompt.token_ids:
            raise RequestError("prompt is empty; send text or token ids.", param="prompt")
        prompt = truncate(llm, request, prompt, params.max_tokens)
        check_length(llm, prompt, request.max_tokens)
        prompts.append(prompt)
    return prompts


async def _read_embeds(llm: AsyncLLM | Any, request: CompletionRequest) -> list[Prompt]:
    if not llm.config.model.enable_prompt_embeds:
        raise NotSupportedError(
            "This server takes no prompt_embeds (enable_prompt_embeds is off); send text or token ids.",
            param="prompt_embeds",
        )
    given = request.prompt_embeds
    texts = (
        {"prompt_embeds": given}
        if isinstance(given, str)
        else {f"prompt_embeds[{i}]": t for i, t in enumerate(given or ())}
    )
    prompts = []
    hidden_size = llm.model.hf_config["hidden_size"]
    for field, text in texts.items():
        embeds = await off_loop(len(text), partial(_embeds, text, field, hidden_size))
        prompts.append(Prompt(token_ids=[0] * embeds.shape[0], embeds=embeds))
        check_length(llm, prompts[-1], request.max_tokens)
    return prompts


def _embeds(text: str, field: str, hidden_size: int) -> TensorData:
    embeds = decode_embeds(text, field)
    try:
        return read_prompt_embeds(embeds, hidden_size)
    except RequestError as error:
        raise RequestError(str(error), param=field) from None


async def render(
    llm: AsyncLLM | Any,
    request: ChatCompletionRequest | TokenizeRequest,
    tools: Sequence[Tool] = (),
    *,
    with_specials: bool = False,
) -> Prompt:
    """Messages to a prompt, by the chat template. tools: those that the model is shown. with_specials: users and tools may write special
    tokens."""
    keep_open = bool(request.continue_final_message)
    add_prompt = not keep_open if request.add_generation_prompt is None else request.add_generation_prompt
    options: dict[str, Any] = {
        "add_generation_prompt": add_prompt,
        "continue_final_message": keep_open,
        "chat_template_kwargs": dict(request.chat_template_kwargs or {}),
    }
    if request.chat_template is not None:
        options["chat_template"] = request.chat_template
    if isinstance(request, ChatCompletionRequest) and request.documents:
        options["documents"] = request.documents
    if isinstance(request, ChatCompletionRequest) and request.reasoning_effort is not None:
        options["chat_template_kwargs"].setdefault("reasoning_effort", request.reasoning_effort)
    if tools:
        options["tools"] = template_tools(tools)
    messages = plain_messages(request.messages or ())
    mark = None if with_specials or llm.tokenizer is None else mark_specials(messages, llm.tokenizer)
    is_small = not (
        request.chat_template or request.chat_template_kwargs or options.get("documents") or options.get("tools")
    )
    size = sum(len(message["content"]) for message in messages) if is_small else LONG_TEXT_CHARS + 1
    try:
        text = await off_loop(size, lambda: str(llm.render_chat(messages, **options)))
    except ConfigError as error:
        if request.chat_template is None:
            raise
        raise RequestError(str(error), param="chat_template") from None
    first, *rest = text.split(mark) if mark else [text]
    truncating = request if isinstance(request, ChatCompletionRequest) else None
    ids = await tokenize(llm, first, add_special_tokens=bool(request.add_special_tokens), request=truncating)
    if mark:
        text = first + "".join(rest)
        for more in await tokenize_all(llm, rest, add_special_tokens=False, request=truncating):
            ids += more
    if not ids:
        raise RequestError("The messages render to an empty prompt.", param="messages")
    return Prompt(token_ids=ids, text=text)


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As templates read them: content as one text, fields that are not there left out."""
    return [
        {
            key: value
            for key, value in (
                ("role", message.role),
                ("content", content_text(message, index)),
                ("name", message.name),
                ("tool_calls", _calls(message, index)),
                ("tool_call_id", message.tool_call_id),
                ("reasoning", message.reasoning or message.reasoning_content),
                ("reasoning_content", message.reasoning_content or message.reasoning),
            )
            if value is not None
        }
        for index, message in enumerate(messages)
    ]


def _calls(message: Message, index: int) -> list[Mapping[str, Any]] | None:
    if message.tool_calls is None:
        return None
    place = f"messages[{index}].tool_calls"
    return [call_of_function(call, f"{place}[{number}]") for number, call in enumerate(message.tool_calls)]


def content_text(message: Message, index: int) -> str:
    if message.content is None:
        if message.role != "assistant":
            raise RequestError("content is missing", param=f"messages[{index}].content")
        return ""
    if isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for part in message.content:
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise NotSupportedError(
                f"This model reads text only; a content part has type {part.type[:40]!r}.",
                param=f"messages[{index}].content",
            )
        text = part.refusal if part.text is None else part.text
        if text is None:
            raise RequestError("a text part has no text", param=f"messages[{index}].content")
        texts.append(text)
    return "\n".join(texts)
