"""Constrained requests in every way in which a scheduler may run them: each gives the tokens that the model and its grammar give
alone. Steps overlap, prompts come in chunks, blocks run out, prefixes are found, drafts are made, reasoning comes first."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pelton.messages.outputs import FinishReason
from pelton.sampling_params import StructuredOutputsParams
from pelton.structured.interface import StructuredOutputContext
from pelton.testing.fake_grammar import FakeGrammarSource
from pelton.testing.fake_model import FakeModel
from pelton.testing.fake_proposer import FakeProposer
from pelton.testing.kv_specs import full_spec
from pelton.testing.models import EOS_ID, VOCAB_SIZE, make_tiny_tokenizer
from pelton.testing.scheduler import Harness, make_request
from pelton_plugins.scheduler.grammars import AfterReasoning
from pelton_plugins.structured_output.auto import AutoBackend

MODEL = FakeModel(vocab_size=VOCAB_SIZE, eos_token_id=EOS_ID)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "server"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def guarded(*, is_parallel: bool) -> dict:
    content = {"type": "sequence", "elements": [
        {"type": "json_schema", "json_schema": {"enum": [1, 2, True]}}, {"type": "const_string", "value": "e"},
    ]}  # fmt: skip
    return {
        "type": "guarded",
        "triggers": [{"text": letter, "content": content} for letter in "eatr"],
        "repeats": is_parallel,
    }


KINDS = (
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"json": SCHEMA},
    {"regex": "[0-9]{3}-[a-c]{1,6}"},
    {"choice": ["Positive", "Negative"]},
    {"grammar": 'root ::= ("ab" | "c") [0-9]{1,3} root?'},
    # Free text until one of a few letters, which begins a call: what strict functions ask for.
    {"structural_tag": {"format": guarded(is_parallel=True)}},
    {"structural_tag": {"format": guarded(is_parallel=False)}},
)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> AutoBackend:
    path = make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return AutoBackend(StructuredOutputContext(tokenizer_path=str(path), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS_ID]))


class Oracle(FakeProposer):
    """Proposes what is right, and now and then something else."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(MODEL, 3)
        self.rng = rng
        self.known: dict[str, tuple[int, list[int]]] = {}

    def propose(self, request_id, token_ids):
        num_prompt, expected = self.known[request_id]
        count = len(token_ids) - num_prompt
        drafts = expected[count : count + self.rng.randint(0, 3)]
        if drafts and self.rng.random() < 0.3:
            drafts[-1] = self.rng.randrange(VOCAB_SIZE)
        return drafts


@given(seed=st.integers(0, 10**9))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_constraint_gives_the_same_tokens_however_steps_are_made(backend, seed):
    rng = random.Random(seed)
    source = FakeGrammarSource(backend, is_held=rng.random() < 0.3)
    proposer = Oracle(rng) if rng.random() < 0.5 else None
    harness = Harness(
        specs=[full_spec(4)], num_blocks=rng.choice([30, 40, 200]), max_model_len=80, max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.choice([4, 8, 64]), max_steps_in_flight=rng.randint(1, 3),
        prefix_caching=rng.random() < 0.7, steps_are_ordered=rng.random() < 0.7, fake_model=MODEL,
        grammar_source=source, proposer=proposer,
    )  # fmt: skip
    wanted = {}
    for index in range(rng.randint(1, 8)):
        prompt = [5 + rng.randint(0, 2)] * rng.randint(1, 20) + [rng.randrange(3, VOCAB_SIZE)]
        params: dict = {"min_tokens": rng.choice([0, 0, 3])}
        grammar = None
        name, max_tokens = f"r{index}", rng.randint(1, 40)
        if rng.random() < 0.8:
            plain = make_request(name, prompt, max_tokens, eos_token_ids=[EOS_ID])
            thought = MODEL.generate(plain, max_model_len=80)[0]
            end = thought[rng.randrange(len(thought)) :][: rng.randint(1, 2)] if rng.random() < 0.4 else None
            constraint = StructuredOutputsParams(**rng.choice(KINDS), reasoning_end=end)
            # Where EOS may not be sampled, a text that is complete ends the request.
            params |= {
                "structured_outputs": constraint,
                "min_tokens": rng.choice([0, 0, 30]),
                "ignore_eos": rng.random() < 0.3,
            }
            grammar = backend.compile(constraint)
            grammar = grammar if end is None else AfterReasoning(grammar, end, prompt)
        params["min_tokens"] = min(params["min_tokens"], max_tokens)
        request = make_request(name, prompt, max_tokens, eos_token_ids=[EOS_ID], **params)
        wanted[name] = MODEL.generate(request, max_model_len=80, grammar=grammar)
        if proposer is not None:
            proposer.known[name] = (len(prompt), wanted[name][0])
        harness.add(request)
        for _ in range(rng.randint(0, 3)):
            harness.step()
    for _ in range(2000):
        source.release()
        if not harness.scheduler.has_unfinished_requests():
            break
        harness.step()
    for name, (tokens, reason) in wanted.items():
        assert harness.reason(name) is reason
        assert harness.tokens(name) == tokens
        assert reason in (FinishReason.STOP, FinishReason.LENGTH)
    harness.check_sound()
