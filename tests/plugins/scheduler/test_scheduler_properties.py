"""Random operations on scheduler, real KV manager and fake executor: every request ends with its own tokens, nothing leaks."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pelton.config import SchedulerConfig
from pelton.errors import RequestError
from pelton.messages.outputs import FinishReason
from pelton.sampling_params import StructuredOutputsParams
from pelton.testing.fake_connector import FakeConnector
from pelton.testing.fake_grammar import FakeGrammar, FakeGrammarSource
from pelton.testing.fake_model import FakeModel
from pelton.testing.fake_proposer import FakeProposer
from pelton.testing.kv_specs import full_spec, state_spec, window_spec
from pelton.testing.scheduler import Harness, make_request
from pelton_plugins.scheduler.policies import FCFSPolicy, PriorityPolicy

PREFIXES = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [5, 6, 7, 8, 1, 2, 3], [21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32]]


def random_request(rng: random.Random, index: int, *, grammars: bool, logprobs: bool):
    num_own = rng.choice([1, rng.randint(1, 14)])
    prompt = rng.choice([[], *PREFIXES])[: rng.randint(1, 12)] + [rng.randint(1, 40) for _ in range(num_own)]
    params = {}
    if rng.random() < 0.2:
        params["stop_token_ids"] = [rng.randint(1, 49)]
    max_tokens = rng.randint(1, 16)
    if rng.random() < 0.2:
        params["min_tokens"] = rng.randint(1, max_tokens)
    if logprobs and rng.random() < 0.2:
        params["prompt_logprobs"] = 0
    if grammars and rng.random() < 0.5:
        params["structured_outputs"] = StructuredOutputsParams(regex=str(rng.randint(1, 8)))
        params.pop("stop_token_ids", None)
        params.pop("min_tokens", None)
    return make_request(
        f"r{index}", prompt, max_tokens, eos_token_ids=[0], priority=rng.randint(0, 2),
        timeout_s=0.03 if rng.random() < 0.1 else None, cache_salt=rng.choice([None, None, "salt"]), **params,
    )  # fmt: skip


class Campaign:
    """One random run. has_states: of a model with states, which serves no drafts and no connector."""

    def __init__(self, seed: int, *, has_states: bool = False) -> None:
        self.rng = rng = random.Random(seed)
        self.overlap = rng.randint(1, 3)
        self.mode = rng.choice(
            ["plain", "plain", "host drafts", "device drafts", "told drafts", "grammar", "connector"]
        )
        if has_states:
            self.mode = rng.choice(["plain", "plain", "grammar"])
        self.failures = rng.random() < 0.3
        model = FakeModel(eos_every=rng.choice([0, 7]))
        arguments = {}
        if self.mode == "host drafts":
            arguments["proposer"] = FakeProposer(model, 3)
        elif self.mode == "device drafts":
            arguments["num_draft_tokens"] = rng.randint(1, 3)
        elif self.mode == "told drafts":
            arguments["tells_drafts"] = True
        if self.mode == "grammar" or (self.mode.endswith("drafts") and rng.random() < 0.4):
            self.source = FakeGrammarSource(is_held=rng.random() < 0.5)
            arguments["grammar_source"] = self.source
        else:
            self.source = None
        if self.mode == "connector":
            arguments["connector"] = FakeConnector(
                lambda request: remote_tokens(request.request_id),
                is_later=lambda request: hash_name(request.request_id) % 2 == 0,
                sends=lambda request_id: hash_name(request_id) % 3 == 0,
            )
        specs = rng.choice([
            [full_spec(4)], [full_spec(4)], [full_spec(1)], [full_spec(4), window_spec(6, 4)],
            [full_spec(3), window_spec(3, 3), window_spec(3, 3)],
        ])  # fmt: skip
        if has_states:
            specs = rng.choice([
                [full_spec(4), state_spec(), state_spec()], [full_spec(2), state_spec(2)], [state_spec(4)], [state_spec(1)],
                [full_spec(3), window_spec(3, 3), state_spec(3)],
            ])  # fmt: skip
        self.harness = Harness(
            specs=specs,
            num_blocks=rng.choice([40, 60, 100, 300])
            if len(specs) > 1 or specs[0].block_size < 4
            else rng.choice([10, 14, 25, 80]),
            max_model_len=40,
            max_num_seqs=rng.randint(1, 6),
            max_num_batched_tokens=rng.choice([4, 8, 16, 64]),
            max_steps_in_flight=self.overlap,
            steps_are_ordered=rng.random() < 0.6,
            prefix_caching=rng.random() < 0.8,
            fake_model=model,
            context_tokens=rng.choice([0, 0, 7]),
            policy=rng.choice([FCFSPolicy, PriorityPolicy])(),
            config=SchedulerConfig(
                long_prefill_token_threshold=rng.choice([0, 0, 3]),
                max_mixed_prefill_tokens=rng.choice([None, 0, 3]),
                max_side_table_seqs=rng.choice([1, 64]),
            ),
            **arguments,
        )
        self.harness.executor.launches_past_masks = rng.random() < 0.5
        if self.failures:
            self.harness.executor.fails = lambda step_id: "boom" if step_id % 11 == 7 else None
            self.harness.executor.row_error = lambda name, step_id: (
                "NaN" if (hash_name(name) + step_id) % 23 == 5 else None
            )
            self.harness.executor.transfers.is_bad = lambda name: hash_name(name) % 5 == 0
        self.ended_early: set[str] = set()

    def run(self) -> None:
        rng, harness = self.rng, self.harness
        count = 0
        for _ in range(rng.randint(10, 60)):
            action = rng.random()
            if action < 0.45 and count < 25:
                request = random_request(rng, count, grammars=self.source is not None, logprobs=True)
                count += 1
                try:
                    harness.add(request)
                except RequestError:
                    continue
            elif action < 0.50 and harness.requests:
                name = rng.choice(list(harness.requests))
                reason = rng.choice([FinishReason.ABORT, FinishReason.STOP])
                if harness.reason(name) is None:
                    self.ended_early.add(name)
                    harness.scheduler.finish_requests([name], reason)
            elif action < 0.75 and harness.may_launch:
                harness.launch()
            elif harness.open:
                harness.retire()
            if self.source is not None and rng.random() < 0.3:
                self.source.release()
            harness.take_outputs()
            harness.clock.now += 0.001
            harness.scheduler.expire(harness.clock.now)
        if self.source is not None:
            self.source.is_held = False
            self.source.release()
        harness.run()

    def check(self) -> None:
        harness = self.harness
        for name, request in harness.requests.items():
            reason, tokens = harness.reason(name), harness.tokens(name)
            constraint = request.sampling_params.structured_outputs
            grammar = None
            if constraint is not None:
                grammar = FakeGrammar(int(constraint.regex), 50, (0,))
            expected, expected_reason = harness.fake_model.generate(request, max_model_len=40, grammar=grammar)
            if name in self.ended_early or reason is FinishReason.ERROR:
                assert tokens == expected[: len(tokens)], f"{name}: {tokens} is no head of {expected}"
                errors = [output.error for output in harness.outputs[name] if output.error]
                if reason is FinishReason.ERROR and not self.failures:
                    assert errors[0].kind == "DeadlineExceededError", errors
            elif (reason is FinishReason.LENGTH and expected_reason is not reason) or len(tokens) < len(expected):
                # Only a request that fills the whole pool by itself is cut short.
                assert tokens == expected[: len(tokens)]
                total = len(request.prompt_token_ids) + len(tokens)
                assert harness.kv.max_blocks_needed(total + 1) > harness.kv.num_usable_blocks - 1, name
            else:
                assert (tokens, reason) == (expected, expected_reason), name
            if request.sampling_params.prompt_logprobs is not None and tokens:
                self.check_prompt_logprobs(name)
        harness.check_empty()

    def check_prompt_logprobs(self, name: str) -> None:
        outputs = self.harness.outputs[name]
        sent = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
        assert len(sent) == 1 and outputs[0].prompt_logprobs is sent[0], f"{name}: sent {len(sent)} times"
        prompt = self.harness.requests[name].prompt_token_ids
        assert [ids[0] for ids in sent[0].columns().token_ids] == prompt[1:], name

    @property
    def num_found(self) -> int:
        """Tokens that requests have found."""
        return sum(new.num_computed_tokens for output in self.harness.executor.outputs for new in output.new)


def hash_name(name: str) -> int:
    return sum(byte * 31**index for index, byte in enumerate(name.encode()))


_ASKED: dict[str, int] = {}


def remote_tokens(name: str) -> int | None:
    """What the remote side has of a request's prompt; for some it has to be asked again."""
    _ASKED[name] = _ASKED.get(name, 0) + 1
    if hash_name(name) % 4 == 1 and _ASKED[name] % 3:
        return None
    return [0, 4, 7, 12][hash_name(name) % 4]


@example(416)  # seeds that found something once: junk of failed loads and steps, found and preempted under open steps
@example(827)
@example(839)
@example(1336)
@example(1786)
@example(1971)
@example(11064)
@example(110965)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_random_operations_hold_every_invariant(seed: int) -> None:
    _ASKED.clear()
    campaign = Campaign(seed)
    campaign.run()
    campaign.check()


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_random_operations_over_states_hold_every_invariant(seed: int) -> None:
    campaign = Campaign(seed, has_states=True)
    campaign.run()
    campaign.check()


def test_such_runs_find_states() -> None:
    """Where steps are ordered: else a copy might be written over while an open step reads it."""
    num_found = {True: 0, False: 0}
    for seed in range(100):
        campaign = Campaign(seed, has_states=True)
        campaign.run()
        num_found[campaign.harness.executor.steps_are_ordered] += campaign.num_found
    assert num_found[True] > 200 and num_found[False] == 0, num_found
