"""Sum over ranks, residual and norm in one launch: in Triton's interpreter between processes, and on a GPU that ranks share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pelton_forked import AnyForkingPopen

SUPPORT = Path(__file__).parents[2] / "support"
_TIMEOUT_S = 240.0


def reports_of(folder: Path, size: int, device: str) -> list[dict[str, list[str]]]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), environ.get("PYTHONPATH", "")])
    if device == "cpu":
        environ["TRITON_INTERPRET"] = "1"
    ranks = [
        AnyForkingPopen(
            [
                sys.executable, str(SUPPORT / "pelton_add_norm_ranks.py"), str(rank), str(size), str(folder / "store"),
                device.format(rank=rank),
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        texts = [rank.communicate(timeout=_TIMEOUT_S)[0].strip() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, (rank, text) in enumerate(zip(ranks, texts, strict=True)):
        assert rank.returncode == 0, f"rank {number} ended with status {rank.returncode}: {text[-1500:]}"
    return [json.loads(text.splitlines()[-1]) for text in texts]


def check(reports: list[dict[str, list[str]]], kinds: set[str]) -> None:
    for rank, report in enumerate(reports):
        assert set(report) == kinds
        assert report == {kind: [] for kind in kinds}, f"rank {rank}"


KINDS = {"one shot", "no rows", "compiled alone", "many rows"}


def test_two_ranks_sum_few_rows_many_rows_and_rows_that_were_sent(tmp_path: Path) -> None:
    check(reports_of(tmp_path, 2, "cpu"), KINDS | {"sent rows"})


def test_three_ranks_sum_in_one_shot_in_two_and_many_rows(tmp_path: Path) -> None:
    check(reports_of(tmp_path, 3, "cpu"), KINDS | {"two shots", "nothing is sent"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size, has_own", [(2, False), (3, False), (2, True), (4, True)])
def test_ranks_on_gpus(tmp_path: Path, size: int, has_own: bool) -> None:
    """Ranks that share a GPU, and ranks with one each."""
    if has_own and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    of_size = {"two shots", "nothing is sent"} if size > 2 else {"sent rows"}
    kinds = KINDS | {"captured", "many rows captured"} | of_size
    check(reports_of(tmp_path, size, "cuda:{rank}" if has_own else "cuda:0"), kinds)
