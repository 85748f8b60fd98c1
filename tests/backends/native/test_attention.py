"""The C backend keeps what every attention backend promises, by each instruction set that this CPU has."""

from dataclasses import replace

import pytest
import torch

from pelton.attention.interface import AttentionNeeds, GraphSupport, KVLayout
from pelton.attention.metadata import BatchDescriptor
from pelton.kv_cache.spec import FullAttentionSpec
from pelton.testing.attention import CASES, AttentionBackendConformance, AttentionCase, AttentionStep
from pelton.testing.paged_rows import page_views
from pelton_backends.native import build, library
from pelton_backends.native.backend import NativeBackend
from pelton_backends.native.encoder import NativeEncoderBackend
from pelton_backends.native.plugin import pelton_attention_backends
from pelton_backends.reference.ops import as_bytes

NEEDS = AttentionNeeds(head_dim=64, num_heads=8, num_kv_heads=2, block_size=16, dtype="float32")
TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}


@pytest.mark.usefixtures("isa")
class TestNativeBackend(AttentionBackendConformance):
    backend = NativeBackend


LONG = ((1, 0), (1, 63), (1, 64), (1, 65), (1, 300), (2, 0), (70, 3), (33, 129))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": 50},
        {"sliding_window": 1},
        {"soft_cap": 3.0, "sliding_window": 70},
        {"head_dim": 64, "num_heads": 9, "num_kv_heads": 3},
        {"head_dim": 80, "block_size": 7},
        {"head_dim": 17},
        {"head_dim": 2, "num_heads": 49, "num_kv_heads": 1},
        {"head_dim": 130, "num_heads": 26, "num_kv_heads": 2, "block_size": 32, "num_padding": 5},
    ],
    ids=str,
)
def test_every_path_equals_the_oracle(isa, dtype, changes):
    case = replace(AttentionCase(rows=LONG, dtype=dtype), **changes)
    step = AttentionStep(NativeBackend, case)
    step.write()
    torch.testing.assert_close(step.run().double(), step.expected(), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


class Fp8Step(AttentionStep):
    """A step whose cache is in 8 bits; bytes that are no row's are NaN. `new`: keys and values as the layer makes them."""

    def __init__(self, case, kv_dtype):
        self.kv_dtype = kv_dtype
        super().__init__(NativeBackend, case)
        self.new = [
            torch.cat([row[before:] for row, (_, before) in zip(rows, case.rows, strict=True)])
            for rows in (self.keys, self.values)
        ]
        kind = self.layer.k_cache.dtype
        self.keys, self.values = (
            [as_bytes(row, kind).view(kind).to(self.dtype) for row in rows] for rows in (self.keys, self.values)
        )

    def _layer(self, backend):
        layer = super()._layer(backend)
        layer.needs = replace(layer.needs, kv_dtype=self.kv_dtype)
        layer.write_needs = replace(layer.write_needs, kv_dtype=self.kv_dtype)
        return layer

    def _bind(self, backend, num_blocks):
        case, needs = self.case, self.layer.needs
        spec = FullAttentionSpec(
            block_size=case.block_size * case.num_ranks, num_ranks=case.num_ranks, num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim, dtype=self.kv_dtype,
        )  # fmt: skip
        assert backend.unsupported(needs) == []
        memory = torch.full((num_blocks * spec.page_size_bytes,), 0x7F, dtype=torch.uint8)
        views = page_views(memory, num_blocks, spec, backend.kv_layout(needs))
        limits = {"max_num_seqs": 64, "max_num_tokens": 4096, "max_model_len": max(self.lengths)}
        self.backend, self.num_blocks = backend(needs, self.device, **limits), num_blocks
        self.layer.bind_cache(views, 0, self.backend)

    def cached_bytes(self):
        return [cache.view(torch.uint8).clone() for cache in (self.layer.k_cache, self.layer.v_cache)]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    "kv_dtype, changes",
    [
        ("fp8", {"sliding_window": 50}),
        ("fp8_e4m3", {"head_dim": 64, "num_heads": 9, "num_kv_heads": 3, "has_sinks": True}),
        ("fp8_e4m3", {"head_dim": 130, "num_heads": 10, "block_size": 32, "num_padding": 5}),
        ("fp8_e5m2", {"head_dim": 80, "block_size": 7, "chunk_size": 24}),
        ("fp8_e5m2", {"head_dim": 32, "soft_cap": 3.0, "rows": ((1, 1100), (3, 2), (40, 90))}),
        ("fp8_e5m2", {"head_dim": 17}),
    ],
    ids=str,
)
def test_a_cache_in_8_bits_is_written_and_read_as_the_oracle_does(isa, dtype, kv_dtype, changes):
    case = replace(AttentionCase(rows=LONG, dtype=dtype), **changes)
    step, tolerance = Fp8Step(case, kv_dtype), TOLERANCES[dtype]
    step.write(only_context=True)
    new = torch.cat([step.query[: step.num_tokens].flatten(1), *(rows.flatten(1) for rows in step.new)], dim=1)
    qkv = torch.nn.functional.pad(new, (0, 0, 0, case.num_padding))
    output, positions = torch.zeros_like(step.query), torch.zeros(len(qkv), dtype=torch.int64)
    step.layer.attend.write_and_attend(
        qkv, positions, step.common.slot_mapping, step.backend.build(step.common), output
    )
    torch.testing.assert_close(output[: step.num_tokens].double(), step.expected(), atol=tolerance, rtol=tolerance)
    written = step.cached_bytes()
    step.write()
    assert all(map(torch.equal, written, step.cached_bytes()))
    torch.testing.assert_close(step.run().double(), step.expected(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", [((1, 0),) * 4, ((2, 0),) * 4], ids=str)
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_every_number_of_8_bits_is_read_as_it_is(isa, dtype, kv_dtype, rows):
    """A token that sees one key gets its value: of four rows, all that there are."""
    step = Fp8Step(AttentionCase(rows=rows, head_dim=64, num_kv_heads=1, num_heads=2, dtype=dtype), kv_dtype)
    step.write()
    numbers = torch.arange(256, dtype=torch.uint8).view(4, 64).view(step.layer.v_cache.dtype)
    for row, line in enumerate(numbers):
        block, offset = divmod(int(step.slots(row)[0]), step.layer.v_cache.shape[1])
        step.layer.v_cache[block, offset, 0] = line
    found = step.run()[:: rows[0][0]]
    torch.testing.assert_close(found, numbers.to(step.dtype)[:, None].expand_as(found), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": ((1, 1023),)},
        {"rows": ((1, 1100),), "dtype": "bfloat16"},
        {"rows": ((1, 4500), (1, 9), (1, 1023)), "num_heads": 6, "dtype": "bfloat16"},
        {"rows": ((1, 2600), (3, 1500)), "sliding_window": 1030, "soft_cap": 4.0},
    ],
    ids=str,
)
def test_spans_of_a_long_row_are_joined(isa, changes):
    step = AttentionStep(NativeBackend, replace(AttentionCase(rows=(), head_dim=32), **changes))
    step.write()
    tolerance = TOLERANCES[step.case.dtype]
    torch.testing.assert_close(step.run().double(), step.expected(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_every_path_spoils_only_the_row_that_has_a_nan(isa, dtype):
    step = AttentionStep(NativeBackend, replace(CASES["mixed"], dtype=dtype))
    step.write()
    step.query[3] = float("nan")
    found = step.run()
    assert found[3].isnan().all()
    assert not found[:3].isnan().any() and not found[4:].isnan().any()


def test_the_layout_has_heads_first():
    assert NativeBackend.kv_layout(NEEDS) == KVLayout(heads_first=True)
    assert NativeBackend.graph_support is GraphSupport.UNIFORM_BATCH


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": "float64"}, "dtype float64"),
        ({"kv_dtype": "bfloat16"}, "kv dtype bfloat16, only that of the model, fp8, fp8_e4m3, fp8_e5m2"),
        ({"num_kv_heads": 3}, "not a multiple"),
    ],
)
def test_what_it_refuses(changes, reason):
    (why,) = NativeBackend.unsupported(replace(NEEDS, **changes))
    assert reason in why


def test_it_is_offered_for_cpus_only():
    entries = pelton_attention_backends("cpu")
    assert [(entry.resolve(), entry.priority) for entry in entries] == [(NativeBackend, 50), (NativeEncoderBackend, 50)]
    assert pelton_attention_backends("cuda") == []


def test_the_best_instruction_set_is_the_default():
    assert library.kernels().isa == build.available_sets()[-1].name


def shared_step(case, prefix):
    """Every row starts with row 0's blocks."""
    step = AttentionStep(NativeBackend, case)
    for row in range(1, len(case.rows)):
        count = prefix // case.block_size
        step.tables[row][:count] = step.tables[0][:count]
        step.keys[row][:prefix], step.values[row][:prefix] = step.keys[0][:prefix], step.values[0][:prefix]
    step.common = step._common()
    step.common.common_prefix_len = prefix
    step.common.common_prefix = torch.tensor([prefix], dtype=torch.int32)
    step.write()
    return step


SHARING = AttentionCase(
    rows=tuple((1, 160 + 7 * (row % 5)) for row in range(37)),
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    dtype="bfloat16",
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": 32, "num_heads": 5, "num_kv_heads": 1},
        {"head_dim": 128, "num_kv_heads": 6},
        {"soft_cap": 3.0},
        {"num_padding": 3},
        {"rows": ((1, 160),) * 9},  # the prefix ends where the step's own token stands
        {"block_size": 7, "rows": ((1, 161),) * 9},
        {"sliding_window": 50},
        {"dtype": "float32"},
        {"rows": ((1, 1400),) + ((1, 170),) * 8, "dtype": "float32"},  # one of the rows is cut into spans as well
    ],
    ids=str,
)
def test_a_shared_prefix_is_read_once_or_not_at_all_apart(isa, changes):
    case = replace(SHARING, **changes)
    step = shared_step(case, 160 // case.block_size * case.block_size)
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(step.run().double(), step.expected(), atol=tolerance, rtol=tolerance)


def test_what_reads_a_prefix_once():
    step = shared_step(SHARING, 160)
    backend = step.backend
    assert backend.uses_common_prefix(37, 160)
    assert not backend.uses_common_prefix(7, 160) and not backend.uses_common_prefix(37, 48)
    assert not NativeBackend.uses_common_prefix(shared_step(replace(SHARING, sliding_window=50), 160).backend, 37, 160)
    metadata = backend.build(step.common)
    assert metadata.prefix.tolist() == [160] and metadata.step.common_prefix == metadata.prefix.data_ptr()
    key = BatchDescriptor(37, 37, 1)
    assert backend.build(step.common, key).prefix is None
    assert backend.build(step.common, replace(key, has_common_prefix=True)).prefix is step.common.common_prefix
