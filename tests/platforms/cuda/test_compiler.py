"""Kernels are compiled ahead of their first launch, without one; what is compiled later is said."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from pelton_programs import run_program

from pelton_platforms.cuda import compile_client, compiler


@pytest.fixture(scope="module")
def starts(tmp_path_factory, script_forks) -> list[dict[str, Any]]:
    """Three over one cache, and one that fails over another."""
    cache, other = (tmp_path_factory.mktemp("triton") for _ in range(2))
    # Else numpy starts threads, which no fork has.
    return run_program(
        "pelton_compile_ahead.py", f"{cache}", f"{cache}", f"{cache}:second", f"{other}:fails", OPENBLAS_NUM_THREADS="1"
    )


def test_each_kernel_is_compiled_once_and_a_second_start_finds_it(starts):
    assert [(start["compiled"], start["compiled_again"]) for start in starts[:3]] == [(5, 0), (0, 0), (0, 0)], (
        "the last start launches its kernels in another order"
    )


def test_nothing_runs_and_what_was_not_written_can_be_an_index(starts):
    assert starts[0]["gathered"] == [0] * 16 and starts[0]["others"] == [0, 0]


def test_launches_of_other_threads_and_later_ones_are_as_before(starts):
    assert starts[0]["launched"] == ["triple_kernel", "triple_kernel", "double_kernel"]
    assert starts[0]["kept_by_launcher"] == 0 and starts[0]["is_told_later"]


def test_a_step_that_fails_fails_no_start(starts):
    start = starts[3]
    assert start["compiled"] == 5 and start["launched"][-1] == "double_kernel"


def test_kernels_are_loaded_one_at_a_time():
    """Threads share the module of the C functions that launch kernels."""
    at_once, most = [], []

    class Kernel:
        name = "some_kernel"

        @property
        def run(self):
            at_once.append(self)
            most.append(len(at_once))
            time.sleep(0.005)
            at_once.remove(self)

    with ThreadPoolExecutor(4) as threads, compiler._Ahead(threads, None, []) as ahead:
        for key in range(8):
            ahead.submit(key, Kernel, lambda kernel: None)
    assert most == [1] * 8


def test_what_a_step_compiles_is_said(caplog):
    caplog.set_level(logging.INFO, logger="pelton")
    for cache_hit in (True, False):
        compiler._tell(
            src=SimpleNamespace(name="some_kernel"), times=SimpleNamespace(total=1_234_000), cache_hit=cache_hit
        )
    assert [record.message for record in caplog.records if "compiled" in record.message] == [
        "compiled some_kernel: 1.2 s"
    ]


def test_processes_answer_for_what_is_no_kernel_and_end_when_they_are_told():
    server = compile_client.CompileServer(2)
    assert [server.compile(b"no kernel"), server.compile(b"[1]")] == [compile_client.FAILED] * 2
    server.close()
    assert server._process.returncode is not None


def test_processes_that_do_not_come_up_fail_what_they_are_asked(monkeypatch):
    monkeypatch.setattr(compile_client.sys, "executable", "/bin/false")
    server = compile_client.CompileServer(1)
    assert [server.compile(b"no kernel") for _ in range(2)] == [compile_client.FAILED] * 2
    server.close()
