"""The head against a float64 oracle: few rows by our kernel, more by torch's matmul."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pelton_linear_oracle import TOLERANCES, make_case, rms_norm

from pelton.ops.interface import AddNormLogitsNeeds, AddNormLogitsTensors, LinearSpec, LinearWeights
from pelton.sampling.tails import only_best
from pelton_backends.triton.ops.linear.large_batch import add_norm
from pelton_backends.triton.ops.logits import TritonAddNormLogits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def bound(case: Any, reduce: Any = None, gather: Any = None, vocab_size: int | None = None, **options: Any) -> Any:
    num_rows, hidden_size = case.weight.shape
    spec = LinearSpec(in_features=hidden_size, out_features=num_rows, has_bias=case.bias is not None)
    needs = AddNormLogitsNeeds(
        dtype=str(case.weight.dtype).removeprefix("torch."), norm=case.norm_spec, linear=spec, vocab_size=vocab_size or num_rows,
        post_norm=case.post_spec, **options,
    )  # fmt: skip
    assert TritonAddNormLogits.unsupported(needs) == []
    weights = LinearWeights(spec, {"weight": case.weight}, case.bias)
    return TritonAddNormLogits.bind(needs, AddNormLogitsTensors(case.norm, weights, case.post_norm, reduce, gather))


def expected(case: Any, rows: torch.Tensor, soft_cap: float | None = None) -> torch.Tensor:
    case, rows = case.to("cpu"), rows.cpu()
    x = case.hidden[rows]
    if case.post_norm is not None:
        x = rms_norm(x, case.post_norm, case.post_spec)
    if case.residual is not None:
        x = (x.double() + case.residual[rows].double()).to(x.dtype)
    logits = rms_norm(x, case.norm, case.norm_spec).double() @ case.weight.double().T
    if case.bias is not None:
        logits += case.bias.double()
    return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)


def check(case: Any, rows: torch.Tensor, soft_cap: float | None = None) -> None:
    inputs = [t for t in (case.hidden, case.residual) if t is not None]
    before = [t.clone() for t in inputs]
    logits = bound(case, soft_cap=soft_cap)(case.hidden, case.residual, rows)
    for after, old in zip(inputs, before, strict=True):
        torch.testing.assert_close(after, old, rtol=0, atol=0, equal_nan=True)  # left as they are
    assert logits.dtype == torch.float32
    # Products stay in float32: what is left is a normed row that is rounded the other way.
    relative, absolute = TOLERANCES[case.hidden.dtype]
    factor = 3 if case.hidden.dtype == torch.bfloat16 and not logits.is_cuda else 1
    torch.testing.assert_close(
        logits.cpu().double(), expected(case, rows, soft_cap), rtol=factor * relative, atol=factor * absolute
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 20])
def test_matches_float64(num_rows, dtype, device):
    case = make_case(24, 72, 101, dtype, device)
    check(case, torch.randperm(24, device=device)[:num_rows])


@pytest.mark.parametrize("num_rows", [2, 11])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"residual": False}, id="no-residual"),
        pytest.param({"post_norm": True, "unit_offset": True, "row_gap": 7}, id="post-norm-strided"),
        pytest.param({"post_norm": True, "residual": False, "bias": True}, id="post-norm-bias"),
    ],
)
def test_options(num_rows, options, device):
    case = make_case(12, 65, 33, torch.float32, device, **options)
    check(case, torch.arange(num_rows, device=device))


@pytest.mark.parametrize("num_rows", [1, 10])
def test_soft_cap(num_rows, device):
    case = make_case(10, 64, 48, torch.float32, device)
    case.weight *= 30  # some logits far above the cap
    check(case, torch.arange(num_rows, device=device), soft_cap=3.0)


@pytest.mark.parametrize("num_rows", [3, 12])
def test_rows_may_repeat_and_be_last(num_rows, device):
    check(make_case(5, 64, 48, torch.float32, device), torch.full((num_rows,), 4, device=device))


@pytest.mark.parametrize("in_one_launch", [False, True])
@pytest.mark.parametrize(
    "dtype, options", [(torch.float32, {"bias": True}), (torch.float16, {"residual": False}), (torch.float16, {})]
)
def test_two_ranks_give_what_one_gives(dtype, options, in_one_launch, device):
    """Each sums the rows that sample over ranks, and has a half of the vocabulary; of the last one's a row is no token. Hidden states and
    residual stay as they are."""
    case = make_case(12, 64, 31, dtype, device, **options)
    rows = torch.tensor([3, 11, 0, 3], device=device)
    wanted = expected(replace(case, hidden=case.hidden * 2), rows)

    def reduce(partial):
        return partial * 2

    def sum_add_norm(hidden, residual, norm, spec, post_norm, post_spec):
        total, normed = add_norm(hidden * 2, residual, norm, spec, post_norm, post_spec)
        return normed, total

    if in_one_launch:
        reduce.add_norm = sum_add_norm
    shares = []
    for rank in range(2):
        weight, bias = case.weight[16 * rank : 16 * rank + 16], case.bias
        if rank == 1:
            weight = torch.cat([weight, torch.full_like(weight[:1], 5.0)])
        if bias is not None:
            bias = torch.nn.functional.pad(bias, (0, 1))[16 * rank : 16 * rank + 16].contiguous()
        own = replace(case, weight=weight.contiguous(), bias=bias)
        before = [t.clone() for t in (case.hidden, case.residual) if t is not None]
        gathered = []
        head = bound(own, reduce, lambda logits, gathered=gathered: gathered.append(logits) or logits, 31, tp_size=2)
        shares.append(head(case.hidden, case.residual, rows))
        assert gathered[0].shape == (4, 16)
        for after, old in zip([t for t in (case.hidden, case.residual) if t is not None], before, strict=True):
            assert torch.equal(after, old)
        assert head(case.hidden, case.residual, rows[:0]).shape == (0, 16)
    logits = torch.cat(shares, dim=1)[:, :31]
    relative, absolute = TOLERANCES[dtype]
    torch.testing.assert_close(logits.cpu().double(), wanted, rtol=relative, atol=absolute)
    whole = bound(own, reduce, lambda logits: torch.cat([logits, logits], dim=1), 31, tp_size=2)
    assert whole(case.hidden, case.residual, rows).shape == (4, 31)


def test_no_rows(device):
    case = make_case(3, 64, 48, torch.float32, device)
    logits = bound(case)(case.hidden, case.residual, torch.empty(0, dtype=torch.int64, device=device))
    assert logits.shape == (0, 48) and logits.dtype == torch.float32


def test_refuses_what_it_cannot_do(device):
    spec = LinearSpec(in_features=8, out_features=8)
    norm = make_case(1, 8, 8, torch.float32, device).norm_spec
    for options in ({"weight_format": "int4"}, {"dtype": "float8"}):
        form = options.pop("weight_format", "plain")
        spec = replace(spec, weight_format=form)
        needs = AddNormLogitsNeeds(**{"dtype": "float32", "norm": norm, "linear": spec, "vocab_size": 8} | options)
        assert TritonAddNormLogits.unsupported(needs)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [5, 32, 33, 100, 128])
def test_the_best_token_comes_with_the_logits(num_rows, device):
    """Written or not, it is the one that the logits have: the lowest of equal ones."""
    from pelton_backends.triton.ops.sampling.best import best_of

    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs compute capability 9.0")
    case = make_case(128, 1024, 3001, torch.bfloat16, device)
    case.weight[2000] = case.weight[7]
    head, rows = bound(case), torch.randperm(128, device=device)[:num_rows]
    check(case, rows)
    logits = head(case.hidden, case.residual, rows)
    best = best_of(logits)
    assert best is not None
    token = only_best.set(True)
    alone = best_of(head(case.hidden, case.residual, rows))
    only_best.reset(token)
    assert alone is not None and torch.equal(best, alone)
    tokens = 0x7FFFFFFF - (best & 0x7FFFFFFF)
    assert (logits.gather(1, tokens[:, None])[:, 0] == logits.amax(1)).all()
    assert torch.equal(
        tokens, torch.where(logits == logits.amax(1, keepdim=True), torch.arange(3001, device=device), 3001).amin(1)
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "many_tokens"), [(2, 1 << 16), (32, 1 << 16), (33, 1 << 16), (128, 1 << 16), (100, 3001)]
)
def test_wide_rows_have_the_best_token_in_place_of_logits(num_rows, many_tokens, monkeypatch, device):
    """Logits that are written come from cuBLAS there, which may round otherwise. many_tokens: from here on a vocabulary is large."""
    from pelton_backends.triton.ops.linear import hopper_wide_vocab
    from pelton_backends.triton.ops.sampling.best import best_of

    monkeypatch.setattr(hopper_wide_vocab, "MANY_TOKENS", many_tokens)
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs compute capability 9.0")
    case = make_case(128, 4096, 3001, torch.bfloat16, device)
    head, rows = bound(case), torch.randperm(128, device=device)[:num_rows]
    logits = head(case.hidden, case.residual, rows)
    assert best_of(logits) is None
    token = only_best.set(True)
    best = best_of(head(case.hidden, case.residual, rows))
    only_best.reset(token)
    assert best is not None
    found = logits.gather(1, (0x7FFFFFFF - (best & 0x7FFFFFFF))[:, None])[:, 0]
    assert (found >= logits.amax(1) - 1e-4 * logits.abs().amax(1)).all()


def test_rows_of_two_warp_groups_and_few_columns_take_the_kernel_that_was_measured_with_them():
    from pelton_backends.triton.ops.linear.hopper_wide_vocab import takes_wide

    weights = {size: torch.empty(8, size, device="meta") for size in (1024, 2048, 4096)}
    assert [rows for rows in (1, 64, 65, 128, 129) if takes_wide(rows, weights[1024])] == [65, 128]
    assert takes_wide(128, weights[2048]) and not takes_wide(128, weights[4096])
    large = {size: torch.empty(1 << 16, size, device="meta") for size in (4096, 5120)}
    assert takes_wide(128, large[4096]) and not takes_wide(64, large[4096]) and not takes_wide(128, large[5120])


def test_a_part_of_the_logits_has_no_best_tokens():
    from pelton_backends.triton.ops.sampling.best import best_of, leave_best

    logits = leave_best(torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64))
    assert best_of(logits) is not None
    assert best_of(logits[:2]) is best_of(logits / 8) is None


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 33, 128])
def test_a_share_leaves_its_best(num_rows, device):
    """The key that the logits have, where the best tokens alone are asked for."""
    from pelton_backends.triton.ops.sampling.best import best_of

    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs compute capability 9.0")
    case, rows = make_case(128, 1024, 3008, torch.bfloat16, device), torch.arange(num_rows, device=device)
    head = bound(case, lambda partial: partial, lambda logits: logits, 6016, tp_size=2)
    logits = head(case.hidden, case.residual, rows)
    assert best_of(logits) is None
    token = only_best.set(True)
    best = best_of(head(case.hidden, case.residual, rows))
    only_best.reset(token)
    assert best is not None
    tokens = 0x7FFFFFFF - (best & 0x7FFFFFFF)
    near = logits.gather(1, tokens[:, None])[:, 0]  # of another product: sums in another order
    torch.testing.assert_close(near, logits.amax(1), rtol=1e-3, atol=1e-3)
