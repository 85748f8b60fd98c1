"""The kernel against float64 math and against core's reference, on poisoned caches of odd layouts."""

import pytest
import torch

from pelton.ops.interface import NormSpec, QkNormRopeWriteKvNeeds, QkNormRopeWriteKvTensors
from pelton_backends.reference.ops import ReferenceQkNormRopeWriteKv

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# Of the largest magnitude; 16-bit results are rounded up to three times on the way (the interpreter truncates to bfloat16).
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2, "fp8_e4m3": 0.07, "fp8": 0.07, "fp8_e5m2": 0.13}


class Case:
    """Random rows, a cache of NaN with `heads_first` strides or not, slots in random order with a -1 now and then."""

    def __init__(self, device, num_tokens, *, heads=4, kv_heads=2, head_dim=64, rotary_dim=None, dtype="float32",
                 kv_dtype=None, norm=True, unit_offset=False, writes_kv=True, heads_first=False, block_size=16):  # fmt: skip
        torch.manual_seed(num_tokens)
        self.spec = NormSpec(size=head_dim, eps=1e-5, unit_offset=unit_offset) if norm else None
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self.needs = QkNormRopeWriteKvNeeds(
            dtype=dtype, kv_dtype=kv_dtype or dtype, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
            rotary_dim=rotary_dim, q_norm=self.spec, k_norm=self.spec, writes_kv=writes_kv,
        )  # fmt: skip
        torch_dtype = DTYPES[dtype]
        angles = torch.rand(300, rotary_dim // 2, device=device) * 6.3
        self.tensors = QkNormRopeWriteKvTensors(
            torch.cat([angles.cos(), angles.sin()], 1) if rotary_dim else None,
            torch.randn(head_dim, device=device).to(torch_dtype) if norm else None,
            torch.randn(head_dim, device=device).to(torch_dtype) if norm else None,
        )
        width = (heads + 2 * kv_heads) * head_dim
        self.qkv = torch.randn(num_tokens, width + 16, device=device).to(torch_dtype)[:, :width]
        self.positions = torch.randint(0, 300, (num_tokens,), device=device)
        num_blocks = num_tokens // block_size + 3
        self.slots = torch.randperm((num_blocks - 1) * block_size, device=device)[:num_tokens] + block_size
        self.slots[3::5] = -1
        cache_dtype = FP8.get(kv_dtype) or DTYPES[kv_dtype or dtype]
        axes = (kv_heads, block_size) if heads_first else (block_size, kv_heads)
        pages = torch.full((num_blocks, 2, *axes, head_dim), torch.nan, device=device).to(cache_dtype)
        self.k_cache, self.v_cache = (pages.transpose(2, 3) if heads_first else pages).unbind(1)

    def run(self):
        from pelton_backends.triton.ops.qk_rope import TritonQkNormRopeWriteKv

        assert TritonQkNormRopeWriteKv.unsupported(self.needs) == []
        call = TritonQkNormRopeWriteKv.bind(self.needs, self.tensors)
        return call(self.qkv.clone(), self.positions, self.slots, self.k_cache, self.v_cache)

    def oracle(self):
        """Query, key, value [T, ., D] in float64, without rounding."""
        needs, tensors = self.needs, self.tensors
        x = self.qkv.double().unflatten(1, (-1, needs.head_dim))
        query, key, value = x.split([needs.num_heads, needs.num_kv_heads, needs.num_kv_heads], 1)
        return self._turn(query, tensors.q_norm), self._turn(key, tensors.k_norm), value

    def _turn(self, x, weight):
        if weight is not None:
            weight = weight.double() + self.spec.unit_offset
            x = x / (x.square().mean(-1, keepdim=True) + self.spec.eps).sqrt() * weight
        half = self.needs.rotary_dim // 2
        if half:
            cos, sin = self.tensors.cos_sin[self.positions].double()[:, None].split(half, 2)
            a, b = x[..., :half], x[..., half : 2 * half]
            x = torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)
        return x

    def check(self):
        query = self.run()
        want_query, want_key, want_value = self.oracle()
        close(query, want_query, self.needs.dtype)
        kept = self.slots >= 0
        slots = self.slots[kept]
        for cache, want in ((self.k_cache, want_key), (self.v_cache, want_value)):
            rows = cache.float().flatten(0, 1)  # torch indexes no fp8
            untouched = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
            if self.needs.writes_kv:
                close(rows[slots], want[kept], self.needs.kv_dtype, self.needs.dtype)
                untouched[slots] = False
            assert rows[untouched].isnan().all(), "a slot that no token has was written"


def close(got, want, *dtypes):
    bound = sum(TOLERANCE[d] for d in set(dtypes)) * want.abs().max().clamp(min=1)
    assert (got.double() - want).abs().max() <= bound


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_rotates_and_writes(device, num_tokens, dtype):
    Case(device, num_tokens, dtype=dtype).check()


@pytest.mark.parametrize(
    "change",
    [
        {"heads": 1, "kv_heads": 1},
        {"heads": 6, "kv_heads": 3, "head_dim": 80},
        {"head_dim": 96, "rotary_dim": 24},
        {"rotary_dim": 32, "norm": False},
        {"rotary_dim": 0},
        {"rotary_dim": 0, "norm": False},
        {"norm": False},
        {"unit_offset": True, "dtype": "bfloat16"},
        {"unit_offset": True},
        {"writes_kv": False},
        {"heads_first": True},
        {"block_size": 48, "head_dim": 256},
        {"kv_dtype": "bfloat16"},
        {"kv_dtype": "float32", "dtype": "float16"},
        pytest.param({"kv_dtype": "fp8"}, marks=pytest.mark.gpu),
        pytest.param({"kv_dtype": "fp8_e4m3", "dtype": "bfloat16"}, marks=pytest.mark.gpu),
        pytest.param({"kv_dtype": "fp8_e5m2", "dtype": "float16"}, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_other_shapes_and_dtypes(device, change):
    Case(device, 7, **change).check()


@pytest.mark.parametrize("kv_dtype", FP8)
def test_numbers_that_8_bits_hold_stay_what_they_are(device, kv_dtype):
    """Triton's interpreter (3.6) loses the carry when a mantissa rounds up to the next exponent, so it gets no such numbers."""
    case = Case(device, 7, kv_dtype=kv_dtype, norm=False, rotary_dim=0)
    case.qkv.copy_(case.qkv.to(FP8[kv_dtype]))
    case.run()
    kept = case.slots >= 0
    _, want_key, want_value = case.oracle()
    assert torch.equal(case.k_cache.double().flatten(0, 1)[case.slots[kept]], want_key[kept])
    assert torch.equal(case.v_cache.double().flatten(0, 1)[case.slots[kept]], want_value[kept])


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.gpu)])
def test_rounds_where_the_reference_rounds(device, dtype):
    """float32: the same numbers. bfloat16: all but a few in a thousand, which a last place of the norm moves."""
    case = Case(device, 33, dtype=dtype)
    case.k_cache.zero_(), case.v_cache.zero_()
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    reference = ReferenceQkNormRopeWriteKv.bind(case.needs, case.tensors)
    want = reference(case.qkv.clone(), case.positions, case.slots, k_cache, v_cache)
    got = case.run()
    for mine, theirs in ((got, want), (case.k_cache, k_cache), (case.v_cache, v_cache)):
        if dtype == "float32":
            torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=2e-6)
        else:
            assert (mine != theirs).float().mean() < 5e-3


def test_the_query_is_a_view_and_keys_stay(device):
    from pelton_backends.triton.ops.qk_rope import TritonQkNormRopeWriteKv

    case = Case(device, 3)
    qkv = case.qkv.clone()
    call = TritonQkNormRopeWriteKv.bind(case.needs, case.tensors)
    query = call(qkv, case.positions, case.slots, case.k_cache, case.v_cache)
    assert query.data_ptr() == qkv.data_ptr()
    assert torch.equal(qkv[:, 4 * 64 :], case.qkv[:, 4 * 64 :])


@pytest.mark.parametrize("kv_dtype", FP8)
def test_saturates_in_8_bits(device, kv_dtype):
    case = Case(device, 2, kv_dtype=kv_dtype, norm=False)
    case.qkv.mul_(1e7)
    case.run()
    largest = torch.finfo(FP8[kv_dtype]).max
    for cache in (case.k_cache, case.v_cache):
        assert cache.float().flatten(0, 1)[case.slots].abs().max() == largest


@pytest.mark.parametrize("kv_dtype", FP8)
def test_nan_stays_nan_in_8_bits(device, kv_dtype):
    """A row that reads it has to fail, not to go on with the largest number."""
    if device.type == "cpu" and kv_dtype != "fp8_e5m2":
        pytest.skip("Triton's interpreter makes 384 of NaN in this format")
    case = Case(device, 2, kv_dtype=kv_dtype, norm=False)
    case.qkv[1] = torch.nan
    case.run()
    for cache in (case.k_cache, case.v_cache):
        is_nan = cache.float().flatten(0, 1)[case.slots].isnan()
        assert is_nan[1].all() and not is_nan[0].any()


def test_no_tokens(device):
    assert Case(device, 0).run().shape == (0, 4, 64)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dtype": "float64"}, "dtype float64"),
        ({"kv_dtype": "int8"}, "kv dtype int8"),
        ({"rotary_dim": 7}, "rotary_dim 7"),
    ],
)
def test_says_why_it_refuses(change, reason):
    from dataclasses import replace

    from pelton_backends.triton.ops.qk_rope import TritonQkNormRopeWriteKv

    needs = QkNormRopeWriteKvNeeds(
        dtype="float32", kv_dtype="float32", num_heads=2, num_kv_heads=1, head_dim=8, rotary_dim=8
    )
    (found,) = TritonQkNormRopeWriteKv.unsupported(replace(needs, **change))
    assert found.startswith(reason)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [
        {"heads": 16, "kv_heads": 8, "head_dim": 128},
        {"heads": 32, "kv_heads": 8, "head_dim": 128, "norm": False, "kv_dtype": "fp8_e4m3"},
        {"heads": 28, "kv_heads": 4, "head_dim": 128, "norm": False, "heads_first": True},
        {"heads": 64, "kv_heads": 8, "head_dim": 192, "rotary_dim": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_tokens", [1, 65, 1031, 16384])
def test_on_the_device(device, change, num_tokens):
    Case(device, num_tokens, dtype="bfloat16", **change).check()
