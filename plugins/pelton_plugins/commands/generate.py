"""`pelton generate`: complete prompts from arguments, a file or stdin, in this process.

One prompt streams as it is made. Several are printed when each is done; `--json` prints a line of JSON for each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from pelton.errors import ConfigError
from pelton.outputs import RequestOutput
from pelton.sampling_params import RequestOutputKind
from pelton.sdk.llm_engine import LLMEngine
from pelton_plugins.commands.sampling import SamplingFlags, check, make_params
from pelton_plugins.flags import parse_flags

DOC = """Complete prompts with a model in this process.
Answers end after 128 tokens unless --max-tokens says otherwise.

  pelton generate "The sky is" --max-tokens 16
  pelton generate --input-file prompts.txt --json --temperature 0
  echo "The sky is" | pelton generate --model smollm2"""
DEFAULT_MAX_TOKENS = 128
MAX_SHOWN_PROMPT_CHARS = 60


class GenerateArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Where prompts come from, and how answers are printed."""

    prompts: list[str] = msgspec.field(default_factory=list)
    """Texts to complete; one a line from stdin when there is none and no file."""
    input_file: str | None = None
    """One prompt a line; in a .jsonl file a line is an object with "prompt" (text) or "prompt_token_ids"."""
    json: bool = False
    """Print a JSON object a line and answer, as they finish, with the prompt's index."""


def run(argv: list[str]) -> int:
    parsed = parse_flags(
        argv, [GenerateArguments, SamplingFlags], positional="prompts", program="pelton generate", doc=DOC
    )
    arguments: GenerateArguments = parsed.structs["GenerateArguments"]
    flags: SamplingFlags = parsed.structs["SamplingFlags"]
    given = {"max_tokens": DEFAULT_MAX_TOKENS, **flags.given()}
    check(given)
    prompts = read_prompts(arguments)
    engine = LLMEngine(parsed.config, explicit=parsed.explicit)
    try:
        is_stream = len(prompts) == 1 and not arguments.json and given.get("n", 1) == 1
        kind = RequestOutputKind.DELTA if is_stream else RequestOutputKind.FINAL_ONLY
        params = make_params(engine.input_processor.get_default_sampling_params(), given, kind)
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), prompt, params.clone())
        failed = 0
        for output in _outputs(engine):
            failed += output.error is not None
            _show(output, arguments.json, is_stream, len(prompts))
        return 1 if failed else 0
    finally:
        engine.shutdown()


def read_prompts(arguments: GenerateArguments) -> list[Any]:
    """Prompts in order. Raises `ConfigError` when there is none."""
    prompts: list[Any] = list(arguments.prompts)
    if arguments.input_file is not None:
        try:
            with open(arguments.input_file, encoding="utf-8") as file:
                lines = [line.rstrip("\r\n") for line in file]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--input-file {arguments.input_file} cannot be read: {error}.") from error
        prompts += _from_lines(lines, arguments.input_file)
    elif not prompts:
        if sys.stdin.isatty():
            print("One prompt a line, Ctrl-D to end:", file=sys.stderr)
        prompts += [line.rstrip("\r\n") for line in sys.stdin]
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise ConfigError('There is no prompt; give one: pelton generate "The sky is".')
    return prompts


def _from_lines(lines: list[str], path: str) -> list[Any]:
    if not path.endswith(".jsonl"):
        return list(lines)
    prompts: list[Any] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}:{number} is not valid JSON: {error}.") from error
        if isinstance(record, dict) and isinstance(record.get("prompt_token_ids"), list):
            prompts.append({"prompt_token_ids": record["prompt_token_ids"]})
        elif isinstance(record, dict) and isinstance(record.get("prompt"), str):
            prompts.append(record["prompt"])
        else:
            raise ConfigError(f'{path}:{number} is {line[:80]!r}; use an object such as {{"prompt": "The sky is"}}.')
    return prompts


def _outputs(engine: LLMEngine) -> Iterator[RequestOutput]:
    while engine.has_unfinished_requests():
        yield from engine.step()


def _show(output: RequestOutput, is_json: bool, is_stream: bool, num_prompts: int) -> None:
    if is_json:
        print(msgspec.json.encode(_record(output)).decode(), flush=True)
        return
    if output.error is not None:
        print(f"error: {output.error.message}", file=sys.stderr)
    elif is_stream:
        print(output.outputs[0].text, end="\n" if output.finished else "", flush=True)
    else:
        if num_prompts > 1:
            shown = " ".join((output.prompt or str(output.prompt_token_ids)).split())
            print(f"==> {shown[:MAX_SHOWN_PROMPT_CHARS]}{'...' if len(shown) > MAX_SHOWN_PROMPT_CHARS else ''}")
        for completion in output.outputs:
            print(completion.text, flush=True)


def _record(output: RequestOutput) -> dict[str, Any]:
    return {
        "index": int(output.request_id),
        "prompt": output.prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "error": output.error.message if output.error is not None else None,
        "outputs": [
            {
                "index": completion.index,
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            for completion in output.outputs
        ],
    }
