"""Kernels of layers with states against their recurrences in float64: sizes, chunk borders, and rows of all kinds in one step, captured
or not; those of Mamba-2 against the backend in torch as well."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from pelton_covering import in_turn
from pelton_states import (
    NUM_BLOCKS,
    DeltaCase,
    GatedConvCase,
    KeyDeltaCase,
    LightningCase,
    RgLruCase,
    ScanCase,
    StateCase,
    check,
    in_pieces,
    make_backend,
    make_layer,
    recurrence,
    run_step,
)

from pelton.attention.metadata import BatchDescriptor
from pelton_backends.sdpa.state_space import StateSpaceBackend
from pelton_backends.triton.launch import Variant
from pelton_backends.triton.states import delta_scan, key_delta_scan, scan
from pelton_backends.triton.states.backend import (
    TritonDeltaRuleBackend,
    TritonKeyDeltaRuleBackend,
    TritonLightningBackend,
    TritonRgLruBackend,
    TritonSelectiveScanBackend,
    TritonShortConvBackend,
    TritonStates,
    TritonStateSpaceBackend,
)

BACKENDS: dict[str, type[TritonStates]] = {
    kind.attention_type: kind
    for kind in (
        TritonStateSpaceBackend, TritonDeltaRuleBackend, TritonKeyDeltaRuleBackend, TritonSelectiveScanBackend,
        TritonLightningBackend, TritonRgLruBackend, TritonShortConvBackend,
    )
}  # fmt: skip
SIZES: dict[str, StateCase] = {
    "mamba2": StateCase(head_dim=64, state_size=128, num_groups=1),
    "bamba": StateCase(head_dim=64, state_size=128, num_groups=1, dtype="bfloat16"),
    "large": StateCase(head_dim=128, state_size=256, num_heads=2, num_groups=1, dtype="bfloat16"),
    "large-in-float32": StateCase(head_dim=128, state_size=256, num_heads=2, num_groups=2),
    "small": StateCase(head_dim=16, state_size=16, num_heads=2, num_groups=1, taps=2, dtype="float16"),
    "odd": StateCase(head_dim=24, state_size=40, num_heads=6, num_groups=2, taps=3, has_bias=False),
    "eight-groups": StateCase(head_dim=80, state_size=72, num_heads=8, num_groups=8, taps=2, dtype="bfloat16"),
    "limited": StateCase(head_dim=32, state_size=16, num_groups=4, dt_limit=(0.3, 0.4), dtype="float16"),
    "unlimited": StateCase(head_dim=32, state_size=16, num_groups=4, dt_limit=(0.0, float("inf"))),
    "delta": DeltaCase(head_dim=128, state_size=128, has_bias=False, dtype="bfloat16"),
    "delta-in-float32": DeltaCase(head_dim=64, state_size=32, has_bias=False),
    "delta-odd": DeltaCase(
        head_dim=24, state_size=40, num_heads=3, num_groups=1, taps=3, dtype="float16", max_beta=2.0
    ),
    "delta-large": DeltaCase(head_dim=256, state_size=256, num_heads=2, num_groups=1, dtype="bfloat16"),
    "key-delta": KeyDeltaCase(
        head_dim=128, state_size=128, num_heads=2, num_groups=2, has_bias=False, dtype="bfloat16"
    ),
    "key-delta-odd": KeyDeltaCase(head_dim=24, state_size=40, num_heads=3, num_groups=1, taps=3, max_beta=2.0),
    "scan": ScanCase(head_dim=32, state_size=16),
    "scan-odd": ScanCase(head_dim=9, state_size=5, num_heads=3, taps=3, dtype="bfloat16"),
    "lightning": LightningCase(head_dim=128, num_heads=2, dtype="bfloat16"),
    "lightning-odd": LightningCase(head_dim=24, num_heads=3),
    "rg-lru": RgLruCase(head_dim=32),
    "rg-lru-odd": RgLruCase(head_dim=9, num_heads=3, taps=3, dtype="bfloat16"),
    "conv": GatedConvCase(head_dim=32, taps=3, has_bias=False),
    "conv-long": GatedConvCase(head_dim=32, taps=7, has_bias=False),
    "conv-odd": GatedConvCase(head_dim=10, num_heads=3, taps=2, dtype="float16"),
}
SMALL: dict[str, StateCase] = {
    "state": StateCase(head_dim=16, state_size=32),
    "delta_rule": DeltaCase(head_dim=16, state_size=32),
    "key_delta_rule": KeyDeltaCase(head_dim=16, state_size=32),
    "selective_scan": ScanCase(head_dim=16, state_size=8),
    "lightning": LightningCase(head_dim=16),
    "rg_lru": RgLruCase(head_dim=16),
    "short_conv": GatedConvCase(head_dim=16),
}
EAGER, CAPTURED = None, BatchDescriptor(128, 8)


def made_with(case: StateCase, device: torch.device) -> tuple[Any, Any, Any]:
    """A layer, its backend, and what that makes of it."""
    made, backend = make_layer(case, device), make_backend(BACKENDS[case.attention_type], case, device)
    return made, backend, backend.bind(made)


@pytest.fixture(params=SIZES)
def case(request: pytest.FixtureRequest) -> StateCase:
    torch.manual_seed(0)
    return SIZES[request.param]


@pytest.fixture(params=SMALL)
def small(request: pytest.FixtureRequest) -> StateCase:
    torch.manual_seed(1)
    return SMALL[request.param]


@pytest.mark.parametrize("cuts", [[1, 1], [2, 1, 1], [64, 1, 65, 3]], ids=str)
def test_a_row_in_pieces(case: StateCase, cuts: list[int], device: torch.device) -> None:
    made, rows, found = in_pieces(BACKENDS[case.attention_type], case, cuts, device)
    check(found, recurrence(made, rows), case.dtype)
    others = [block for block in range(NUM_BLOCKS) if block != 5]
    assert made.states[others].isnan().all() and made.conv_states[others].isnan().all()


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 330])
@pytest.mark.parametrize("kind", [kind for kind in SMALL if kind != "short_conv"])
def test_prompts_of_any_length_and_the_state_behind_them(kind: str, length: int, device: torch.device) -> None:
    torch.manual_seed(length)
    case = replace(SMALL[kind], num_heads=2, num_groups=1, dtype="bfloat16")
    made, rows, found = in_pieces(BACKENDS[kind], case, [length, 1], device)
    check(found, recurrence(made, rows), case.dtype)


@pytest.mark.parametrize("dtype, key", in_turn(["float32", "bfloat16", "float16"], [EAGER, CAPTURED]))
def test_rows_of_all_kinds_in_one_step(
    small: StateCase, dtype: str, key: BatchDescriptor | None, device: torch.device
) -> None:
    """Rows of one token with states and one that begins; a chunk behind a state, prompts, and one as long as the convolution; in
    blocks where others left NaN."""
    case = replace(small, dtype=dtype)
    made, backend, bound = made_with(case, device)
    rows = [case.rows(count, device) for count in (9, 4, 1, 45, 40, 3)]
    run_step(bound, backend, [rows[0][:8], rows[1][:3], rows[3][:5]], [0, 0, 0], [1, 2, 4])
    parts = [rows[0][8:], rows[1][3:], rows[2], rows[3][5:], rows[4], rows[5]]
    found = run_step(bound, backend, parts, [8, 3, 0, 5, 0, 0], [1, 2, 3, 4, 5, 6], key=key)
    for own, output in zip(rows, found, strict=True):
        check(output, recurrence(made, own)[-len(output) :], dtype)
    assert made.states[[0, 7]].isnan().all() and made.conv_states[[0, 7]].isnan().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_step_leaves_what_the_backend_in_torch_leaves(dtype: str, device: torch.device) -> None:
    torch.manual_seed(2)
    case = StateCase(head_dim=16, state_size=32, dtype=dtype)
    made, backend, bound = made_with(case, device)
    in_torch, plain = make_layer(case), make_backend(StateSpaceBackend, case)
    for name in ("conv_weight", "conv_bias", "dt_bias", "a_log", "d"):
        getattr(in_torch, name).copy_(getattr(made, name))
    rows = [case.rows(count) for count in (9, 45, 3)]
    for parts, seen in (([row[:2] for row in rows], [0, 0, 0]), ([row[2:] for row in rows], [2, 2, 2])):
        found = run_step(bound, backend, [part.to(device) for part in parts[::-1]], seen, [3, 2, 1])
        expected = run_step(plain.bind(in_torch), plain, parts[::-1], seen, [3, 2, 1])
        check(torch.cat(found), torch.cat(expected).double(), dtype)
        check(made.states[1:4], in_torch.states[1:4].double(), dtype)
        assert torch.equal(made.conv_states[1:4].cpu(), in_torch.conv_states[1:4])


def test_captured_steps_of_one_token_and_of_one_prompt(small: StateCase, device: torch.device) -> None:
    made, backend, bound = made_with(small, device)
    rows = [small.rows(count, device) for count in (38, 2, 1)]
    found = run_step(bound, backend, [rows[0][:37]], [0], [1], key=BatchDescriptor(48, 1, is_prompt=True))
    run_step(bound, backend, [rows[1][:1]], [0], [2], key=BatchDescriptor(1, 1, 1))
    parts = [rows[0][37:], rows[1][1:], rows[2]]
    last = run_step(bound, backend, parts, [37, 1, 0], [1, 2, 3], key=BatchDescriptor(8, 8, 1))
    check(torch.cat([*found, last[0]]), recurrence(made, rows[0]), "float32")
    for own, output in zip(rows[1:], last[1:], strict=True):
        check(output, recurrence(made, own)[-1:], "float32")


@pytest.mark.parametrize("num_states, num_parts", [(1, 4), (2, 2), (50, 1)])
@pytest.mark.parametrize("kind", ["state", "delta_rule", "key_delta_rule"])
def test_chunks_are_computed_in_parts(
    kind: str, num_states: int, num_parts: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for the states before so many chunks, of a row of three chunks that begins beside one of one."""
    torch.manual_seed(4)
    case, launched, launch = replace(SMALL[kind], num_heads=6, dtype="float16"), [], Variant.__call__
    tile, kernels, own = {
        "state": (64, 2, 0), "delta_rule": (64, 3, 2 * 64 * 48 + 4 * 64),
        "key_delta_rule": (64, 4, 2 * 64 * (16 + 3 * 32 + 64 + 16) + 4 * 32 * (64 + 5) - 2 * 16 * 32),
    }[kind]  # fmt: skip
    for module in (scan, delta_scan, key_delta_scan):
        monkeypatch.setattr(module, "SCRATCH_BYTES", num_states * 6 * (2 * 16 * 32 + own))

    def noted(self: Variant, key: Any, grid: tuple[int, ...], args: Any) -> None:
        launched.append(grid)
        launch(self, key, grid, args)

    monkeypatch.setattr(Variant, "__call__", noted)
    made, backend, bound = made_with(case, device)
    rows = [case.rows(count, device) for count in (2 * tile + 8, 20)]
    found = run_step(bound, backend, [rows[0][:-1], rows[1]], [0, 0], [2, 3])
    assert len(launched) == 1 + kernels * num_parts
    found += run_step(bound, backend, [rows[0][-1:]], [2 * tile + 7], [2])
    check(torch.cat([found[0], found[2]]), recurrence(made, rows[0]), case.dtype)
    check(found[1], recurrence(made, rows[1]), case.dtype)


@pytest.mark.parametrize("kind", [DeltaCase, KeyDeltaCase])
def test_keys_that_are_alike_and_states_that_hardly_fade(kind: type[DeltaCase], device: torch.device) -> None:
    """Then the inverse of a chunk's system is small, and its powers are not."""
    torch.manual_seed(4)
    case = kind(head_dim=16, state_size=16, num_heads=2, num_groups=1, dtype="bfloat16", max_beta=1.0)
    made, backend, bound = made_with(case, device)
    made.a_log.fill_(-12.0)
    rows = case.rows(150, device)
    rows[:, 16:32] = rows[:1, 16:32]  # keys
    rows[:, case.width : case.width + 2] = 8.0  # of which all is written
    check(run_step(bound, backend, [rows], [0], [1])[0], recurrence(made, rows), case.dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_of_a_key_that_fade_at_once_beside_some_that_never_do(dtype: str, device: torch.device) -> None:
    """Decays of a chunk from 1 to e^-20000, whose inverses no number holds."""
    torch.manual_seed(7)
    case = KeyDeltaCase(head_dim=16, state_size=32, num_heads=2, num_groups=1, dtype=dtype)
    made, backend, bound = made_with(case, device)
    made.a_log.copy_(torch.tensor([3.0, -6.0]))
    made.dt_bias.copy_(torch.linspace(-12.0, 16.0, 64))
    rows = case.rows(150, device)
    check(run_step(bound, backend, [rows], [0], [1])[0], recurrence(made, rows), case.dtype)


def test_random_batches(small: StateCase, device: torch.device) -> None:
    """Requests come, go on in pieces of any size beside each other, and leave; others begin in their blocks."""
    numbers, case = random.Random(5), replace(small, num_heads=2, num_groups=1, taps=3)
    made, backend, bound = made_with(case, device)
    free, running = list(range(1, NUM_BLOCKS)), []
    for step in range(12):
        while free and (not running or numbers.random() < 0.6):
            rows = case.rows(numbers.choice([1, 2, 5, 30, 70]), device)
            running.append([rows, 0, free.pop(numbers.randrange(len(free))), recurrence(made, rows)])
        chosen = [(one, numbers.choice([1, 1, 2, 33])) for one in running if numbers.random() < 0.8]
        counts = [(one, min(count, len(one[0]) - one[1])) for one, count in chosen]
        counts.sort(key=lambda item: item[1] != 1)
        if not counts:
            continue
        parts = [one[0][one[1] : one[1] + count] for one, count in counts]
        key = BatchDescriptor(sum(map(len, parts)) + 3, 8) if step % 2 else None
        outputs = run_step(bound, backend, parts, [one[1] for one, _ in counts], [one[2] for one, _ in counts], key=key)
        for (one, count), output in zip(counts, outputs, strict=True):
            check(output, one[3][one[1] : one[1] + count], "float32")
            one[1] += count
        free += [one[2] for one in running if one[1] == len(one[0])]
        running = [one for one in running if one[1] < len(one[0])]


def test_what_is_refused() -> None:
    for case in SMALL.values():
        for kind, backend in BACKENDS.items():
            found = backend.unsupported(case.needs, (8, 0))
            assert found == (
                [] if kind == case.attention_type else [f"attention type {case.attention_type}, only {kind}"]
            )
    needs = SMALL["state"].needs
    assert TritonStateSpaceBackend.unsupported(needs, (7, 5)) == ["compute capability 7.5, only 8.0 and later"]
