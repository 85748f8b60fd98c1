"""Products by an algorithm of cuBLASLt that was measured, and by torch's choice where there is none."""

from __future__ import annotations

import pytest
import torch

from pelton_backends.triton.ops.linear import cublaslt
from pelton_backends.triton.ops.linear.cublaslt import Algorithm, LibraryProduct, choose_algorithm

ONE, OTHER = Algorithm(66, 20, 35), Algorithm(66, 24, 35, split_k=2, reduction=2)


def test_an_algorithm_is_for_rows_down_to_those_of_the_entry_before():
    measured = ((128, None), (256, ONE), (512, None), (640, OTHER))
    found = [choose_algorithm(rows, measured) for rows in (1, 128, 129, 256, 257, 512, 513, 640, 641)]
    assert found == [None, None, ONE, ONE, None, None, OTHER, OTHER, None]


def test_where_the_library_lacks_the_algorithm_torchs_choice_serves(monkeypatch):
    asked = []

    def library():
        asked.append(1)
        raise OSError("no such library")

    monkeypatch.setattr(cublaslt, "MEASURED", {(24, 16): ((64, ONE),)})
    monkeypatch.setattr(cublaslt, "is_hopper", lambda device: True)
    monkeypatch.setattr(cublaslt, "_library", library)
    weight, x = torch.randn(24, 16, dtype=torch.bfloat16), torch.randn(40, 16, dtype=torch.bfloat16)
    product, out = LibraryProduct(weight), torch.empty(40, 24, dtype=torch.bfloat16)
    for found in (product(x), product(x, out)):
        assert torch.equal(found, torch.mm(x, weight.T))
    assert product(x[:9], out[:9]).data_ptr() == out.data_ptr()
    assert len(asked) == 2, "once for a number of rows"


def test_other_matrices_are_multiplied_by_torch(device):
    weight, x = torch.randn(24, 16, device=device), torch.randn(40, 16, device=device)
    assert torch.equal(LibraryProduct(weight)(x), torch.mm(x, weight.T))


@pytest.mark.parametrize("off", [0.0, 0.1])
def test_a_wrong_result_is_never_handed_on(monkeypatch, off):
    weight, x = torch.randn(24, 16, dtype=torch.bfloat16), torch.randn(40, 16, dtype=torch.bfloat16)
    x[30:] = float("nan")  # padding
    monkeypatch.setattr(cublaslt, "MEASURED", {(24, 16): ((64, ONE),)})
    monkeypatch.setattr(cublaslt, "_TRIED", {})
    monkeypatch.setattr(cublaslt, "is_hopper", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    product, calls = LibraryProduct(weight), []

    def multiply(x, prepared, out):
        calls.append(1)
        torch.mm(x, weight.T * (1 + off), out=out)

    monkeypatch.setattr(product, "_prepared", lambda x, algorithm, out: algorithm)
    monkeypatch.setattr(product, "_multiply", multiply)
    for _ in range(3):
        torch.testing.assert_close(product(x), torch.mm(x, weight.T), equal_nan=True)
    assert len(calls) == (1 if off else 4), "tried once, and used where it was right"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", list(cublaslt.MEASURED), ids=str)
def test_measured_algorithms_multiply(device, shape):
    weight = torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02
    product = LibraryProduct(weight)
    for most, algorithm in cublaslt.MEASURED[shape]:
        for rows in (most, most - 7) if algorithm is not None else ():
            x = torch.randn(rows, shape[1], device=device, dtype=torch.bfloat16)
            want, found = torch.mm(x.float(), weight.float().T), product(x).float()
            assert ((found - want).norm() / want.norm()).item() < 0.004, (rows, algorithm)
            assert cublaslt._TRIED.get((*shape, rows, algorithm)), f"refused: {algorithm} for {rows} rows"
