"""Decode attention by as many programs as run at once: how rows are shared out, and, on Hopper, the kernel against a float64 oracle."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch

from pelton.attention.interface import KVLayout
from pelton.attention.metadata import BatchDescriptor
from pelton.kv_cache.spec import FullAttentionSpec
from pelton.ops.interface import NormSpec, QkNormRopeWriteKvNeeds, QkNormRopeWriteKvTensors
from pelton.testing.attention import AttentionCase, AttentionStep
from pelton.testing.paged_rows import page_views
from pelton_backends.reference.ops import ReferenceQkNormRopeWriteKv
from pelton_backends.triton import backend
from pelton_backends.triton.attention import decode_resident
from pelton_backends.triton.attention.decode import NewTokens, NormRope, decode_attention
from pelton_backends.triton.attention.decode_drafts import DraftParts, drafts_attention, drafts_shape
from pelton_backends.triton.attention.decode_resident import (
    ResidentDecode,
    ResidentParts,
    ResidentShape,
    deal_resident,
    resident_shape,
)
from pelton_backends.triton.attention.decode_shares import PartBuffers
from pelton_backends.triton.ops.pieces import is_hopper
from pelton_backends.triton.runtime import attention_starts_early, has_pdl

EVEN = (0, 0)  # shares, whatever the lengths
WHOLE = (10**6, 10**6)
PER_SM = {1: ResidentShape(0, 4, 1, 3), 2: ResidentShape(0, 1, 2, 3), 3: ResidentShape(0, 1, 1, 3)}


def deal(
    lengths: list[int], counts: list[int] | None, shape: ResidentShape, device: torch.device
) -> tuple[list[list[int]], torch.Tensor]:
    """Shares of rows whose blocks are numbered one after the other; counts: tokens of each row, None: one."""
    rows, width = len(lengths), max(-(-length // 16) for length in lengths) + 2
    table = torch.arange(rows * width, dtype=torch.int32, device=device).view(rows, width)
    starts = None
    if counts is not None:
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device)
    shares = torch.full((shape.programs, decode_resident.SHARE), -7, dtype=torch.int32, device=device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    deal_resident(seq_lens, table, shares, shape, num_rows=rows, query_start_loc=starts)
    return shares.tolist(), table


def parts_of_rows(shares: list[list[int]], keys: list[int], chunk: int) -> dict[int, list[tuple[int, ...]]]:
    """Walk through the shares as the kernel does: of each row its parts' first chunk, the one past the last, the program, the row's
    first program and how many it has."""
    parts: dict[int, list[tuple[int, ...]]] = {}
    for program, share in enumerate(shares):
        first_row, begin, last_row, end_chunk = share[:4]
        for row in range(first_row, last_row + 1):
            end = -(-max(keys[row], 0) // chunk)
            if row == last_row:
                end = min(end, end_chunk)
            first, count = share[4:6] if row == first_row else share[6:8]
            if row not in (first_row, last_row) or count == 1:
                first, count = program, 1
            if keys[row] >= 0:
                parts.setdefault(row, []).append((begin, end, program, first, count))
            begin = 0
    return parts


@pytest.mark.parametrize("seed", range(12))
def test_every_chunk_has_one_program_and_every_program_knows_its_neighbours(device: torch.device, seed: int) -> None:
    chooser = random.Random(seed)
    rows, shape = chooser.choice([1, 3, 17, 40]), chooser.choice(list(PER_SM.values()))
    shape = ResidentShape(chooser.choice([1, 3, 33, 66]), shape.warps, shape.pieces, 3)
    lengths = [chooser.choice([0, 5, 6, 16, 17, 33, 64, 65, 100, 300, 1000]) for _ in range(rows)]
    lengths[chooser.randrange(rows)] = chooser.choice([50, 4000])
    counts = [min(length, chooser.choice([1, 2, 4])) for length in lengths] if seed % 2 else None
    uneven, short = chooser.choice([EVEN, WHOLE, (4, 512)])
    shape = replace(shape, uneven=uneven, short=short)
    shares, table = deal(lengths, counts, shape, device)
    keys = [length - (counts[row] if counts else 1) if length else -1 for row, length in enumerate(lengths)]
    parts = parts_of_rows(shares, keys, shape.chunk)
    assert parts.keys() == {row for row, length in enumerate(lengths) if length}
    for row, found in parts.items():
        assert (found[0][0], found[-1][1]) == (0, -(-keys[row] // shape.chunk))
        for before, after in pairwise(found):
            assert (after[0], after[2]) == (before[1], before[2] + 1)
        assert all((first, count) == (found[0][2], len(found)) for *_, first, count in found)
        assert len(found) == 1 or all(begin < end for begin, end, *_ in found), "a part has chunks"
        assert len(found) == 1 or (uneven, short) != WHOLE or rows > shape.programs
    for share in shares:
        if share[2] >= share[0]:
            assert share[8] == keys[share[0]]
            first = share[1] * (shape.chunk // 16)
            blocks = table[share[0], first : -(-share[8] // 16)].tolist()[:16]
            assert share[16 : 16 + len(blocks)] == blocks
    loads = [0] * shape.programs
    for found in parts.values():
        for begin, end, program, *_ in found:
            loads[program] += end - begin + 1
    if (uneven, short) == EVEN:
        assert max(loads) <= -(-sum(loads) // shape.programs) + 1


def test_one_long_row_among_short_ones_is_shared_out(device: torch.device) -> None:
    shape = ResidentShape(66, 1, 2, 3)
    even, _ = deal([250] * 60, None, shape, device)
    assert [share[0] for share in even[:60]] == [*range(60)] and all(share[2] < share[0] for share in even[60:])
    uneven, _ = deal([250] * 30 + [9000] + [250] * 29, None, shape, device)
    assert sum(share[0] <= 30 <= share[2] for share in uneven) > 20


def test_programs_run_at_once_and_have_all_rows() -> None:
    for rows, kv_heads, (group, num_tokens) in product(
        range(1, 300), (1, 2, 4, 8, 32), ((4, 1), (16, 1), (2, 4), (4, 4))
    ):
        shape = resident_shape(rows, kv_heads, group, num_tokens, 132)
        if shape is None:
            continue
        assert rows <= shape.programs or (shape.buffers == 2 and shape.is_ahead == (num_tokens == 1 and group <= 8))
        copied, sums = shape.buffers * shape.chunk * 2 * 256, 4096 if group * num_tokens <= 8 else 8192
        each = -(-shape.programs * kv_heads // 132)
        assert each * (copied + sums * shape.warps + 1280) <= 228 * 1024, (
            "the warps' sums, barriers, and what each program costs"
        )
        assert shape.chunk // 16 <= 16, "a share has the blocks of its first chunk"
    chosen = {
        (rows, kv_heads): resident_shape(rows, kv_heads, 2, 1, 132)
        for rows in (16, 32, 64, 128, 256)
        for kv_heads in (4, 8)
    }
    assert [key for key, shape in chosen.items() if not shape] == [(16, 4)]
    shared = {key: shape.programs for key, shape in chosen.items() if shape and shape.is_ahead}
    assert shared == {(64, 8): 33, (128, 8): 33, (256, 4): 66, (256, 8): 33}, (
        "two programs a multiprocessor have all rows"
    )
    assert chosen[16, 8] == ResidentShape(16, 4, 2, 3, uneven=2, short=256) and resident_shape(11, 8, 2, 1, 132) is None
    assert resident_shape(8, 8, 2, 4, 132) == resident_shape(16, 8, 2, 4, 132) == chosen[16, 8]
    assert resident_shape(7, 8, 2, 4, 132) is None, "drafts of few rows have a kernel of their own"
    assert resident_shape(16, 8, 4, 4, 132) is None, "and those of groups of 4"
    drafted = resident_shape(32, 8, 2, 4, 132)
    assert drafted is not None and drafted == chosen[32, 8] and drafted.buffers == 2, "three drafts a row"
    assert resident_shape(32, 8, 4, 4, 132) == resident_shape(32, 8, 2, 6, 132) == drafted, "two tiles of columns"
    assert resident_shape(32, 8, 4, 5, 132) is None, "more columns than two tiles have"
    assert resident_shape(128, 4, 2, 4, 132) == ResidentShape(66, 4, 1, 2), "many rows with drafts"
    assert resident_shape(32, 8, 16, 1, 132) == chosen[32, 8] and resident_shape(32, 8, 17, 1, 132) is None, (
        "groups of up to 16"
    )
    assert (
        resident_shape(200, 2, 12, 1, 132) == ResidentShape(132, 4, 1, 2) and resident_shape(64, 2, 12, 1, 132) is None
    )


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_the_backend_gives_it_steps_of_rows_that_decode(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """Off Hopper its place is taken by the kernels that other devices have, which are told the same."""
    shapes: list[ResidentShape] = []

    def attend(
        self: ResidentDecode, query, output, positions, slots, starts, lengths, table, shape: ResidentShape
    ) -> None:
        shapes.append(shape)
        found, again = self._shares[: shape.programs], torch.zeros_like(self._shares)
        deal_resident(lengths, table, again, shape, num_rows=len(lengths), query_start_loc=starts)
        assert torch.equal(found, again[: shape.programs]), "this step's rows have been dealt out"
        caches, new = self._caches, NewTokens(positions, slots, NormRope(0))
        sizes = {"max_rows": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128}
        if starts is None:
            parts = PartBuffers.allocate(device, **sizes)
            decode_attention(
                query,
                *caches,
                output,
                lengths,
                table,
                parts,
                num_rows=len(lengths),
                max_seq_len=64,
                scale=self._scale,
                new=new,
            )
            return
        other = drafts_shape(300, 2, 2, num_tokens, 64, 256, 8)  # as for many rows: nothing is dealt out
        drafts_attention(
            query, *caches, output, starts, lengths, table, DraftParts.allocate(device, **sizes, num_tokens=num_tokens), other,
            num_rows=len(lengths), num_tokens=num_tokens, scale=self._scale, new=new,
        )  # fmt: skip

    monkeypatch.setattr(decode_resident, "_FEWEST", 1)
    monkeypatch.setattr(decode_resident, "_FEWEST_WITH_DRAFTS", 1)
    if not is_hopper(device):
        monkeypatch.setattr(backend, "is_hopper", lambda device: True)
        monkeypatch.setattr(ResidentDecode, "__call__", attend)
    rows = tuple((num_tokens, before) for before in (20, 0, 33))
    step = AttentionStep(backend.TritonBackend, AttentionCase(rows=rows, dtype="bfloat16", head_dim=128), str(device))
    step.write(only_context=True)
    key = BatchDescriptor(step.num_tokens, len(rows), num_tokens)
    keys, values = (torch.cat([x[-num_tokens:] for x in own]) for own in (step.keys, step.values))
    qkv = torch.cat([x.flatten(1) for x in (step.query, keys, values)], 1)
    metadata, output = step.backend.build(step.common, key), torch.full_like(step.query, float("nan"))
    assert metadata.resident_shape is not None and attention_starts_early.get()
    positions = torch.zeros(len(qkv), dtype=torch.int64, device=device)
    step.layer.attend.write_and_attend(qkv, positions, step.common.slot_mapping, metadata, output)
    assert shapes == ([] if is_hopper(device) else [metadata.resident_shape])
    torch.testing.assert_close(output.double().cpu(), step.expected(), atol=6e-2, rtol=6e-2)
    kept = step.layer.k_cache.clone()
    step.write()
    assert torch.equal(kept.nan_to_num(9.0), step.layer.k_cache.nan_to_num(9.0))
    step.layer.attend(
        step.query, metadata, output.fill_(float("nan"))
    )  # queries that are made already have other kernels
    torch.testing.assert_close(output.double().cpu(), step.expected(), atol=6e-2, rtol=6e-2)
    step.backend.build(step.common, BatchDescriptor(step.num_tokens, len(rows), 0))
    assert not attention_starts_early.get(), "rows of any kind"


@dataclass(frozen=True, kw_only=True)
class Case:
    num_heads: int = 16
    num_kv_heads: int = 4
    norms: bool = False
    unit_offset: bool = False
    rotary_dim: int = 128
    dtype: str = "bfloat16"
    lengths: tuple[int, ...] = (1, 16, 17, 0, 90, 0, 32, 33, 300, 640)
    counts: tuple[int, ...] | None = None  # tokens of each row
    shape: ResidentShape = field(default_factory=lambda: ResidentShape(132, 1, 2, 3))
    how: tuple[int, int] = (4, 512)
    skipped: tuple[int, ...] = ()  # rows whose new entries the cache does not get


MANY_LENGTHS = tuple(17 * i * i % 397 if i % 11 else 0 for i in range(1, 150))

CASES = {
    "a-program-a-row": Case(how=WHOLE),
    "even-shares": Case(how=EVEN, shape=ResidentShape(24, 1, 2, 3)),
    "few-programs": Case(how=EVEN, num_kv_heads=8, norms=True, shape=ResidentShape(3, 1, 1, 3)),
    "two-warps": Case(how=EVEN, num_kv_heads=8, norms=True, shape=ResidentShape(33, 2, 2, 3), lengths=(70, 0, 3000, 5)),
    "a-hundred-parts": Case(how=EVEN, num_heads=32, norms=True, shape=ResidentShape(120, 1, 2, 3), lengths=(10, 3300, 0, 40)),
    "as-it-chooses": Case(num_kv_heads=8, norms=True, shape=ResidentShape(66, 1, 2, 3), lengths=(60, 5000, 33, 250)),
    "groups-of-8": Case(num_heads=32, norms=True, shape=ResidentShape(132, 1, 1, 3)),
    "multi-head": Case(num_heads=4),
    "part-rotated": Case(num_kv_heads=8, norms=True, unit_offset=True, rotary_dim=64, shape=ResidentShape(66, 1, 2, 3)),
    "float16-not-rotated": Case(dtype="float16", rotary_dim=0),
    "skipped": Case(norms=True, skipped=(1, 4)),
    "four-warps": Case(how=EVEN, num_kv_heads=8, norms=True, shape=ResidentShape(33, 4, 1, 3), lengths=(70, 0, 3000, 5, 1, 64)),
    "large-chunks": Case(how=EVEN, num_kv_heads=8, shape=ResidentShape(16, 4, 2, 3), lengths=(70, 0, 3000, 5, 1, 128, 129)),
    "large-chunks-whole": Case(how=WHOLE, num_kv_heads=8, norms=True, shape=ResidentShape(16, 4, 2, 3)),
    "four-warps-whole": Case(how=WHOLE, num_kv_heads=8, norms=True, shape=ResidentShape(33, 4, 1, 3)),
    "many-rows": Case(
        how=EVEN, num_kv_heads=8, norms=True, shape=ResidentShape(33, 4, 1, 2, is_ahead=True), lengths=MANY_LENGTHS,
    ),
    "many-rows-of-few-programs": Case(
        how=EVEN, num_heads=32, norms=True, unit_offset=True, shape=ResidentShape(5, 4, 1, 2, is_ahead=True), lengths=MANY_LENGTHS,
        skipped=(1, 4),
    ),
    "many-rows-not-rotated": Case(
        dtype="float16", rotary_dim=0, shape=ResidentShape(7, 1, 2, 3, is_ahead=True), lengths=MANY_LENGTHS,
    ),
    "many-rows-of-groups-of-16": Case(
        how=EVEN, num_heads=32, num_kv_heads=2, norms=True, shape=ResidentShape(9, 4, 1, 2), lengths=MANY_LENGTHS,
    ),
    "drafts": Case(num_kv_heads=8, norms=True, lengths=(30, 4, 33, 0, 90), counts=(4, 1, 2, 0, 4), shape=ResidentShape(33, 2, 2, 3)),
    "drafts-of-four-warps": Case(
        num_kv_heads=8, norms=True, lengths=(30, 4, 333, 0, 90, 260), counts=(4, 1, 2, 0, 4, 4), shape=ResidentShape(33, 4, 1, 3),
    ),
    "drafts-of-four-warps-even": Case(
        num_kv_heads=8, norms=True, lengths=(30, 4, 1033, 0, 90), counts=(4, 1, 2, 0, 4), shape=ResidentShape(33, 4, 1, 3), how=EVEN,
    ),
    "drafts-of-two-chunks": Case(
        num_kv_heads=8, norms=True, lengths=(30, 4, 1033, 0, 90, 260), counts=(4, 1, 2, 0, 4, 4), how=EVEN,
        shape=ResidentShape(33, 4, 1, 2),
    ),
    "drafts-of-groups-of-4": Case(
        num_heads=32, num_kv_heads=8, lengths=(30, 4, 333, 0, 90, 260, 64, 68), counts=(4, 1, 2, 0, 4, 4, 3, 4), how=WHOLE,
        shape=ResidentShape(33, 4, 1, 2),
    ),
    "drafts-of-groups-of-4-even": Case(
        num_heads=32, num_kv_heads=8, norms=True, lengths=(30, 4, 1033, 0, 90, 260), counts=(4, 1, 2, 0, 4, 4), how=EVEN,
        shape=ResidentShape(33, 4, 1, 2),
    ),
    "drafts-of-many-rows": Case(
        how=EVEN, num_kv_heads=8, norms=True, shape=ResidentShape(5, 4, 1, 2), lengths=MANY_LENGTHS,
        counts=tuple(min(length, 1 + row % 4) for row, length in enumerate(MANY_LENGTHS)),
    ),
    "drafts-of-large-chunks": Case(
        num_kv_heads=8, norms=True, lengths=(30, 4, 1033, 0, 90, 260, 132), counts=(4, 1, 2, 0, 4, 4, 4), how=EVEN,
        shape=ResidentShape(16, 4, 2, 3),
    ),
    "drafts-of-groups-of-4-large-chunks": Case(
        num_heads=32, num_kv_heads=8, lengths=(30, 4, 333, 0, 90, 260, 132), counts=(4, 1, 2, 0, 4, 4, 4), how=WHOLE,
        shape=ResidentShape(16, 4, 2, 3),
    ),
    "five-drafts": Case(
        num_kv_heads=8, norms=True, lengths=(30, 6, 1033, 0, 90, 260), counts=(6, 1, 2, 0, 4, 6), how=EVEN,
        shape=ResidentShape(33, 4, 1, 2),
    ),
    "drafts-even": Case(
        num_kv_heads=8, norms=True, lengths=(30, 4, 1033, 0, 90), counts=(4, 1, 2, 0, 4), shape=ResidentShape(33, 2, 2, 3), how=EVEN,
    ),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_attention_equals_the_oracle(device: torch.device, name: str) -> None:
    """NaN wherever nothing may be read; two launches, so that counters are found as they were."""
    if not is_hopper(device):
        pytest.skip("only on Hopper")
    case = CASES[name]
    shape = replace(case.shape, uneven=case.how[0], short=case.how[1])
    heads, kv_heads, generator = case.num_heads, case.num_kv_heads, torch.Generator().manual_seed(1)
    dtype, rows = getattr(torch, case.dtype), len(case.lengths)
    counts = list(case.counts or [1] * rows)
    num_blocks = [-(-length // 16) for length in case.lengths]
    table = torch.zeros(rows, max(num_blocks) + 2, dtype=torch.int32)
    ids = (torch.randperm(sum(num_blocks) + 2, generator=generator) + 1).tolist()
    for row, count in enumerate(num_blocks):
        table[row, :count], ids = torch.tensor(ids[:count]), ids[count:]
    spec = FullAttentionSpec(block_size=16, num_kv_heads=kv_heads, head_dim=128, dtype=case.dtype)
    memory = torch.zeros((sum(num_blocks) + 3) * spec.page_size_bytes, dtype=torch.uint8)
    caches = page_views(memory, sum(num_blocks) + 3, spec, KVLayout(heads_first=True))
    for cache in caches:
        cache.fill_(float("nan"))
    row_of = [row for row, count in enumerate(counts) for _ in range(count)]
    positions = torch.tensor(
        [max(case.lengths[row] - counts[row] + index, 0) for row in range(rows) for index in range(counts[row])]
    )
    slots = table[row_of, positions // 16].long() * 16 + positions % 16
    slots[[row in case.skipped or not case.lengths[row] for row in row_of]] = -1
    for row, length in enumerate(case.lengths):
        token = torch.arange(max(length - counts[row], 0))
        for cache in caches:
            cache[table[row, token // 16].long(), token % 16] = torch.randn(
                len(token), kv_heads, 128, generator=generator
            ).to(dtype)
    spec_of_norm = NormSpec(size=128, eps=1e-6, unit_offset=case.unit_offset) if case.norms else None
    norms = [torch.randn(128, generator=generator).to(dtype) if case.norms else None for _ in range(2)]
    angles = torch.randn(max(case.lengths) + 1, max(case.rotary_dim, 2) // 2, generator=generator)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1) if case.rotary_dim else None
    qkv = torch.randn(len(row_of), (heads + 2 * kv_heads) * 128 + 16, generator=generator).to(dtype)[:, :-16]
    needs = QkNormRopeWriteKvNeeds(
        dtype=case.dtype, kv_dtype=case.dtype, num_heads=heads, num_kv_heads=kv_heads, head_dim=128, rotary_dim=case.rotary_dim,
        q_norm=spec_of_norm, k_norm=spec_of_norm,
    )  # fmt: skip
    plain = [torch.zeros(len(row_of), 1, kv_heads, 128, dtype=dtype) for _ in range(2)]
    seam = ReferenceQkNormRopeWriteKv.bind(needs, QkNormRopeWriteKvTensors(cos_sin, *norms))
    query = seam(qkv.clone(), positions, torch.arange(len(row_of)), *plain)
    want = expected(query, caches, plain, case, counts, table)

    on_device = page_views(memory.clone().to(device), sum(num_blocks) + 3, spec, KVLayout(heads_first=True))
    parts = ResidentParts.allocate(device)
    parts.sums.fill_(float("nan"))
    norm_rope = NormRope(
        case.rotary_dim, None if cos_sin is None else cos_sin.to(device), *[None if norm is None else norm.to(device) for norm in norms],
        spec_of_norm,
    )  # fmt: skip
    layer = SimpleNamespace(k_cache=on_device[0], v_cache=on_device[1], num_heads=heads, scale=128**-0.5)
    attend = ResidentDecode(layer, parts, norm_rope, num_tokens=max(counts), pdl=has_pdl(device))
    starts = None
    if case.counts:
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    wide = torch.empty(len(row_of), qkv.shape[1] + 16, dtype=dtype, device=device)
    wide[:, :-16] = qkv.to(device)
    step = [positions.to(device), slots.to(device), starts, lengths, table.to(device)]
    deal_resident(lengths, step[-1], parts.shares, shape, num_rows=rows, query_start_loc=starts, pdl=has_pdl(device))
    for _ in range(2):
        torch.cuda.synchronize()
        output = torch.full((len(row_of), heads, 128), float("nan"), dtype=dtype, device=device)
        attend(wide[:, :-16], output, *step, shape)
        tolerance = 2e-2 if dtype == torch.bfloat16 else 3e-3
        torch.testing.assert_close(output.double().cpu(), want, atol=tolerance, rtol=tolerance, equal_nan=True)
        assert not parts.arrivals.any(), "counters are left at zero for the next launch"
    kept = slots >= 0
    for got, was, new in zip(on_device, caches, plain, strict=True):
        was[slots[kept] // 16, slots[kept] % 16] = new[kept, 0]
        torch.testing.assert_close(got.cpu(), was, atol=tolerance, rtol=tolerance, equal_nan=True)


def expected(
    query: torch.Tensor,
    caches: tuple[torch.Tensor, ...],
    new: list[torch.Tensor],
    case: Case,
    counts: list[int],
    table: torch.Tensor,
) -> torch.Tensor:
    """float64 [T, H, 128], NaN of padding. new: keys and values of the step's tokens [T, 1, N, 128], not yet in the caches."""
    result, first = torch.full(query.shape, float("nan"), dtype=torch.float64), 0
    for row, (length, count) in enumerate(zip(case.lengths, counts, strict=True)):
        if length:
            token = torch.arange(length - count)
            keys, values = (
                torch.cat([cache[table[row, token // 16].long(), token % 16], made[first : first + count, 0]])
                .double()
                .repeat_interleave(case.num_heads // case.num_kv_heads, 1)
                for cache, made in zip(caches, new, strict=True)
            )
            logits = torch.einsum("qhd,lhd->qhl", query[first : first + count].double(), keys) * 128**-0.5
            is_seen = torch.arange(length) <= length - count + torch.arange(count)[:, None]
            weights = logits.masked_fill(~is_seen[:, None], -torch.inf).softmax(-1)
            result[first : first + count] = torch.einsum("qhl,lhd->qhd", weights, values)
        first += count
    return result
