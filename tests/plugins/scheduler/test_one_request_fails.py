"""Whatever raises while a step is made or taken in ends the request it was done for; what others get does not change."""

from __future__ import annotations

import pytest

from pelton.errors import EngineError
from pelton.messages.outputs import FinishReason
from pelton.sampling_params import StructuredOutputsParams
from pelton.testing.fake_connector import FakeConnector
from pelton.testing.fake_grammar import FakeGrammar, FakeGrammarBackend, FakeGrammarSource
from pelton.testing.fake_model import FakeModel
from pelton.testing.fake_proposer import FakeProposer
from pelton.testing.scheduler import Harness, make_request
from pelton_plugins.scheduler.policies import FCFSPolicy

OVERLAPS = pytest.mark.parametrize("overlap", [1, 2, 3])


def check(harness: Harness, *, others: tuple[str, ...] = ("a", "c")) -> None:
    harness.run()
    assert harness.reason("bad") is FinishReason.ERROR
    assert "broken" in harness.outputs["bad"][-1].error.message
    for name in others:
        harness.check_request(name)
    harness.check_empty()


@OVERLAPS
@pytest.mark.parametrize("call", [0, 1, 2, 4])
@pytest.mark.parametrize("is_ordered", [True, False], ids=["ordered", "fenced"])
def test_when_its_blocks_cannot_be_allocated(overlap, call, is_ordered):
    harness = Harness(max_steps_in_flight=overlap, steps_are_ordered=is_ordered, max_num_batched_tokens=16)
    allocate, calls = harness.kv.allocate, []

    def broken(request, *args, **kwargs):
        if request.request_id == "bad":
            calls.append(1)
            if len(calls) > call:
                raise RuntimeError("broken")
        return allocate(request, *args, **kwargs)

    harness.kv.allocate = broken
    for name, prompt in (("a", 9), ("bad", 23), ("c", 5)):
        harness.add(make_request(name, prompt, 12))
    check(harness)


@OVERLAPS
def test_behind_its_blocks_were_allocated_nobody_finds_them(overlap):
    """They are not computed: who has the same prompt computes it."""
    harness = Harness(max_steps_in_flight=overlap, max_num_batched_tokens=8)
    scheduler_allocations = harness.scheduler._allocations
    grow = scheduler_allocations.grow

    def broken(request, *args):
        grown = grow(request, *args)
        if request.request_id == "bad":
            raise RuntimeError("broken")
        return grown

    scheduler_allocations.grow = broken
    prompt = [*range(1, 22)]
    harness.add(make_request("a", 3, 9))
    harness.add(make_request("bad", prompt, 4))
    harness.launch()
    harness.add(make_request("c", prompt, 4))
    check(harness)


@OVERLAPS
def test_when_the_policy_cannot_name_a_victim(overlap):
    class Broken(FCFSPolicy):
        def victim(self, running):
            if running[0].request_id == "bad":
                raise RuntimeError("broken")
            return super().victim(running)

    harness = Harness(max_steps_in_flight=overlap, num_blocks=12, policy=Broken())
    harness.add(make_request("bad", 15, 30))
    harness.add(make_request("a", 10, 30))
    harness.run()
    if harness.reason("bad") is not FinishReason.ERROR:
        pytest.skip("it never had to name one")
    check(harness, others=("a",))


@OVERLAPS
@pytest.mark.parametrize("method", ["fill_bitmask", "accept"])
@pytest.mark.parametrize("call", [0, 2])
def test_when_its_grammar_fails(overlap, method, call):
    calls = []

    class Broken(FakeGrammar):
        pass

    def raising(self, *args):
        calls.append(1)
        if len(calls) > call:
            raise RuntimeError("broken")
        return getattr(FakeGrammar, method)(self, *args)

    setattr(Broken, method, raising)

    class Backend(FakeGrammarBackend):
        def compile(self, params):
            kind = Broken if params.regex == "13" else FakeGrammar
            return kind(int(params.regex), self.vocab_size, self.eos_token_ids)

    harness = Harness(max_steps_in_flight=overlap, grammar_source=FakeGrammarSource(Backend()))
    for name, regex in (("a", "6"), ("bad", "13"), ("c", "7")):
        params = {"structured_outputs": StructuredOutputsParams(regex=regex)}
        harness.add(make_request(name, 5, 20, eos_token_ids=(0,), **params))
    harness.run()
    assert harness.reason("bad") is FinishReason.ERROR
    assert [harness.reason(name) for name in ("a", "c")] == [FinishReason.STOP] * 2
    assert [len(harness.tokens(name)) for name in ("a", "c")] == [7, 8]
    harness.check_empty()


@OVERLAPS
def test_when_its_drafts_cannot_be_checked(overlap):
    class Broken(FakeGrammar):
        def validate(self, token_ids):
            raise RuntimeError("broken")

    class Backend(FakeGrammarBackend):
        def compile(self, params):
            return Broken(int(params.regex), self.vocab_size, self.eos_token_ids)

    model = FakeModel()
    harness = Harness(
        max_steps_in_flight=overlap, fake_model=model, proposer=FakeProposer(model, 3), grammar_source=FakeGrammarSource(Backend())
    )  # fmt: skip
    params = {"structured_outputs": StructuredOutputsParams(regex="9")}
    harness.add(make_request("a", 5, 12))
    harness.add(make_request("bad", 5, 12, eos_token_ids=(0,), **params))
    harness.add(make_request("c", 6, 12))
    check(harness)


@OVERLAPS
def test_when_the_step_cannot_be_finished_its_rows_end_and_who_waits_goes_on(overlap):
    harness = Harness(max_steps_in_flight=overlap, max_num_seqs=2)
    note, calls = harness.scheduler._common_prefix.note, []

    def broken(opened):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("broken")
        return note(opened)

    harness.scheduler._common_prefix.note = broken
    for name in ("bad", "b", "c", "d"):
        harness.add(make_request(name, 5, 6))
    harness.run()
    assert harness.reason("bad") is FinishReason.ERROR and harness.reason("b") is FinishReason.ERROR
    for name in ("c", "d"):
        harness.check_request(name)
    harness.check_empty()


def test_a_step_without_rows_that_cannot_be_made_is_told():
    harness = Harness()

    def broken(*args):
        raise RuntimeError("broken")

    harness.scheduler._admission.admit = broken
    harness.add(make_request("a", 5, 6))
    with pytest.raises(RuntimeError, match="broken"):
        harness.launch()


@pytest.mark.parametrize("said", [None, ["a"], [1.5, 2.5]], ids=str)
@OVERLAPS
def test_drafts_that_are_no_token_ids_cost_the_request_nothing(overlap, said, caplog):
    proposer = FakeProposer(FakeModel(), 3)
    proposer.propose = lambda request_id, token_ids: said
    harness = Harness(proposer=proposer, max_steps_in_flight=overlap)
    for name in ("a", "b"):
        harness.add(make_request(name, 9, 12))
    harness.run_and_check()
    assert caplog.text.count("gives no list of token ids") == 1 and "FakeProposer" in caplog.text


class UnevenPolicy(FCFSPolicy):
    """Ranks of some requests are not to be had, or compare with no other."""

    rank_of_bad = None

    def rank(self, request):
        if request.request_id != "bad":
            return super().rank(request)
        if self.rank_of_bad is None:
            raise RuntimeError("broken")
        return self.rank_of_bad


@pytest.mark.parametrize("rank", [None, 7, ("text",)], ids=str)
def test_a_policy_that_cannot_rank_a_request_leaves_nothing_of_it(rank):
    policy = UnevenPolicy()
    policy.rank_of_bad = rank
    harness = Harness(policy=policy)
    harness.add(make_request("a", 9, 12))
    for _ in range(2):  # its id is free again
        with pytest.raises(EngineError, match=r"The scheduling policy .*:UnevenPolicy gives no rank"):
            harness.scheduler.add_request(make_request("bad", 9, 12))
    harness.add(make_request("c", 9, 12))
    harness.run_and_check()


@pytest.mark.parametrize("method", ["num_matched_tokens", "after_allocation", "build_metadata"])
def test_a_connector_that_raises_is_named_to_the_client(method):
    connector = FakeConnector(lambda request: 8)
    setattr(connector, method, lambda *args: 1 / 0)
    harness = Harness(connector=connector)
    harness.add(make_request("bad", 11, 5))
    harness.run()
    message = harness.outputs["bad"][-1].error.message
    assert (
        message.startswith("The KV connector ") and f":FakeConnector) failed in {method}: ZeroDivisionError" in message
    )


@pytest.mark.parametrize(
    "method, said, words",
    [("num_matched_tokens", 8, "cannot unpack"), ("build_metadata", {}, "it gives {}, not bytes")],
)
def test_a_connector_that_answers_nonsense_is_named_to_the_client(method, said, words):
    connector = FakeConnector(lambda request: 8)
    setattr(connector, method, lambda *args: said)
    harness = Harness(connector=connector)
    harness.add(make_request("bad", 11, 5))
    harness.run()
    message = harness.outputs["bad"][-1].error.message
    assert f"failed in {method}: TypeError: " in message and words in message
