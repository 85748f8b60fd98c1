"""Constraints through the engine: the SDK's examples, and every way in which a step may be made."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from pelton import LLM, SamplingParams
from pelton.sampling_params import GuidedDecodingParams, StructuredOutputsParams
from pelton.testing.models import EOS_ID, make_tiny_checkpoint
from pelton_plugins.structured_output.llguidance_backend import (
    BatchFiller,
    LLGrammar,
    LLGuidanceBackend,
    NativeFiller,
)

PROMPTS = ["This sucks", "The weather is beautiful"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module")
def llm(checkpoint: str) -> Iterator[LLM]:
    with LLM(model=checkpoint, max_model_len=256, max_num_seqs=8, disable_log_stats=True) as made:
        yield made


def test_the_seeds_example(llm):
    params = SamplingParams(guided_decoding=GuidedDecodingParams(choice=["Positive", "Negative"]))
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        assert output.outputs[0].text in ("Positive", "Negative")
        assert output.outputs[0].finish_reason == "stop"


def is_right(text: str) -> bool:
    found = json.loads(text)
    return (
        list(found) == ["name", "tags", "size"]
        and len(found["name"]) <= 6
        and all(tag in ("a", "bc") for tag in found["tags"])
        and 0 <= found["size"] <= 99
    )


def constrained(temperature: float = 1.0, **options) -> SamplingParams:
    constraint = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    return SamplingParams(temperature=temperature, max_tokens=150, structured_outputs=constraint, **options)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"n": 4, "seed": 5}, {"min_tokens": 140}, {"ignore_eos": True}]
)
def test_every_sample_keeps_the_schema(llm, options):
    for output in llm.generate(PROMPTS, constrained(**options), use_tqdm=False):
        for sample in output.outputs:
            assert sample.finish_reason == "stop"
            assert is_right(sample.text)


def test_a_stop_string_ends_it_earlier(llm):
    (output,) = llm.generate(PROMPTS[:1], constrained(stop=['"tags"']), use_tqdm=False)
    assert output.outputs[0].stop_reason == '"tags"'
    assert output.outputs[0].text.startswith('{"name":"')


def test_plain_requests_beside_it_are_as_without(llm):
    plain = SamplingParams(temperature=0.0, max_tokens=20)
    alone = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, plain, use_tqdm=False)]
    mixed = llm.generate([*PROMPTS, *PROMPTS], [plain, plain, constrained(), constrained()], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in mixed[:2]] == alone
    assert all(is_right(output.outputs[0].text) for output in mixed[2:])


def test_reasoning_is_free_until_its_end(llm):
    free = SamplingParams(temperature=0.0, max_tokens=12)
    (output,) = llm.generate(PROMPTS[:1], free, use_tqdm=False)
    thought = output.outputs[0].token_ids
    at = next(at for at in range(3, 12) if thought[at] not in thought[:at])
    constraint = StructuredOutputsParams(regex="[0-9]{4}", reasoning_end=[thought[at]])
    (output,) = llm.generate(
        PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=30, structured_outputs=constraint), use_tqdm=False
    )
    made = output.outputs[0]
    assert made.token_ids[: at + 1] == thought[: at + 1]
    rest = llm.get_tokenizer().decode(made.token_ids[at + 1 :])
    assert re.fullmatch("[0-9]{4}", rest) and made.finish_reason == "stop"


def test_reasoning_that_the_prompt_ends_is_over(llm):
    constraint = StructuredOutputsParams(regex="[0-9]{4}", reasoning_end=">")
    (output,) = llm.generate(["think>\n"], SamplingParams(max_tokens=30, structured_outputs=constraint), use_tqdm=False)
    assert re.fullmatch("[0-9]{4}", output.outputs[0].text)


def test_a_bad_schema_is_the_clients_error_and_the_engine_goes_on(llm):
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(json={"properties": {"a": {"type": "strng"}}}))
    (output,) = llm.generate(PROMPTS[:1], bad, use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    assert output.error.kind == "RequestError" and "/properties/a/type is 'strng'" in output.error.message
    assert llm.generate(PROMPTS[:1], constrained(), use_tqdm=False)[0].outputs[0].token_ids[-1] == EOS_ID


def test_a_grammar_that_raises_while_masks_are_made_ends_its_request_alone(llm, monkeypatch):
    """In the middle of its answer; what the others give is what they give without it."""
    bad = StructuredOutputsParams(json={"const": "x" * 40}, disable_any_whitespace=True)
    compile_, fill_row = LLGuidanceBackend.compile, LLGrammar.fill_bitmask
    fills = {filler: filler.fill for filler in (BatchFiller, NativeFiller)}
    marked = []

    def compiled(backend, params):
        grammar = compile_(backend, params)
        if params.json == bad.json:
            marked.append(grammar)
        return grammar

    def is_due(grammar):
        return grammar in marked and grammar.num_masks > 3

    def filled(filler, rows, bitmask):
        for grammar, _, _ in rows:
            grammar.num_masks = getattr(grammar, "num_masks", 0) + 1
        if any(is_due(grammar) for grammar, _, _ in rows):
            raise RuntimeError("broken")
        fills[type(filler)](filler, rows, bitmask)

    def filled_row(grammar, row, drafts=()):
        if is_due(grammar):
            raise RuntimeError("broken")
        fill_row(grammar, row, drafts)

    others = [constrained(seed=1), SamplingParams(temperature=1.0, seed=2, max_tokens=40), constrained(seed=3)]
    expected = [output.outputs[0].token_ids for output in llm.generate(["Hi"] * 3, others, use_tqdm=False)]
    monkeypatch.setattr(LLGuidanceBackend, "compile", compiled)
    for filler in fills:
        monkeypatch.setattr(filler, "fill", filled)
    monkeypatch.setattr(LLGrammar, "fill_bitmask", filled_row)
    *found, ended = llm.generate(
        ["Hi"] * 4, [*others, SamplingParams(max_tokens=60, structured_outputs=bad)], use_tqdm=False
    )
    assert [output.outputs[0].token_ids for output in found] == expected
    assert "broken" in str(ended.error) and 0 < len(ended.outputs[0].token_ids) <= 4


def test_logprobs_are_the_models_and_not_those_of_the_mask(llm):
    """Of the token that was sampled too: those that the same text has as a prompt."""
    (output,) = llm.generate(["Hi"], constrained(seed=1, logprobs=2), use_tqdm=False)
    answer, prompt = output.outputs[0], output.prompt_token_ids
    again = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
    (read,) = llm.generate([{"prompt_token_ids": [*prompt, *answer.token_ids]}], again, use_tqdm=False)
    behind = read.prompt_logprobs[len(prompt) :]
    assert len(answer.token_ids) == len(answer.logprobs) == len(behind) > 10
    for token, mine, known in zip(answer.token_ids, answer.logprobs, behind, strict=True):
        assert mine.keys() == known.keys() and token in mine
        assert all(abs(mine[one].logprob - known[one].logprob) < 1e-3 for one in mine)
        assert mine[token].rank == known[token].rank
