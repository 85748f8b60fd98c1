"""Decode attention against a float64 oracle: every feature, shape and schedule, with NaN wherever nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from pelton_covering import in_turn

from pelton.attention.interface import KVLayout
from pelton.kv_cache.spec import FullAttentionSpec
from pelton.ops.interface import NormSpec, QkNormRopeWriteKvNeeds, QkNormRopeWriteKvTensors
from pelton.testing.paged_rows import page_views
from pelton_backends.reference.ops import ReferenceQkNormRopeWriteKv
from pelton_backends.triton.attention import decode_shares
from pelton_backends.triton.attention.decode import NewTokens, NormRope, decode_attention
from pelton_backends.triton.attention.decode_shares import (
    LaunchShape,
    PartBuffers,
    cuts_of,
    deal_rows,
    launch_shape,
    row_bytes,
)
from pelton_backends.triton.ops.embed import embed
from pelton_backends.triton.runtime import (
    INTERPRETED,
    has_pdl,
    launch_options,
    let_next_start,
    num_sms,
    wait_for_inputs,
)

TOLERANCES = {"float32": 2e-5, "float16": 3e-3, "bfloat16": 2e-2}
"""Absolute and relative, against float64 on the rounded inputs; fused, the query is rounded at another place too."""
if INTERPRETED:
    TOLERANCES["bfloat16"] = 6e-2  # its casts to bfloat16 truncate
KV_TORCH = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "bfloat16": torch.bfloat16}

DIRECT = LaunchShape(splits=3, programs=0, keys=32, num_stages=2)
EARLY = LaunchShape(splits=2, programs=0, keys=16, num_stages=2, least=2, is_early=True)
DEALT = LaunchShape(splits=23, programs=0, keys=16, num_stages=2, is_dealt=True)
DEALT_EARLY = LaunchShape(splits=11, programs=0, keys=16, num_stages=2, is_early=True, is_dealt=True)
STREAMED = LaunchShape(splits=0, programs=7, keys=16, num_stages=2)


@dataclass(frozen=True, kw_only=True)
class Case:
    lengths: tuple[int, ...] = (1, 16, 17, 0, 90)  # 0: padding
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: str = "float32"
    kv_dtype: str = "auto"
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    heads_first: bool = True
    rotary_dim: int = 64
    norms: bool = True
    unit_offset: bool = False
    junk: float = float("nan")


class Step:
    """Caches whose every number outside the rows' keys is junk, permuted tables, strided inputs, poisoned outputs."""

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        self.case, self.device = case, device
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = getattr(torch, case.dtype)
        self.kv_dtype = KV_TORCH.get(case.kv_dtype, self.dtype)
        self.scale = case.head_dim**-0.5
        rows, heads, size = len(case.lengths), case.num_heads, case.block_size
        counts = [-(-length // size) for length in case.lengths]
        self.width = max(counts) + 2
        num_blocks = sum(counts) + 3
        ids = (torch.randperm(num_blocks - 1, generator=self.generator) + 1).tolist()
        table = torch.zeros(rows, self.width, dtype=torch.int32)
        for row, count in enumerate(counts):
            table[row, :count] = torch.tensor(ids[:count])
            ids = ids[count:]
        self.table = table
        spec = FullAttentionSpec(
            block_size=size,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            dtype=case.dtype if case.kv_dtype == "auto" else case.kv_dtype,
        )
        memory = torch.zeros(num_blocks * spec.page_size_bytes, dtype=torch.uint8)
        layout = KVLayout(heads_first=case.heads_first)
        self.caches = page_views(memory, num_blocks, spec, layout)
        wide = [torch.full(cache.shape, case.junk) for cache in self.caches]
        for row, length in enumerate(case.lengths):
            blocks, offsets = self.places(row)
            for cache in wide:
                cache[blocks, offsets] = self.random(length, case.num_kv_heads, case.head_dim).float()
                passed = max(length - (case.window or length), 0)  # tokens that the window has left behind
                cache[blocks[:passed], offsets[:passed]] = case.junk
        for cache, values in zip(self.caches, wide, strict=True):
            cache.copy_(values.to(self.kv_dtype))
        on_device = page_views(memory.clone().to(device), num_blocks, spec, layout)
        self.k_cache, self.v_cache = on_device
        self.sinks = self.random(heads) if case.sinks else None
        self.slopes = (self.random(heads).abs() * 0.1).float() if case.alibi else None
        self.output = torch.full((rows, heads, case.head_dim), float("nan"), dtype=self.dtype, device=device)
        self.parts = PartBuffers.allocate(
            device, max_rows=rows, num_heads=heads, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim
        )
        self.parts.sums.fill_(float("nan"))
        self.parts.stats.fill_(float("nan"))

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def places(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        token = torch.arange(self.case.lengths[row])
        return self.table[row][token // self.case.block_size].long(), token % self.case.block_size

    def run(self, query: torch.Tensor, shape: LaunchShape | None, new: NewTokens | None = None, **options: Any) -> None:
        case, rows = self.case, len(self.case.lengths)
        lengths, table = torch.tensor(case.lengths, dtype=torch.int32, device=self.device), self.table.to(self.device)
        if shape is None and new is not None and self.device.type == "cuda":  # as an engine launches it
            shape = launch_shape(
                rows, case.num_kv_heads, case.num_heads // case.num_kv_heads, max(case.lengths),
                row_bytes(case.head_dim, self.dtype), num_sms(self.device),
            )  # fmt: skip
            if shape.is_dealt:
                deal_rows(
                    lengths, table, self.parts, shape, num_rows=rows, block_size=case.block_size,
                    sliding_window=case.window,
                )  # fmt: skip
            torch.cuda.synchronize()
            options["is_settled"] = True
        decode_attention(
            query, self.k_cache, self.v_cache, self.output, lengths, table, self.parts, num_rows=rows,
            max_seq_len=max(case.lengths), scale=self.scale, sliding_window=case.window, soft_cap=case.soft_cap,
            sinks=None if self.sinks is None else self.sinks.to(self.device),
            alibi_slopes=None if self.slopes is None else self.slopes.to(self.device), new=new,
            pdl=has_pdl(self.device), shape=shape, **options,
        )  # fmt: skip
        assert not self.parts.arrivals.any(), "counters are left at zero for the next launch"

    def expected(self, query: torch.Tensor) -> torch.Tensor:
        """float64, from the caches on the CPU; query [R, H, D] -> [R, H, D], NaN for rows of padding."""
        case = self.case
        group = case.num_heads // case.num_kv_heads
        result = torch.full(query.shape, float("nan"), dtype=torch.float64)
        for row, length in enumerate(case.lengths):
            if length == 0:
                continue
            first = 0 if case.window is None else max(length - case.window, 0)
            blocks, offsets = self.places(row)
            keys, values = (
                cache.float()[blocks, offsets][first:].double().repeat_interleave(group, 1) for cache in self.caches
            )
            logits = torch.einsum("hd,lhd->hl", query[row].double(), keys) * self.scale
            if case.soft_cap is not None:
                logits = case.soft_cap * torch.tanh(logits / case.soft_cap)
            if self.slopes is not None:
                logits += self.slopes.double()[:, None] * (torch.arange(first, length) - (length - 1))
            if self.sinks is not None:
                logits = torch.cat([logits, self.sinks.double()[:, None]], 1)
            weights = logits.softmax(1)[:, : length - first]
            result[row] = torch.einsum("hl,lhd->hd", weights, values)
        return result

    def check(self, query: torch.Tensor) -> None:
        tolerance = TOLERANCES[self.case.dtype]
        want = self.expected(query)
        torch.testing.assert_close(
            self.output.double().cpu(),
            want,
            atol=tolerance,
            rtol=tolerance,
            equal_nan=True,
            msg=lambda m: f"{self.case}: {m}",
        )


def check_decode(
    case: Case, device: torch.device, shape: LaunchShape | None, *, seed: int = 0, repeats: int = 1
) -> None:
    """From a strided query, with everything in the cache."""
    step = Step(case, device, seed)
    wide = step.random(len(case.lengths), case.num_heads + 1, case.head_dim)
    query = wide[:, : case.num_heads]
    for _ in range(repeats):
        step.output.fill_(float("nan"))
        step.run(wide.to(device)[:, : case.num_heads], shape)
        step.check(query)


def check_fused(
    case: Case, device: torch.device, shape: LaunchShape | None, *, seed: int = 0, skipped: tuple[int, ...] = ()
) -> None:
    """From QKV's rows: the reference seam writes the CPU's cache, whose content the oracle then attends to.

    skipped: rows with slot -1, which attend to their new token although the cache does not get it.
    """
    step = Step(case, device, seed)
    rows, heads, kv_heads, dim = len(case.lengths), case.num_heads, case.num_kv_heads, case.head_dim
    qkv = step.random(rows, (heads + 2 * kv_heads) * dim + 8)[:, :-8]
    if INTERPRETED and case.kv_dtype != "auto":  # its casts to narrow types truncate, and lose carries
        qkv = qkv.to(step.kv_dtype).to(step.dtype)
    spec = NormSpec(size=dim, eps=1e-6, unit_offset=case.unit_offset) if case.norms else None
    norms = [step.random(dim) if case.norms else None for _ in range(2)]
    longest = max(case.lengths) + 1
    angles = torch.randn(longest, max(case.rotary_dim, 2) // 2, generator=step.generator)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1) if case.rotary_dim else None
    positions = torch.tensor([max(length - 1, 0) for length in case.lengths])
    slots = torch.full((rows,), -1)
    for row, length in enumerate(case.lengths):
        if length:
            blocks, offsets = step.places(row)
            slots[row] = blocks[-1] * case.block_size + offsets[-1]
            for cache in (step.k_cache, step.v_cache):  # its last key is still to be written
                cache[blocks[-1], offsets[-1]] = torch.full((), float("nan"), device=device).to(cache.dtype)
    needs = QkNormRopeWriteKvNeeds(
        dtype=case.dtype, kv_dtype=case.dtype, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        rotary_dim=case.rotary_dim, q_norm=spec, k_norm=spec,
    )  # fmt: skip
    seam = ReferenceQkNormRopeWriteKv.bind(needs, QkNormRopeWriteKvTensors(cos_sin, *norms))
    plain = [torch.zeros(rows, 1, kv_heads, dim, dtype=step.dtype) for _ in range(2)]
    query = seam(qkv.clone(), positions, torch.arange(rows), *plain)
    before = [cache.float().nan_to_num(7.0) for cache in (step.k_cache.cpu(), step.v_cache.cpu())]
    for row in range(rows):
        if slots[row] >= 0:
            block, offset = slots[row] // case.block_size, slots[row] % case.block_size
            for cache, new in zip(step.caches, plain, strict=True):
                cache[block, offset] = new[row, 0].to(cache.dtype)
    slots[list(skipped)] = -1
    new = NewTokens(
        positions.to(device), slots.to(device),
        NormRope(
            case.rotary_dim, None if cos_sin is None else cos_sin.to(device),
            *[None if norm is None else norm.to(device) for norm in norms], spec,
        ),
    )  # fmt: skip
    wide = torch.empty(rows, qkv.shape[1] + 8, dtype=step.dtype, device=device)
    wide[:, :-8] = qkv.to(device)
    step.run(wide[:, :-8], shape, new)
    step.check(query)
    tolerance = TOLERANCES[case.dtype] if case.kv_dtype == "auto" else 0.13  # one step of e4m3, two of e5m2
    if case.kv_dtype == "fp8_e5m2":
        tolerance = 0.26
    for got, want, was in zip((step.k_cache, step.v_cache), step.caches, before, strict=True):
        got, want = got.float().cpu().nan_to_num(7.0), want.float().nan_to_num(7.0)
        for row in range(rows):
            if case.lengths[row]:
                block, offset = (index[-1] for index in step.places(row))
                if row not in skipped:
                    torch.testing.assert_close(got[block, offset], want[block, offset], atol=tolerance, rtol=tolerance)
                    got[block, offset] = was[block, offset]
        assert torch.equal(got, was), "the cache changed elsewhere"


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 43},  # of 90 keys the last of a chunk is the first one
    "window-of-one": {"window": 1},
    "window-of-a-chunk": {"window": 32, "block_size": 32},
    "soft-cap": {"soft_cap": 2.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "all": {"window": 50, "soft_cap": 3.0, "sinks": True, "alibi": True},
    "heads-last": {"heads_first": False},
    "blocks-of-48": {"block_size": 48},
    "blocks-of-64": {"block_size": 64},
    "heads-of-80": {"head_dim": 80, "rotary_dim": 40},
    "heads-of-128": {"head_dim": 128, "rotary_dim": 128, "lengths": (33, 70)},
    "multi-head": {"num_heads": 2},
    "groups-of-4": {"num_heads": 4, "num_kv_heads": 1},
    "groups-of-7": {"num_heads": 7, "num_kv_heads": 1},
    "groups-of-8": {"num_heads": 8, "num_kv_heads": 1, "norms": False},
    "float16": {"dtype": "float16", "sinks": True},
    "bfloat16": {"dtype": "bfloat16", "unit_offset": True},
    "bfloat16-in-float16": {"dtype": "float16", "kv_dtype": "bfloat16", "rotary_dim": 0, "norms": False},
    "fp8-e4m3": {"dtype": "float16", "kv_dtype": "fp8_e4m3", "rotary_dim": 0, "norms": False},
    "fp8-e5m2": {"dtype": "float16", "kv_dtype": "fp8_e5m2", "rotary_dim": 0, "norms": False},
}
SCHEDULES = {"direct": DIRECT, "early": EARLY, "dealt": DEALT, "dealt-early": DEALT_EARLY, "streamed": STREAMED}
"""Every feature fused, with first chunks loaded early and with even shares; the rest where the paths differ."""
PLAIN = ("plain", "all", "window-of-one", "heads-of-80", "groups-of-7", "bfloat16", "fp8-e4m3", "fp8-e5m2")
UNFUSED = [(f, "direct") for f in PLAIN] + [(f, s) for f in ("plain", "all", "window") for s in ("dealt", "streamed")]
FUSED = [(f, schedule) for f in PLAIN for schedule in ("early", "streamed")]
FUSED += in_turn([f for f in FEATURES if f not in PLAIN], ("early", "streamed"))
FUSED += [(f, schedule) for f in PLAIN[:4] for schedule in ("direct", "dealt-early")]


@pytest.mark.parametrize("schedule, cuts", in_turn(SCHEDULES, (2, 4)))
def test_heads_of_large_groups_are_cut(
    device: torch.device, schedule: str, cuts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of one kv head share its query heads: each has its own of all that heads have, and one of them writes the new key."""
    monkeypatch.setattr(decode_shares, "TILE_BYTES", 1024 // cuts)
    assert decode_shares.cuts_of(8, 64) == cuts
    case = Case(num_heads=16, num_kv_heads=2, head_dim=16, rotary_dim=16, sinks=True, alibi=True, window=50)
    check_fused(case, device, SCHEDULES[schedule])
    if schedule in ("direct", "streamed"):
        check_decode(case, device, SCHEDULES[schedule], repeats=2)


@pytest.mark.parametrize(("feature", "schedule"), UNFUSED)
def test_decode_equals_the_oracle(device: torch.device, feature: str, schedule: str) -> None:
    check_decode(Case(**FEATURES[feature]), device, SCHEDULES[schedule])


@pytest.mark.parametrize(("feature", "schedule"), FUSED)
def test_fused_decode_equals_the_reference_seam_and_the_oracle(
    device: torch.device, feature: str, schedule: str
) -> None:
    check_fused(Case(**FEATURES[feature]), device, SCHEDULES[schedule])


@pytest.mark.parametrize("schedule, junk", in_turn(SCHEDULES, (float("inf"), 3e38)))
def test_no_junk_but_nan_matters_either(device: torch.device, junk: float, schedule: str) -> None:
    check_fused(Case(window=40, junk=junk), device, SCHEDULES[schedule])
    check_decode(Case(sinks=True, junk=-junk), device, SCHEDULES[schedule])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_slot_of_minus_one_leaves_the_cache_and_the_token_attends_to_itself(
    device: torch.device, schedule: str
) -> None:
    check_fused(Case(), device, SCHEDULES[schedule], skipped=(1, 4))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_what_8_bits_cannot_hold_becomes_their_largest(device: torch.device, kv_dtype: str, schedule: str) -> None:
    case = Case(lengths=(1, 33), num_heads=2, num_kv_heads=1, head_dim=16, kv_dtype=kv_dtype)
    step = Step(case, device)
    qkv = torch.tensor([0.0, 0.0, 1e6, -1e6]).repeat_interleave(case.head_dim).repeat(len(case.lengths), 1)
    last = [tuple(index[-1] for index in step.places(row)) for row in range(len(case.lengths))]
    slots = torch.tensor([block * case.block_size + offset for block, offset in last])
    positions = torch.tensor(case.lengths) - 1
    new = NewTokens(positions.to(device), slots.to(device), NormRope(0))
    step.run(qkv.to(device), SCHEDULES[schedule], new)
    largest = torch.finfo(KV_TORCH[kv_dtype]).max
    for place in last:
        assert (step.k_cache.float().cpu()[place] == largest).all()
        assert (step.v_cache.float().cpu()[place] == -largest).all()
    assert (step.output[0] == -largest).all(), "the row's own value is the cache's"


MANY_PARTS = {
    "direct": LaunchShape(40, 0, 16, 2),
    "dealt": LaunchShape(45, 0, 16, 2, is_dealt=True),
    "streamed": LaunchShape(0, 90, 16, 2),
}


@pytest.mark.parametrize("schedule, sinks", in_turn(MANY_PARTS, (True, False)))
def test_many_parts_are_merged_by_several_programs(device: torch.device, schedule: str, sinks: bool) -> None:
    case = Case(lengths=(640, 0, 17), num_heads=2, num_kv_heads=1, head_dim=16, sinks=sinks)
    check_decode(case, device, MANY_PARTS[schedule], repeats=2)


@pytest.mark.parametrize("lengths", [(700, 20, 1, 0, 90), (33, 33, 33), (1, 1, 1, 1, 1, 1, 1), (0, 0), (900, 1)])
@pytest.mark.parametrize("splits", [9, 16, 40])
def test_rows_are_dealt_out_by_their_lengths(device: torch.device, lengths: tuple[int, ...], splits: int) -> None:
    """Every row has programs that no other has, none has more than it has chunks, and their loads are even."""
    rows, keys = len(lengths), 16
    shape = LaunchShape(splits, 0, keys, 2, is_dealt=True)
    parts = PartBuffers.allocate(device, max_rows=rows, num_heads=1, num_kv_heads=1, head_dim=16)
    table = torch.arange(rows * 64, dtype=torch.int32, device=device).view(rows, 64)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    deal_rows(seq_lens, table, parts, shape, num_rows=rows, block_size=16)
    shares = parts.shares[:splits].tolist()
    held: dict[int, list[int]] = {}
    for program, (row, length, first, count, block, *_) in enumerate(shares):
        if program - first < count:
            held.setdefault(row, []).append(program)
            assert length == lengths[row] and (length == 1 or block == row * 64 + program - first)
    chunks = {row: max(-(-(length - 1) // keys), 1) for row, length in enumerate(lengths) if length}
    assert held.keys() == chunks.keys()
    for row, programs in held.items():
        first, count = shares[programs[0]][2:4]
        assert programs == list(range(first, first + count)) and count <= chunks[row]
    most = max((-(-chunks[row] // len(programs)) for row, programs in held.items()), default=0)
    assert most <= -(-sum(chunks.values()) // (splits - triton.next_power_of_2(rows))), (
        "no program has much more than another"
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_launch_after_another_finds_its_counters_ready(device: torch.device, schedule: str) -> None:
    check_decode(Case(lengths=(90, 70)), device, SCHEDULES[schedule], repeats=2)


@pytest.mark.parametrize("schedule", ["direct", "dealt", "streamed"])
def test_rows_with_another_number_of_tokens_are_left_out(device: torch.device, schedule: str) -> None:
    """Row 1 has two tokens: its output stays as it is, and the rows after it find their own."""
    case = Case(lengths=(40, 33, 50, 0))
    step = Step(case, device)
    starts = torch.tensor([0, 1, 3, 4, 4], dtype=torch.int32)
    query = step.random(4, case.num_heads, case.head_dim)
    step.run(query.to(device), SCHEDULES[schedule], query_start_loc=starts.to(device))
    want = step.expected(query[[0, 1, 3, 0]])
    tolerance = TOLERANCES[case.dtype]
    output = step.output.double().cpu()
    torch.testing.assert_close(output[[0, 3]], want[[0, 2]], atol=tolerance, rtol=tolerance)
    assert output[1:3].isnan().all(), "tokens of another kernel's row were written"


def test_launch_shapes_fit_the_buffers_and_the_work() -> None:
    for rows in (1, 2, 3, 8, 16, 32, 33, 64, 100, 256, 1024):
        for kv_heads in (1, 2, 8, 32):
            shape = launch_shape(rows, kv_heads, 32 // kv_heads, 40960, 256, num_sms(torch.device("meta")))
            parts = PartBuffers.allocate(
                torch.device("meta"), max_rows=1024, num_heads=32, num_kv_heads=kv_heads, head_dim=128
            )
            if shape.splits != 1:
                pairs = (kv_heads if shape.is_dealt else rows * kv_heads) * cuts_of(32 // kv_heads, 256)
                assert parts.sums.shape[0] >= (pairs * shape.splits or 2 * shape.programs)
    assert launch_shape(1, 8, 2, 20, 256, 132).splits == 1, "no more programs than chunks"


# On the GPU: the shapes that count, with the schedule that a launch of theirs takes.

LARGE: dict[str, dict[str, Any]] = {
    "qwen-alone": {"lengths": (3000,)},
    "qwen-3": {"lengths": (700, 1, 64)},
    "qwen-20": {"lengths": tuple(range(1, 700, 35))},
    "qwen-40-one-long": {"lengths": (5000, 0, *range(3, 700, 18))},
    "qwen-300": {"lengths": tuple(1 + i * 37 % 330 for i in range(300))},
    "llama-12": {"num_heads": 32, "lengths": tuple(range(5, 1300, 110)), "norms": False},
    "llama-90": {"num_heads": 32, "lengths": tuple(1 + i * 97 % 700 for i in range(90)), "norms": False},
    "qwen-16000": {"lengths": (16_000,)},
    "qwen-16000-among-short": {"lengths": (300, 0, 16_000, 1, 33)},
    "llama-16000": {"num_heads": 32, "lengths": (16_000,), "norms": False},
    "llama-8000-and-16000": {"num_heads": 32, "lengths": (8001, 15_999), "norms": False},
    "groups-of-8": {"num_heads": 16, "num_kv_heads": 2, "lengths": (900, 40)},
    "groups-of-7-heads-of-80": {
        "num_heads": 14,
        "num_kv_heads": 2,
        "head_dim": 80,
        "rotary_dim": 80,
        "lengths": (900, 17),
    },
    "heads-of-192": {"head_dim": 192, "lengths": (300, 33), "block_size": 32},
    "heads-of-256-float32": {
        "head_dim": 256,
        "rotary_dim": 256,
        "dtype": "float32",
        "lengths": (300, 33),
        "soft_cap": 30.0,
    },
    "fp8": {"kv_dtype": "fp8_e4m3", "norms": False, "rotary_dim": 0, "lengths": (800, 40, 1)},
    "fp8-40": {"kv_dtype": "fp8_e5m2", "norms": False, "rotary_dim": 0, "lengths": tuple(range(1, 800, 20))},
    "window-sinks-alibi": {"window": 100, "sinks": True, "alibi": True, "lengths": tuple(range(1, 900, 20))},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "plain"])
def test_large_shapes(device: torch.device, name: str, is_fused: bool) -> None:
    options = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "rotary_dim": 128, "dtype": "bfloat16"}
    case = Case(**(options | LARGE[name]))
    (check_fused if is_fused else check_decode)(case, device, None, seed=len(name))


@triton.jit
def write_late(zeros, new, target, count, SIZE: tl.constexpr, PDL: tl.constexpr):
    """Lets the next kernel start, takes about 100 us, then writes."""
    let_next_start(PDL)
    place = 0
    for _ in range(200):
        place = tl.load(zeros + place, volatile=True)
    wait_for_inputs(PDL)
    index = tl.arange(0, SIZE)
    tl.store(target + index, tl.load(new + index + place, mask=index < count), mask=index < count)


@triton.jit
def start_early(PDL: tl.constexpr):
    """Let the next kernel start, and wait."""
    let_next_start(PDL)
    wait_for_inputs(PDL)


@pytest.mark.gpu
@pytest.mark.parametrize("late", ["lengths", "tables"])
@pytest.mark.parametrize("is_dealt", [False, True], ids=["fixed", "dealt"])
def test_what_was_written_before_the_embedding_is_there_early(device: torch.device, late: str, is_dealt: bool) -> None:
    case = Case(lengths=(60, 130, 200), head_dim=128, rotary_dim=0, norms=False, dtype="bfloat16")
    step = Step(case, device)
    rows, width = len(case.lengths), case.num_heads + 2 * case.num_kv_heads
    qkv = step.random(rows, width * case.head_dim)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    tables = step.table.to(device)
    old_lengths, old_tables = lengths.flip(0).contiguous(), tables.flip(0).contiguous()
    new = NewTokens((lengths - 1).long(), torch.full((rows,), -1, device=device), NormRope(0))
    for row in range(rows):  # what the oracle finds in the cache
        blocks, offsets = step.places(row)
        for cache, first in zip(step.caches, (case.num_heads, case.num_heads + case.num_kv_heads), strict=True):
            heads = qkv[row].view(width, case.head_dim)[first : first + case.num_kv_heads]
            cache[blocks[-1], offsets[-1]] = heads
    zeros = torch.zeros(1, dtype=torch.int32, device=device)
    target, source = (old_lengths, lengths) if late == "lengths" else (old_tables, tables)
    seq_lens, table = (old_lengths, tables) if late == "lengths" else (lengths, old_tables)
    pdl, shape = has_pdl(device), LaunchShape(8, 0, 32, 2, is_early=True, is_dealt=is_dealt)
    on_device, ids, weight = (
        qkv.to(device),
        torch.zeros(rows, dtype=torch.int64, device=device),
        torch.ones(4, 64, device=device),
    )
    torch.cuda.synchronize()
    count = source.numel()
    write_late[(1,)](
        zeros, source, target, count, SIZE=triton.next_power_of_2(count), PDL=pdl, **launch_options(pdl)
    )  # fmt: skip
    if is_dealt:
        deal_rows(seq_lens, table, step.parts, shape, num_rows=rows, block_size=case.block_size, pdl=pdl)
    embed(ids, weight, None, pdl=pdl)
    for _ in range(2):
        start_early[(1,)](PDL=pdl, **launch_options(pdl))
    decode_attention(
        on_device, step.k_cache, step.v_cache, step.output, seq_lens, table, step.parts, num_rows=rows, max_seq_len=200,
        scale=step.scale, new=new, pdl=pdl, shape=shape, is_settled=True,
    )  # fmt: skip
    step.check(qkv.view(rows, width, case.head_dim)[:, : case.num_heads])
