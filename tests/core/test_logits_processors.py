"""Logits processors of plugins: who has one, in which order, and whose request ends when one raises."""

from __future__ import annotations

import itertools
import re
import sys
from types import ModuleType

import pytest
import torch

from pelton import LLM, SamplingParams, hookimpl
from pelton.entries import Entry
from pelton.errors import NotSupportedError, PluginError, RequestError
from pelton.logits_processors.interface import LogitsProcessor
from pelton.plugins import load_plugins, register
from pelton.testing.models import make_tiny_checkpoint
from pelton_platforms.device.steps.step_sampler import StepSampler

HERE = "pelton_test_logits_processors"
SMALL = {"max_num_seqs": 4, "max_model_len": 64, "num_gpu_blocks_override": 32, "disable_log_stats": True}
PROMPT = {"prompt_token_ids": [5, 6, 7, 8, 5, 6]}
BAN = 40
"""A token that `Force` cannot force: `Ban`, which is asked later, forbids it."""


class Force(LogitsProcessor):
    """The argument is the token that comes; a string is what goes wrong instead."""

    @classmethod
    def check(cls, args, params):
        if args == "no such key":
            raise KeyError(args)
        if not isinstance(args, (int, str)):
            raise ValueError(f"{args!r} is no token")

    def begin(self, request):
        if request.args == "begin":
            raise LookupError("nothing to begin with")
        assert request.prompt_token_ids == PROMPT["prompt_token_ids"] and request.params.max_tokens
        request.state = len(request.prompt_token_ids)

    def apply(self, logits, rows):
        assert all(request.state == 6 for request in rows.requests)
        seen.append([rows.output_token_ids(row) for row in range(len(rows.requests))])
        for row, request in enumerate(rows.requests):
            if request.args == "raise" and len(rows.output_token_ids(row)) >= 3:
                raise RuntimeError("boom")
            if request.args == "nan":
                logits[row, 3] = torch.nan
            if request.args == "shape":
                return logits[:, 1:]
            if isinstance(request.args, int):
                logits[row] = -torch.inf
                logits[row, request.args] = 1.0
        return logits


class Ban(LogitsProcessor):
    applies_to_all = True

    @classmethod
    def check(cls, args, params):
        pass

    def apply(self, logits, rows):
        logits[:, BAN] = -torch.inf
        return logits


seen: list[list[list[int]]] = []


class ForcePlugin:
    PELTON_API = ">=1.2,<2"

    @hookimpl
    def pelton_logits_processors(self):
        return [Entry(name="force", load=f"{HERE}:Force", priority=60)]


class BanPlugin:
    PELTON_API = ">=1.2,<2"

    @hookimpl
    def pelton_logits_processors(self):
        return [Entry(name="ban", load=f"{HERE}:Ban")]


def plugins_with(*offers):
    loaded = load_plugins(only=[])
    for offer in offers:
        register(loaded.manager, offer(), offer.__name__, "test")
    return loaded


@pytest.fixture(scope="module", autouse=True)
def module():
    module = ModuleType(HERE)
    module.Force, module.Ban = Force, Ban
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, HERE, module)
        yield


@pytest.fixture(autouse=True)
def nothing_seen():
    seen.clear()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama"))


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(model=checkpoint, plugins=plugins_with(ForcePlugin), **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting(checkpoint):
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(model=checkpoint, plugins=plugins_with(ForcePlugin), speculative_config=drafts, **SMALL) as llm:
        yield llm


def params(force=None, **more):
    more = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **more}
    return SamplingParams(**more, logits_processor_args=None if force is None else {"force": force})


def run(llm, *wanted):
    """(tokens, or why it failed) of a request with each of these parameters, in one batch."""
    for index, each in enumerate(wanted):
        llm.llm_engine.add_request(str(index), PROMPT, each)
    found = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                failed = output.error
                found[output.request_id] = failed.message if failed else list(output.outputs[0].token_ids)
    return [found[str(index)] for index in range(len(wanted))]


def test_each_request_has_its_own_argument(llm):
    plain, seven, nine, extra = run(
        llm, params(), params(7), params(9, temperature=1.0), params(extra_args={"force": 11, "other": 1})
    )
    assert (seven, nine, extra) == ([7] * 8, [9] * 8, [11] * 8)
    assert plain == run(llm, params())[0]


@pytest.mark.parametrize("wrong, says", [
    ("raise", "Logits processor 'force' fails for this request: RuntimeError: boom"),
    ("begin", "Logits processor 'force' fails for this request: LookupError: nothing to begin with"),
    ("shape", r"TypeError: apply returns torch.float32 \[1, \d+\]; expected torch.float32 \[1, \d+\]"),
    ("nan", "left NaN or infinity in its logits"),
])  # fmt: skip
@pytest.mark.parametrize("engine", ["llm", "drafting"])
def test_what_it_raises_ends_its_request_alone(request, wrong, says, engine, caplog):
    llm = request.getfixturevalue(engine)
    alone = [run(llm, each)[0] for each in (params(), params(temperature=1.0, seed=3))]
    plain, bad, forced, random = run(llm, params(), params(wrong), params(7), params(temperature=1.0, seed=3))
    assert [plain, random] == alone and forced == [7] * 8
    assert isinstance(bad, str) and re.search(says, bad), bad
    assert run(llm, params(7)) == [[7] * 8], "the engine goes on"
    if wrong == "raise":
        assert "boom" in caplog.text


def test_drafted_rows_have_the_drafts_before_them(drafting):
    assert run(drafting, params(7, max_tokens=16)) == [[7] * 16]
    assert any(len(rows) > 1 for rows in seen), "there were drafts"
    for rows in seen:
        assert [len(row) - len(rows[0]) for row in rows] == list(range(len(rows)))
        assert all(following[: len(row)] == row for row, following in itertools.pairwise(rows))


def test_the_order_is_that_of_priorities_and_one_may_apply_to_all(checkpoint):
    with LLM(model=checkpoint, plugins=plugins_with(ForcePlugin, BanPlugin), **SMALL) as llm:
        banned, forced, plain = run(llm, params(BAN), params(BAN + 1), params(logit_bias={BAN: 100.0}))
        assert "forbid all of them" in banned
        assert forced == [BAN + 1] * 8 and BAN not in plain


def test_steps_without_such_rows_sample_as_they_do_without_the_plugin(llm, monkeypatch):
    """In the captured tail, greedy as well as random."""

    def must_not_run(*args):
        raise AssertionError("this step was to end in the sample op")

    monkeypatch.setattr(StepSampler, "sample", must_not_run)
    assert all(isinstance(found, list) for found in run(llm, params(), params(temperature=1.0, seed=1)))
    (found,) = run(llm, params(7))
    assert "this step was to end" in found


@pytest.mark.parametrize("given, error, says", [
    ({"force": [1]}, RequestError, r"logits_processor_args.force: \[1\] is no token"),
    ({"force": "no such key"}, PluginError, "'force' fails to check its argument: KeyError: 'no such key'"),
    ({"farce": 1}, RequestError, r"names 'farce', .* Did you mean 'force'\? There is: force"),
    ({"force": object()}, RequestError, "logits_processor_args must be plain data"),
    ({"force": "x" * 70_000}, RequestError, "at most 65536"),
    ([1], RequestError, "logits_processor_args must be a map"),
])  # fmt: skip
def test_a_bad_argument_is_refused_in_the_front_end(llm, given, error, says):
    with pytest.raises(error, match=says):
        llm.generate(PROMPT, SamplingParams(logits_processor_args=given), use_tqdm=False)


def test_workers_that_run_none_are_told_apart(checkpoint):
    with LLM(model=checkpoint, plugins=plugins_with(ForcePlugin), **SMALL) as llm:
        info = llm.llm_engine.info
        assert info.report.logits_processors == ["force"]
        info.report.logits_processors = []
        llm.llm_engine.input_processor.engine_started(info)
        with pytest.raises(NotSupportedError, match="workers run no logits processor 'force'"):
            llm.generate(PROMPT, params(7), use_tqdm=False)


def test_an_entry_that_is_no_processor_stops_the_start(checkpoint):
    class WrongPlugin(ForcePlugin):
        @hookimpl
        def pelton_logits_processors(self):
            return [Entry(name="force", load="json:dumps")]

    with pytest.raises(PluginError, match=r"'force' \(json:dumps of WrongPlugin.*is not a subclass"):
        LLM(model=checkpoint, plugins=plugins_with(WrongPlugin), **SMALL)
