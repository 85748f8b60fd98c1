"""Worked example 5.8: which mode becomes which, and who is served by what."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pelton.attention.metadata import BatchDescriptor
from pelton.attention.support import GraphSupport
from pelton.config.compilation import CompilationConfig, CUDAGraphMode
from pelton.sampling.tails import GREEDY, Sample
from pelton_platforms.device.graphs.dispatcher import GraphDispatcher, default_sizes, mixed_sizes
from pelton_platforms.device.graphs.modes import lower_mode, requested_mode

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE
NEVER, SINGLE = GraphSupport.NEVER, GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
UNIFORM, ALWAYS = GraphSupport.UNIFORM_BATCH, GraphSupport.ALWAYS


@pytest.mark.parametrize(
    ("requested", "support", "with_pieces", "without"),
    [
        (FULL, UNIFORM, BOTH, DECODE_ONLY),
        (FULL, SINGLE, BOTH, DECODE_ONLY),
        (FULL, NEVER, PIECEWISE, NONE),
        (BOTH, NEVER, PIECEWISE, NONE),
        (DECODE_ONLY, NEVER, PIECEWISE, NONE),
        (FULL, ALWAYS, FULL, FULL),
        (BOTH, ALWAYS, BOTH, DECODE_ONLY),
        (BOTH, SINGLE, BOTH, DECODE_ONLY),
        (DECODE_ONLY, ALWAYS, DECODE_ONLY, DECODE_ONLY),
        (PIECEWISE, ALWAYS, PIECEWISE, NONE),
        (PIECEWISE, NEVER, PIECEWISE, NONE),
        (NONE, ALWAYS, NONE, NONE),
    ],
)
def test_lowers_to_what_the_backends_can_do(
    requested: CUDAGraphMode, support: GraphSupport, with_pieces: CUDAGraphMode, without: CUDAGraphMode
) -> None:
    for offered, expected in ((tuple(CUDAGraphMode), with_pieces), ([NONE, FULL, DECODE_ONLY], without)):
        mode, why = lower_mode(requested, support, offered=offered)
        assert mode is expected
        assert bool(why) == (mode is not requested)


@pytest.mark.parametrize("requested", [FULL, BOTH, DECODE_ONLY])
def test_decode_rows_of_more_tokens_need_a_backend_that_captures_them(requested: CUDAGraphMode) -> None:
    assert lower_mode(requested, SINGLE, decode_query_len=3)[0] is PIECEWISE
    assert lower_mode(requested, SINGLE, decode_query_len=3, offered=[NONE, FULL, DECODE_ONLY])[0] is NONE
    assert lower_mode(BOTH, UNIFORM, decode_query_len=3)[0] is BOTH


@pytest.mark.parametrize(
    ("requested", "support", "offered", "expected", "why"),
    [
        (BOTH, ALWAYS, [NONE], NONE, "this platform captures no graphs"),
        (BOTH, ALWAYS, [NONE, PIECEWISE], PIECEWISE, "this platform captures PIECEWISE only"),
        (DECODE_ONLY, ALWAYS, [NONE, PIECEWISE], PIECEWISE, "this platform captures PIECEWISE only"),
        (FULL, ALWAYS, [NONE, DECODE_ONLY], DECODE_ONLY, "this platform captures FULL_DECODE_ONLY only"),
        (BOTH, SINGLE, [NONE, DECODE_ONLY], DECODE_ONLY, "this platform captures FULL_DECODE_ONLY only"),
        (PIECEWISE, SINGLE, [NONE, DECODE_ONLY], NONE, "this platform captures FULL_DECODE_ONLY only"),
        (FULL, ALWAYS, [NONE, DECODE_ONLY, BOTH], BOTH, "captures FULL_AND_PIECEWISE or FULL_DECODE_ONLY only"),
        (BOTH, ALWAYS, [NONE, FULL], NONE, "this platform captures FULL only"),  # more than was asked for is not taken
        (
            BOTH, NEVER, [NONE, DECODE_ONLY], NONE,
            "an attention backend of this model cannot be captured; this platform captures FULL_DECODE_ONLY only",
        ),
        (
            FULL, UNIFORM, [NONE, DECODE_ONLY], DECODE_ONLY,
            "an attention backend captures uniform decode batches only; this platform captures FULL_DECODE_ONLY only",
        ),
    ],
)  # fmt: skip
def test_a_platform_that_offers_some_modes_gets_the_nearest_and_the_reasons(
    requested: CUDAGraphMode, support: GraphSupport, offered: list[CUDAGraphMode], expected: CUDAGraphMode, why: str
) -> None:
    mode, found = lower_mode(requested, support, offered=offered)
    assert mode is expected
    assert why in found


def test_levels_set_defaults_and_explicit_settings_win() -> None:
    assert [requested_mode(CompilationConfig(level=level)) for level in range(4)] == [NONE, PIECEWISE, BOTH, BOTH]
    assert requested_mode(CompilationConfig()) is BOTH  # -O2
    assert requested_mode(CompilationConfig(level=0, cudagraph_mode=FULL)) is FULL
    assert requested_mode(CompilationConfig(cudagraph_mode=FULL, enforce_eager=True)) is NONE
    assert requested_mode(CompilationConfig(), is_pooling=True) is PIECEWISE


def dispatcher(mode: CUDAGraphMode, **kwargs: object) -> GraphDispatcher:
    return GraphDispatcher(mode, max_num_seqs=64, max_num_tokens=256, **kwargs)  # type: ignore[arg-type]


def test_uniform_decode_is_full_else_pieces_else_nothing() -> None:
    both = dispatcher(BOTH)
    mode, key = both.dispatch(3, 3, 1, tail=Sample(GREEDY))
    assert (mode, key.num_tokens, key.num_reqs, key.uniform_query_len, key.tail) == (FULL, 4, 4, 1, Sample(GREEDY))
    mode, key = both.dispatch(30, 3)
    assert (mode, key.num_tokens, key.uniform_query_len) == (PIECEWISE, 32, 0)
    mode, key = both.dispatch(257, 3)
    assert (mode, key.num_tokens, key.num_reqs) == (NONE, 257, 3)
    assert both.dispatch(0, 0)[0] is NONE
    assert dispatcher(DECODE_ONLY).dispatch(30, 3)[0] is NONE
    assert dispatcher(DECODE_ONLY).dispatch(3, 3, 1)[0] is FULL
    assert dispatcher(PIECEWISE).dispatch(3, 3, 1)[0] is PIECEWISE
    assert dispatcher(NONE).dispatch(3, 3, 1)[0] is NONE


def test_the_key_of_pieces_does_not_depend_on_the_number_of_requests() -> None:
    both = dispatcher(BOTH)
    assert both.dispatch(30, 3) == both.dispatch(30, 7)


def test_full_serves_mixed_batches_and_uniform_decode_of_a_size_it_has() -> None:
    full = dispatcher(FULL)
    assert full.dispatch(30, 3)[0] is FULL
    only_mixed = dispatcher(FULL, sizes=[100])
    mode, key = only_mixed.dispatch(40, 40, 1)  # no uniform key: the mixed one serves it
    assert (mode, key.num_tokens, key.uniform_query_len) == (FULL, 100, 0)


def test_the_key_holds_the_uniform_query_length() -> None:
    drafts = dispatcher(BOTH, decode_query_len=3)
    mode, key = drafts.dispatch(6, 2, 3)
    assert (mode, key.num_tokens, key.num_reqs, key.uniform_query_len) == (FULL, 6, 2, 3)
    assert drafts.dispatch(5, 2, 3) == (mode, key)  # a row has fewer drafts
    mode, key = drafts.dispatch(8, 8, 1)  # steps without drafts have theirs
    assert (mode, key.num_tokens, key.num_reqs, key.uniform_query_len) == (FULL, 8, 8, 1)
    assert drafts.dispatch(6, 3, 2)[0] is PIECEWISE  # uniform, but of neither length


@pytest.mark.parametrize("mode", list(CUDAGraphMode))
def test_a_prompt_alone_is_one_graph_where_decode_steps_and_others_are_captured(mode: CUDAGraphMode) -> None:
    graphs = GraphDispatcher(
        mode, max_num_seqs=64, max_num_tokens=1024, max_piecewise_tokens=1024, captures_prompts=True
    )
    found, key = graphs.dispatch(100, 1, is_prompt=True)
    if mode in (FULL, BOTH):
        assert (found, key) == (FULL, BatchDescriptor(112, 1, is_prompt=True)) and graphs.stand_ins(key) == []
        assert graphs.prompt_sizes[0] == 16 and graphs.prompt_sizes[-1] == 512
    else:
        assert graphs.prompt_sizes == [] and not key.is_prompt
    others = (graphs.dispatch(100, 1), graphs.dispatch(600, 1, is_prompt=True), graphs.dispatch(100, 1, 100))
    assert not any(key.is_prompt for _, key in others)
    assert not dispatcher(mode).dispatch(100, 1, is_prompt=True)[1].is_prompt


def test_a_prompt_is_padded_no_more_than_its_pieces() -> None:
    few = dispatcher(BOTH, captures_prompts=True, sizes=[1, 2, 4, 8, 256])
    assert few.dispatch(5, 1, is_prompt=True) == few.dispatch(5, 1) == (PIECEWISE, BatchDescriptor(8, 0))
    assert few.dispatch(9, 1, is_prompt=True) == (FULL, BatchDescriptor(256, 1, is_prompt=True))


@pytest.mark.parametrize("mode", [BOTH, FULL, DECODE_ONLY])
def test_sizes_of_the_settings_are_rounded_up_to_whole_decode_rows(mode: CUDAGraphMode) -> None:
    drafts = dispatcher(mode, decode_query_len=3, sizes=[1, 2, 4, 8, 64, 1000])
    assert drafts.decode_sizes == {1: [1, 2, 4, 8, 64], 3: [3, 6, 9, 66]}
    assert drafts.dispatch(12, 4, 3)[1].num_reqs == 22
    assert drafts.mixed_sizes == ([] if mode is DECODE_ONLY else [1, 2, 4, 8, 64])
    assert drafts.most_tokens == (192 if mode is DECODE_ONLY else 256)
    assert dispatcher(mode, sizes=[1000]).valid_keys() == []


def test_sizes_cover_the_limit_and_pad_little() -> None:
    sizes = default_sizes(1000)
    assert sizes[0] == 1 and sizes[-1] == 1000 and sizes == sorted(set(sizes))
    assert max(b / a for a, b in pairwise(sizes[4:])) <= 1.5
    large = [size for size in mixed_sizes(16_384) if size >= 512]
    assert len(large) == 81 and max(b / a for a, b in pairwise(large)) <= 1.0625
    assert all(dispatcher(BOTH).dispatch(n, n, 1)[1].num_tokens >= n for n in range(1, 65))


@pytest.mark.parametrize("mode, most", [(BOTH, 1024), (PIECEWISE, 1024), (FULL, 512)])
def test_pieces_may_be_captured_for_more_tokens_than_whole_steps(mode: CUDAGraphMode, most: int) -> None:
    sizes = GraphDispatcher(mode, max_num_seqs=64, max_num_tokens=4096, max_piecewise_tokens=1024).mixed_sizes
    assert sizes[-1] == most and sizes == mixed_sizes(most)
    assert GraphDispatcher(mode, max_num_seqs=64, max_num_tokens=900, max_piecewise_tokens=1024).mixed_sizes[-1] <= 900


def test_valid_keys_start_with_the_smallest_step() -> None:
    both = dispatcher(BOTH, captures_prompts=True)
    keys = both.valid_keys()
    assert [key.num_tokens for _, key in keys] == sorted(key.num_tokens for _, key in keys)
    assert {mode for mode, _ in keys} == {FULL, PIECEWISE}
    assert len(set(keys)) == len(keys)
    assert all(
        both.dispatch(k.num_tokens, k.num_reqs, k.uniform_query_len, is_prompt=k.is_prompt) == (m, k) for m, k in keys
    )


def test_stand_ins_are_larger_keys_of_the_same_kind_up_to_a_power_of_two() -> None:
    both = dispatcher(BOTH)
    _, decode = both.dispatch(33, 33, 1, tail=Sample(GREEDY))
    assert [(key.num_tokens, key.num_reqs) for key in both.stand_ins(decode)] == [(48, 48), (56, 56), (64, 64)]
    assert {key.tail for key in both.stand_ins(decode)} == {Sample(GREEDY)}
    _, pieces = both.dispatch(100, 3)
    assert [(key.num_tokens, key.num_reqs) for key in both.stand_ins(pieces)] == [(128, 0)]
    _, exact = both.dispatch(16, 16, 1)
    assert both.stand_ins(exact) == []
    large = GraphDispatcher(BOTH, max_num_seqs=1024, max_num_tokens=4096, max_piecewise_tokens=2048)
    assert [key.num_tokens for key in large.stand_ins(large.dispatch(1100, 3)[1])] == [1216, 1280, 1344, 1408]
    rough = GraphDispatcher(BOTH, max_num_seqs=512, max_num_tokens=4096, sizes=[8, 100, 300, 4000])
    assert [rough.stand_ins(rough.dispatch(count, 3)[1]) for count in (20, 290)] == [[], []], "thrice the work at least"
    assert large.stand_ins(large.dispatch(600, 600, 1)[1])[-1].num_tokens == 1024  # a decode step
    mixed = GraphDispatcher(CUDAGraphMode.FULL, max_num_seqs=40, max_num_tokens=90)
    assert [(key.num_tokens, key.num_reqs) for key in mixed.stand_ins(mixed.dispatch(80, 7)[1])] == [(90, 40)]
