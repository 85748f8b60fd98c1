"""Conformance of draft proposers: what any implementation has to keep, run with pytest. For drafters there is `DrafterConformance`.

Subclass `DraftProposerConformance` in a test module and give it `make_proposer`:

    class TestMine(DraftProposerConformance):
        def make_proposer(self, context):
            return MyProposer(context)
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pelton.config import SpeculativeConfig
from pelton.spec_decode.interface import DraftProposer, ProposerContext
from pelton.testing.scheduler import Harness, make_request

VOCAB_SIZE, MAX_MODEL_LEN = 40, 128


class DraftProposerConformance:
    config: ClassVar[SpeculativeConfig] = SpeculativeConfig(method="under_test", num_speculative_tokens=3)

    def make_proposer(self, context: ProposerContext) -> DraftProposer:
        raise NotImplementedError

    @pytest.fixture
    def make(self) -> Callable[[], DraftProposer]:
        return lambda: self.make_proposer(
            ProposerContext(config=self.config, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)
        )

    def test_says_how_many_drafts_it_makes_at_most(self, make: Callable[[], DraftProposer]) -> None:
        most = getattr(make(), "max_draft_tokens", None)
        assert isinstance(most, int) and 1 <= most <= self.config.num_speculative_tokens, (
            f"max_draft_tokens is {most!r}; it must be 1 to num_speculative_tokens, {self.config.num_speculative_tokens}"
        )

    def test_proposes_a_list_of_token_ids_and_no_more_than_it_says(self, make: Callable[[], DraftProposer]) -> None:
        for text in _texts():
            proposer = make()
            drafts = _propose(proposer, "r", text)
            assert len(drafts) <= proposer.max_draft_tokens, (
                f"{len(drafts)} drafts for a text of {len(text)} tokens; max_draft_tokens is {proposer.max_draft_tokens}"
            )

    def test_leaves_the_tokens_as_they_are(self, make: Callable[[], DraftProposer]) -> None:
        for text in _texts():
            given = list(text)
            _propose(make(), "r", given)
            assert given == text, "propose changes token_ids, which are the scheduler's own"

    def test_drafts_depend_on_the_text_alone(self, make: Callable[[], DraftProposer]) -> None:
        """Not on how often it was asked before, nor on other requests between."""
        chooser = random.Random(3)
        proposer, texts = make(), {f"r{i}": text for i, text in enumerate(_texts())}
        known = {name: chooser.randint(1, len(text)) for name, text in texts.items()}
        for _ in range(200):
            name = chooser.choice(list(texts))
            found = _propose(proposer, name, texts[name][: known[name]])
            expected = _propose(make(), name, texts[name][: known[name]])
            assert found == expected, (
                f"{found} is proposed after {known[name]} tokens of {name}, and {expected} by a proposer that was asked nothing before"
            )
            known[name] = min(known[name] + chooser.randint(0, 4), len(texts[name]))

    def test_a_finished_request_is_forgotten(self, make: Callable[[], DraftProposer]) -> None:
        proposer = make()
        proposer.finished("never seen")
        first, second = [1, 2, 3, 4] * 6, [5, 6, 7, 8, 9] * 5
        _propose(proposer, "r", first)
        proposer.finished("r")
        found, expected = _propose(proposer, "r", second), _propose(make(), "r", second)
        assert found == expected, f"{found} is proposed for an id that was used before, and {expected} for a new one"

    @pytest.mark.parametrize(
        "options", [{}, {"max_steps_in_flight": 2}, {"num_blocks": 14}], ids=["one", "overlap", "few-blocks"]
    )
    def test_tokens_are_those_without_drafts(self, make: Callable[[], DraftProposer], options: dict[str, Any]) -> None:
        """Wrong drafts cost time and change nothing: through a scheduler with several requests, preemption and stops."""
        expected = _generate(Harness(**options))
        harness = Harness(proposer=make(), **options)
        assert _generate(harness) == expected


def _generate(harness: Harness) -> dict[str, list[int]]:
    for index, count in enumerate((1, 5, 9, 17)):
        harness.add(make_request(f"r{index}", count, 12 + index))
    harness.run()
    return {name: harness.tokens(name) for name in harness.requests}


def _propose(proposer: DraftProposer, request_id: str, text: Sequence[int]) -> list[int]:
    drafts = proposer.propose(request_id, text)
    assert isinstance(drafts, list) and all(type(token) is int for token in drafts), (
        f"propose returns {drafts!r}; it must return a list of ints, empty for none"
    )
    wrong = [token for token in drafts if not 0 <= token < VOCAB_SIZE]
    assert not wrong, f"propose returns token {wrong[0]} of a vocabulary of {VOCAB_SIZE}"
    return drafts


def _texts() -> Iterator[list[int]]:
    """Short and long, with and without repetition, up to the longest there is."""
    chooser = random.Random(1)
    yield [0]
    yield [VOCAB_SIZE - 1] * 2
    yield [1, 2, 3] * 9
    for length in (2, 7, 31, MAX_MODEL_LEN):
        yield [chooser.randrange(VOCAB_SIZE) for _ in range(length)]
        yield [chooser.randrange(3) for _ in range(length)]


class DrafterConformance:
    """For drafters, whose drafts workers make: engines on a small model, with and without drafts.

    Subclass it and give it `model`, a checkpoint's folder, and `speculative_config`, whose method an installed plugin offers, or one of
    `plugins`.
    """

    model: str
    speculative_config: Mapping[str, Any]
    plugins: Any = None
    """`pelton.plugins.Plugins`, for a test without an installed package."""
    settings: ClassVar[Mapping[str, Any]] = {
        "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 160, "max_num_seqs": 8,
        "kv_cache_memory_bytes": 2**24,
    }  # fmt: skip

    @pytest.mark.parametrize(
        "options",
        [
            {}, {"max_num_batched_tokens": 16}, {"max_num_seqs": 1}, {"async_scheduling": False},
            {"num_gpu_blocks_override": 16, "kv_cache_memory_bytes": None},
        ],
        ids=["batched", "chunked", "alone", "no-overlap", "few-blocks"],
    )  # fmt: skip
    def test_greedy_tokens_are_those_without_drafts(self, options: dict[str, Any]) -> None:
        """Wrong drafts cost time and change nothing."""
        assert self._answers(_greedy(), True, options)[0] == self._answers(_greedy(), False, options)[0]

    def test_a_seeded_sample_is_that_without_drafts(self) -> None:
        from pelton import SamplingParams

        params = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=24, ignore_eos=True)
        assert self._answers(params, True)[0] == self._answers(params, False)[0]

    def test_makes_drafts_and_no_more_than_the_settings_say(self) -> None:
        most = self.speculative_config.get("num_speculative_tokens", SpeculativeConfig().num_speculative_tokens)
        _, rows, drafts = self._answers(_greedy(), True)
        assert 0 < drafts <= most * rows, f"{drafts:.0f} drafts in {rows:.0f} rows, with {most} a row at most"

    def _answers(
        self, params: Any, has_drafts: bool, options: Mapping[str, Any] | None = None
    ) -> tuple[list[list[int]], float, float]:
        """Token ids of a few prompts, asked twice, so that prefixes are found; rows that had drafts, and these."""
        from pelton import LLM

        settings = {**self.settings, **(options or {}), "disable_log_stats": False}
        if has_drafts:
            settings["speculative_config"] = {**self.speculative_config, "min_acceptance_rate": 0}
        vocab_size = json.loads((Path(self.model) / "config.json").read_text())["vocab_size"]
        chooser = random.Random(2)
        prompts: list[Any] = [
            {"prompt_token_ids": [chooser.randrange(3, vocab_size) for _ in range(length)]}
            for length in (1, 2, 7, 16, 33, 70)
        ]
        with LLM(model=self.model, plugins=self.plugins, **settings) as llm:
            outputs = [output for _ in range(2) for output in llm.generate(prompts, params, use_tqdm=False)]
            metrics = {metric.name: getattr(metric, "value", 0.0) for metric in llm.get_metrics()}
        failed = [output.error.message for output in outputs if output.error is not None]
        assert not failed, f"a request failed: {failed[0]}"
        rows, drafts = (metrics[f"pelton_spec_decode_num_{name}"] for name in ("drafts", "draft_tokens"))
        return [list(output.outputs[0].token_ids) for output in outputs], rows, drafts


def _greedy() -> Any:
    from pelton import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
