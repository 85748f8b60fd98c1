"""IO processors: how one is named, what the engine calls, in which order outputs come, and the suite for their authors."""

from __future__ import annotations

import asyncio
import re
import sys
from types import ModuleType

import msgspec
import pytest

from pelton import LLM, AsyncLLM, PoolingParams
from pelton.config import EngineConfig
from pelton.entries import Entry
from pelton.errors import ConfigError, PluginError, RequestError
from pelton.hookspecs import hookimpl
from pelton.plugins import Plugins, load_plugins, register
from pelton.pooling.io_processor import IOProcessor
from pelton.testing.io_processor import IOProcessorConformance, fake_output, make_context
from pelton.testing.models import make_tiny_checkpoint, make_tiny_encoder

HERE = "pelton_test_io_module"
SMALL = {"max_num_seqs": 4, "kv_cache_memory_bytes": 2**20, "disable_log_stats": True, "max_model_len": 64}


class Sentence(msgspec.Struct, forbid_unknown_fields=True):
    words: list[int]


class WordProcessor(IOProcessor[Sentence, dict]):
    """A prompt for each number; the answer is the vectors' first numbers."""

    def __init__(self, context):
        super().__init__(context)
        self.calls, self.kept = [], set()

    def parse_data(self, data):
        self.calls.append("parse_data")
        return msgspec.convert(data, Sentence)

    def merge_pooling_params(self, params=None):
        self.calls.append("merge_pooling_params")
        return params or PoolingParams(task="embed", use_activation=False)

    def pre_process(self, prompt, request_id=None, **kwargs):
        self.calls.append("pre_process")
        self.kept.add(request_id)
        return [{"prompt_token_ids": [word, 7]} for word in prompt.words]

    def post_process(self, model_output, request_id=None, **kwargs):
        self.calls.append("post_process")
        return {"first": [float(output.outputs.data[0]) for output in model_output]}

    def discard(self, request_id):
        self.kept.discard(request_id)


class Other(WordProcessor):
    """Offered under another name."""


class TestConformance(IOProcessorConformance):
    good_data = {"words": [5, 6, 5, 9]}  # noqa: RUF012
    bad_data = ("text", {}, {"words": ["a"]}, {"words": [1], "more": 2})

    def make_processor(self, context):
        return WordProcessor(context)


class NoIOProcessor:
    def __init__(self, context):
        pass


@pytest.fixture
def plugins():
    module = ModuleType(HERE)
    module.WordProcessor, module.Other, module.NoIOProcessor, module.PELTON_API = (
        WordProcessor,
        Other,
        NoIOProcessor,
        ">=1,<2",
    )

    @hookimpl
    def pelton_io_processors():
        return [Entry(name=name, load=f"{HERE}:{target}") for name, target in
                (("words", "WordProcessor"), ("other", "Other"), ("none", "NoIOProcessor"))]  # fmt: skip

    module.pelton_io_processors = pelton_io_processors
    sys.modules[HERE] = module
    loaded: Plugins = load_plugins()
    register(loaded.manager, module, "test_io", HERE)
    yield loaded
    del sys.modules[HERE]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return str(make_tiny_encoder(tmp_path_factory.mktemp("encoder"), "bert"))


def test_the_setting_names_it_before_config_json(encoder, plugins):
    in_file = {"hf_overrides": {"io_processor_plugin": "other"}}
    for settings, wanted in (
        ({"io_processor_plugin": "words"}, WordProcessor),
        (in_file, Other),
        (in_file | {"io_processor_plugin": "words"}, WordProcessor),
    ):
        with LLM(model=encoder, plugins=plugins, **settings, **SMALL) as llm:
            assert type(llm.llm_engine.front_end.io_processor) is wanted
    assert EngineConfig.from_flat(io_processor_plugin="words").pooling.io_processor_plugin == "words"


@pytest.mark.parametrize("settings, error, message", [
    ({"io_processor_plugin": "wrods"}, ConfigError, r"io_processor_plugin.*'wrods'.*words"),
    ({"hf_overrides": {"io_processor_plugin": "missing"}}, ConfigError, r"io_processor_plugin \(of config.json\).*'missing'"),
    ({"hf_overrides": {"io_processor_plugin": 3}}, ConfigError, "io_processor_plugin 3; expected a name"),
    ({"io_processor_plugin": "none"}, PluginError, "NoIOProcessor"),
])  # fmt: skip
def test_the_start_fails_when_the_named_one_cannot_be_had(encoder, plugins, settings, error, message):
    with pytest.raises(error, match=message):
        LLM(model=encoder, plugins=plugins, **settings, **SMALL)


def test_a_model_that_generates_has_none(tmp_path, plugins):
    path = make_tiny_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match="IO processors are for models that pool"):
        LLM(model=str(path), plugins=plugins, io_processor_plugin="words", **SMALL)


def test_offline(encoder, plugins):
    with LLM(model=encoder, plugins=plugins, io_processor_plugin="words", **SMALL) as llm:
        processor = llm.llm_engine.front_end.io_processor
        (output,) = llm.encode({"data": {"words": [9, 5, 9]}}, use_tqdm=False)
        assert processor.calls == ["parse_data", "merge_pooling_params", "pre_process", "post_process"]
        plain = llm.encode([[9, 7], [5, 7]], PoolingParams(use_activation=False), use_tqdm=False)
        first, second = (float(one.outputs.data[0]) for one in plain)
        assert output.outputs["first"] == pytest.approx([first, second, first], abs=1e-5)
        assert output.finished and output.prompt_token_ids == [9, 7, 5, 7, 9, 7]
        (unit,) = llm.encode({"data": {"words": [9]}}, PoolingParams(), use_tqdm=False)
        assert abs(unit.outputs["first"][0]) < 1 and unit.outputs["first"][0] != pytest.approx(first)
        with pytest.raises(RequestError, match=r"cannot read data: .*words"):
            llm.encode({"data": {}}, use_tqdm=False)
        with pytest.raises(RequestError, match="not in the vocabulary"):
            llm.encode({"data": {"words": [10_000]}}, use_tqdm=False)
        assert not processor.kept
    with LLM(model=encoder, plugins=plugins, **SMALL) as llm, pytest.raises(RequestError, match="no IO processor"):
        llm.encode({"data": {}}, use_tqdm=False)


def test_async_outputs_are_put_in_order_before_post_process():
    processor = WordProcessor(make_context())

    async def outputs():
        for index in (2, 0, 1):
            yield index, fake_output("r", [index])

    made = asyncio.run(processor.post_process_async(outputs(), "r"))
    assert made == processor.post_process([fake_output("r", [index]) for index in range(3)])


async def test_async(encoder, plugins):
    from pelton.engine.in_process import InProcessClient

    config = EngineConfig.from_flat(model=encoder, io_processor_plugin="words", **SMALL)
    async with AsyncLLM(config, plugins=plugins, start_engine=InProcessClient) as llm:
        outputs = [output async for output in llm.encode({"data": {"words": [9, 5]}}, request_id="mine")]
        assert [output.request_id for output in outputs] == ["mine"]
        found = await llm.encode_all([[9, 7], [5, 7]], PoolingParams(use_activation=False))
        assert outputs[0].outputs["first"] == pytest.approx([float(one.outputs.data[0]) for one in found], abs=1e-5)
        with pytest.raises(RequestError, match="cannot read data"):
            [output async for output in llm.encode({"data": 3})]
        assert not llm.io_processor.kept
        assert llm.num_unfinished_requests == 0


class Nonsense(WordProcessor):
    """Makes no prompts, and forgets with an error."""

    made = None

    def pre_process(self, prompt, request_id=None, **kwargs):
        return super().pre_process(prompt) if self.made == "prompts" else self.made

    def discard(self, request_id):
        raise KeyError(request_id)


@pytest.mark.parametrize("made", [None, 7, [None], [[7.5]], {"text": "a"}, [{}]], ids=repr)
async def test_what_pre_process_gives_is_the_plugins_mistake(encoder, plugins, made, monkeypatch):
    from pelton.engine.in_process import InProcessClient

    monkeypatch.setattr(sys.modules[HERE], "Other", Nonsense)
    monkeypatch.setattr(Nonsense, "made", made)
    told = rf"pelton_io_processors 'other' \({HERE}:Other of test_io \(.*\)\) gives {re.escape(repr(made))} from pre_process; it has to"
    config = EngineConfig.from_flat(model=encoder, io_processor_plugin="other", **SMALL)
    async with AsyncLLM(config, plugins=plugins, start_engine=InProcessClient) as llm:
        with pytest.raises(PluginError, match=told):
            [output async for output in llm.encode({"data": {"words": [9]}})]
    if made is None:
        llm = LLM(model=encoder, plugins=plugins, io_processor_plugin="other", **SMALL)
        with llm, pytest.raises(PluginError, match=told):
            llm.encode({"data": {"words": [9]}}, use_tqdm=False)


async def test_a_discard_that_raises_costs_no_answer(encoder, plugins, monkeypatch, caplog):
    from pelton.engine.in_process import InProcessClient

    monkeypatch.setattr(sys.modules[HERE], "Other", Nonsense)
    monkeypatch.setattr(Nonsense, "made", "prompts")
    config = EngineConfig.from_flat(model=encoder, io_processor_plugin="other", **SMALL)
    async with AsyncLLM(config, plugins=plugins, start_engine=InProcessClient) as llm:
        outputs = [output async for output in llm.encode({"data": {"words": [9, 5]}}, request_id="mine")]
    assert len(outputs[0].outputs["first"]) == 2
    assert "'other'" in caplog.text and "fails in discard, of request mine" in caplog.text
    with LLM(model=encoder, plugins=plugins, io_processor_plugin="other", **SMALL) as llm:
        (output,) = llm.encode({"data": {"words": [9, 5]}}, use_tqdm=False)
        assert len(output.outputs["first"]) == 2


async def test_many_prompts_go_to_the_engine_together(encoder):
    from pelton.engine.in_process import InProcessClient

    sent = []

    class Counts(InProcessClient):
        def add_requests(self, requests):
            sent.append([len(request.prompt_token_ids) for request in requests])
            super().add_requests(requests)

    prompts = [[9, 7 + index % 3] for index in range(70)] + [list(range(5, 25))] * 2
    async with AsyncLLM(EngineConfig.from_flat(model=encoder, **SMALL), start_engine=Counts) as llm:
        found = await llm.encode_all(prompts, request_id="r")
        assert [len(one) for one in sent] == [64, 8]
        assert [one.prompt_token_ids for one in found] == prompts
        with pytest.raises(RequestError, match="not in the vocabulary"):
            await llm.encode_all([*prompts, [10_000]], request_id="r")
        assert llm.num_unfinished_requests == 0
