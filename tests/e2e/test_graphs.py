"""Greedy ids equal transformers' in every graph mode: on a CPU, with fake graphs in place of a device's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from pelton_e2e import Reference

from pelton import LLM, SamplingParams
from pelton.attention.metadata import BatchDescriptor, CommonMetadata
from pelton.attention.support import GraphSupport
from pelton.config import CUDAGraphMode
from pelton.testing.graphs import FakeGraphRecorder, StaticAttention
from pelton_platforms.device.graphs.captures import FullGraphs

NUM_TOKENS = 6


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeGraphRecorder]]:
    """The CPU platform with graphs, and attention that may be captured."""
    made: list[FakeGraphRecorder] = []

    def graph_recorder(self: object) -> FakeGraphRecorder:
        made.append(FakeGraphRecorder())
        return made[-1]

    monkeypatch.setattr("pelton_platforms.cpu.platform.CPUPlatform.supported_graph_modes", tuple(CUDAGraphMode))
    monkeypatch.setattr("pelton_platforms.cpu.platform.CPUPlatform.graph_recorder", graph_recorder)
    monkeypatch.setattr("pelton_backends.sdpa.backend.SDPABackend", StaticAttention)
    monkeypatch.setattr("pelton_backends.native.plugin._ENTRIES", ())  # a fake graph holds torch's ops only, none in C
    yield made


def generate(llm: LLM, reference: Reference, params: SamplingParams) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in reference.prompts[3:9]]
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


def make_llm(reference: Reference, mode: CUDAGraphMode, *, sizes: list[int] | None = None, **settings: Any) -> LLM:
    return LLM(
        model=reference.path, dtype="float32", skip_tokenizer_init=True, max_model_len=96, max_num_seqs=4,
        max_num_batched_tokens=40, kv_cache_memory_bytes=8 * 2**20, disable_log_stats=True, attention_backend="sdpa",
        compilation_config={"cudagraph_mode": mode, "cudagraph_capture_sizes": sizes}, **settings,
    )  # fmt: skip


class Copying(StaticAttention):
    """Its metadata is a copy, slots and all: captured pieces must not read what it gave when they were captured."""

    graph_support: ClassVar[GraphSupport] = GraphSupport.NEVER

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> CommonMetadata:
        return replace(common, slot_mapping=common.slot_mapping.clone())


def test_pieces_need_nothing_of_the_backend_but_its_forward(
    reference: Reference, recorders: list[FakeGraphRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pelton_backends.sdpa.backend.SDPABackend", Copying)
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    with make_llm(reference, CUDAGraphMode.FULL_AND_PIECEWISE) as llm:
        assert generate(llm, reference, greedy) == [output[:NUM_TOKENS] for output in reference.outputs[3:9]]
    assert sum(graph.num_replays for recorder in recorders for graph in recorder.graphs) > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL], ids=str)
def test_a_prompt_alone_becomes_one_graph(
    reference: Reference, recorders: list[FakeGraphRecorder], monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode
) -> None:
    prompts, keys, run = [prompt for prompt in reference.prompts if len(prompt) in range(9, 33)], [], FullGraphs.run

    def noted(self: FullGraphs, mode: CUDAGraphMode, key: Any, call: Any) -> Any:
        if key in self and key.is_prompt:
            keys.append(key)
        return run(self, mode, key, call)

    monkeypatch.setattr(FullGraphs, "run", noted)
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    with make_llm(reference, mode, sizes=[1, 16, 32], enable_prefix_caching=False) as llm:
        for _ in range(3):
            for prompt in prompts:
                [output] = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
                expected = reference.outputs[reference.prompts.index(prompt)][:NUM_TOKENS]
                assert list(output.outputs[0].token_ids) == expected
    assert len(set(map(len, prompts))) > 1 and len(keys) >= len(prompts)


@pytest.mark.parametrize(
    "reference, mode",
    [  # windows beside full attention, and windows alone: in the mode that has the graphs of two others; all prompts in full graphs
        *(("llama", mode) for mode in CUDAGraphMode),
        *(("gemma3", mode) for mode in (CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL)),
        ("mistral", CUDAGraphMode.FULL_AND_PIECEWISE),
    ],
    indirect=["reference"],
)  # fmt: skip
def test_ids_equal_transformers(reference: Reference, recorders: list[FakeGraphRecorder], mode: CUDAGraphMode) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    seeded = SamplingParams(
        temperature=1.0, top_p=0.9, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False
    )
    extras = SamplingParams(temperature=0.0, logprobs=1, repetition_penalty=1.2, max_tokens=NUM_TOKENS, ignore_eos=True)
    with make_llm(reference, mode) as llm:
        expected = [output[:NUM_TOKENS] for output in reference.outputs[3:9]]
        assert generate(llm, reference, greedy) == expected
        replays = sum(graph.num_replays for recorder in recorders for graph in recorder.graphs)
        assert bool(replays) == (mode is not CUDAGraphMode.NONE)
        assert generate(llm, reference, greedy) == expected  # prefix hits
        random = generate(llm, reference, seeded)
        assert random == generate(llm, reference, seeded) and random != expected
        assert generate(llm, reference, extras) == generate(llm, reference, extras)
        assert llm.kv_cache_usage() == 0.0
