"""`pelton bench host`: what the host spends on a step, stage by stage, with many requests in decode.

Without a model the executor answers at once: what is left is the scheduler's and the engine core's own time. With a model
the steps are real, and the time that the loop waits for the device is shown apart.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from pelton.cli.table import format_table
from pelton.config import EngineConfig
from pelton.engine.client import EngineClient
from pelton.errors import ConfigError, EngineError
from pelton.metrics.stats import STEP, WAIT
from pelton_plugins.bench.bounds import check_at_least
from pelton_plugins.bench.host.null_executor import null_client
from pelton_plugins.bench.metrics import percentile
from pelton_plugins.bench.record import circumstances, flat_settings, number, write_json
from pelton_plugins.flags import parse_flags

FRONT_END = "front end"  # of the API's process when the engine has one of its own
DOC = """Host time of a step by stage: p50 and p99 over many steps in which all requests decode.

  pelton bench host                                    the engine core alone, 256 requests, no model
  pelton bench host MODEL --load-format dummy          with the model's steps"""


class HostArguments(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests, for how long."""

    num_seqs: int = 256
    """Requests that run."""
    num_steps: int = 500
    """Steps that count."""
    input_len: int = 128
    """Tokens of each prompt, and up to 15 more, so that blocks fill at different steps."""
    output_json: str | None = None
    """Write the result here."""

    def __post_init__(self) -> None:
        check_at_least(self, num_seqs=1, num_steps=1, input_len=1)


def run(argv: list[str]) -> int:
    parsed = parse_flags(argv, [HostArguments], program="pelton bench host", doc=DOC)
    arguments: HostArguments = parsed.structs["HostArguments"]
    settings = flat_settings(parsed)
    longest = arguments.input_len + 16 + arguments.num_steps + WARM_UP_STEPS + 64
    if "model" in settings:
        sizes = {"max_num_seqs": arguments.num_seqs, "max_model_len": longest, "skip_tokenizer_init": True}
        result = _with_model({**sizes, **settings}, arguments)
    else:
        config = EngineConfig.from_flat(**{"max_num_seqs": arguments.num_seqs, **settings})
        client = null_client(config, max_model_len=longest, max_num_seqs=arguments.num_seqs)
        try:
            result = measure(client, _front_end(client, config), arguments, vocab_size=1000)
        finally:
            client.shutdown()
    result |= circumstances(result.pop("device"), settings)
    print(render(result))
    write_json(arguments.output_json, result)
    return 0


WARM_UP_STEPS = 50


def _with_model(settings: dict[str, Any], arguments: HostArguments) -> dict[str, Any]:
    from pelton.sdk.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(**settings)
    try:
        vocab_size = engine.model.vocab_size
        return measure(engine.client, _front_end(engine.client, engine.config), arguments, vocab_size=vocab_size)
    finally:
        engine.shutdown()


class _FrontEnd:
    """Adds requests and takes outputs in, as `LLM` does."""

    def __init__(self, client: EngineClient, config: EngineConfig) -> None:
        from pelton.engine.output_processor import OutputProcessor

        self.client = client
        self.processor = OutputProcessor(None, config)

    def add(self, index: int, prompt: list[int], num_tokens: int) -> None:
        from pelton.engine.input_processor import ProcessedRequest
        from pelton.messages.request import EngineRequest
        from pelton.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        request = EngineRequest(request_id=str(index), prompt_token_ids=prompt, sampling_params=params)
        processed = ProcessedRequest(str(index), None, prompt, params, [request])
        self.processor.add(processed, arrival=time.monotonic())
        self.client.add_request(request)


def _front_end(client: EngineClient, config: EngineConfig) -> _FrontEnd:
    return _FrontEnd(client, config)


def measure(client: EngineClient, front_end: _FrontEnd, arguments: HostArguments, *, vocab_size: int) -> dict[str, Any]:
    """Seconds of each stage in each step; a step's stages come with the outputs of the step."""
    num, length = arguments.num_seqs, arguments.input_len
    # All run to the same step: no request ends while steps are counted.
    for index in range(num):
        prompt = [10 + (index * 7919 + place * 31) % (vocab_size - 10) for place in range(length + index % 16)]
        front_end.add(index, prompt, arguments.num_steps + WARM_UP_STEPS + 32)
    steps: list[dict[str, float]] = []
    num_decoding = 0
    while num_decoding < WARM_UP_STEPS + arguments.num_steps:
        batch = client.get_outputs()
        began = time.perf_counter()
        front_end.processor.process(batch, time.monotonic())
        spent = time.perf_counter() - began
        if batch.stats is not None and len(batch.outputs) == num:
            num_decoding += 1
            if num_decoding > WARM_UP_STEPS:
                steps.append({**batch.stats.host_time_s, FRONT_END: spent})
        failed = next((output for output in batch.outputs if output.error is not None), None)
        if failed is not None:
            raise EngineError(f"A step failed: {failed.error.message}" if failed.error else "A step failed.")
        if not client.has_work:
            raise ConfigError("The requests ended early; lower --num-steps.")
    client.finish_requests([str(index) for index in range(num)])
    while client.has_work:
        client.get_outputs()
    return {**stages(steps), "num_seqs": num, "num_steps": len(steps), "device": client.info.report.device}


def stages(steps: list[dict[str, float]]) -> dict[str, Any]:
    """Percentiles in microseconds by stage, and of the whole step as the engine tells it."""
    names = list(dict.fromkeys(name for step in steps for name in step))
    columns = {name: [step.get(name, 0.0) * 1e6 for step in steps] for name in names}
    found = {
        name: {f"p{percent}": percentile(column, percent) for percent in (50, 90, 99)}
        for name, column in columns.items()
    }
    whole = found.pop(STEP)
    return {"stages_us": found, "step_us": whole}


def render(result: dict[str, Any]) -> str:
    rows = [(name, *map(number, found.values())) for name, found in result["stages_us"].items() if name != WAIT]
    rows.append(("a step, without the front end", *map(number, result["step_us"].values())))
    if WAIT in result["stages_us"]:
        rows.append(("(wait for the device)", *map(number, result["stages_us"][WAIT].values())))
    what = f"{result['num_seqs']} running requests, {result['num_steps']} steps, {result['device']}"
    return f"{what}\n" + format_table(("us a step", "p50", "p90", "p99"), rows, indent="  ")
