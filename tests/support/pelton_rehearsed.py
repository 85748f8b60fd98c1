"""Starts of a tiny model for compute capability 9.0, and steps of odd sizes after each, all compiled only; says in a line of JSON
for each start how many kernels it compiled.

    python pelton_rehearsed.py STARTS FAMILY MODE [KV_DTYPE]      a program of its own: other tests interpret Triton's kernels

FAMILY may also be the folder of such a model: making one imports transformers, which takes seconds.

Tensors are on the CPU, where torch's part of a step runs, without its products. Each start is a fork of a process that has only
imported modules, which takes longer than a second start.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import random
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pelton_quick_end  # noqa: F401
import torch
from pelton_sm90 import Hopper
from torch.overrides import TorchFunctionMode
from triton.runtime import driver

import pelton_backends.triton
from pelton.config import CUDAGraphMode, EngineConfig
from pelton.kv_cache.planner import plan_kv_cache
from pelton.model.resolve import resolve_model
from pelton.plugins import load_plugins
from pelton.testing.graphs import FakeGraphRecorder
from pelton.testing.models import make_tiny_checkpoint
from pelton.worker.interface import WorkerContext
from pelton_platforms.cpu.platform import CPUPlatform
from pelton_platforms.cuda.compile_client import CompileServer
from pelton_platforms.cuda.compiler import FirstStart, compile_ahead
from pelton_platforms.device.graphs.graph_setup import use_graphs
from pelton_platforms.device.steps.model_runner import ModelRunner
from pelton_platforms.device.steps.step_shapes import padding_shape
from pelton_platforms.device.warm_up import WarmUpPlan, run_with_few_layers
from pelton_platforms.device.worker import DeviceWorker

MAX_NUM_SEQS, MAX_NUM_TOKENS, MAX_MODEL_LEN = 96, 2048, 4096


class HopperPlatform(CPUPlatform):
    """Memory of this machine, kernels of another one."""

    device_type = "cuda"
    pads_graphs = True
    supported_graph_modes = tuple(CUDAGraphMode)
    has_processes = True

    def graph_recorder(self) -> FakeGraphRecorder:
        return FakeGraphRecorder()

    first_start: FirstStart | None = None

    def compile_soon(self, run: Callable[[], None]) -> bool:
        """With processes, where nothing is compiled yet."""
        if any(Path(os.environ["TRITON_CACHE_DIR"]).glob("*")) or not self.has_processes:
            return False
        self.first_start = FirstStart(CompileServer(2), 0)
        self.first_start.compile_soon(run)
        return True

    def capability(self, local_rank: int = 0) -> tuple[int, int]:
        return 9, 0


class WithoutProducts(TorchFunctionMode):
    """A product of matrices is zeros, as all else is that a kernel of Triton leaves: torch's take half of a second start."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not torch.mm:
            return func(*args, **(kwargs or {}))
        out = (kwargs or {}).get("out")
        return args[0].new_zeros(len(args[0]), args[1].shape[1]) if out is None else out.zero_()


QUICK = Path(__file__).with_name("pelton_quick")
Popen: Any = next(kind for kind in subprocess.Popen.__mro__ if kind.__module__ == "subprocess")
"""By `exec`: compilers have to import what is in that folder."""


def pretend_hopper() -> None:
    """Whoever asks what the device is hears of an H200. Kernels are compiled to their first representation alone."""
    sys.path.append(str(QUICK))  # of compilers that this process starts, too
    runpy.run_path(str(QUICK / "sitecustomize.py"))
    driver.set_active(Hopper())
    found = pkgutil.walk_packages(pelton_backends.triton.__path__, "pelton_backends.triton.")
    modules = [importlib.import_module(info.name) for info in found]
    hopper = importlib.import_module("pelton_backends.triton.attention.prefill_hopper")
    answers: dict[str, Any] = {
        "has_pdl": True, "is_hopper": True, "num_sms": 132, "_hopper": hopper, "shared_memory": 232_448,
    }  # fmt: skip
    for module in modules:
        for name, answer in answers.items():
            if hasattr(module, name):
                setattr(module, name, lambda device, answer=answer: answer)


def make_checkpoint(folder: Path, family: str) -> Path:
    return make_tiny_checkpoint(folder / family, family, head_dim=64, max_position_embeddings=MAX_MODEL_LEN)


def start(family: str, mode: CUDAGraphMode, kv_dtype: str, folder: Path) -> DeviceWorker:
    path = Path(family) if Path(family).is_dir() else make_checkpoint(folder, family)
    config = EngineConfig.from_flat(
        model=str(path), device="cpu", dtype="bfloat16", kv_cache_dtype=kv_dtype, skip_tokenizer_init=True,
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_TOKENS, max_model_len=MAX_MODEL_LEN,
    )  # fmt: skip
    plugins = load_plugins()
    model = resolve_model(config, plugins)
    platform = HopperPlatform()
    platform.has_processes = mode is not CUDAGraphMode.NONE
    worker = DeviceWorker(WorkerContext(config=config, model=model, platform=platform, plugins=plugins))
    worker.init_device()
    worker.load_model()
    plan = plan_kv_cache(worker.kv_cache_specs(), 2**40, num_blocks_override=2000, max_model_len=MAX_MODEL_LEN)
    worker.initialize_kv_cache(plan)
    if mode is not CUDAGraphMode.NONE:
        use_graphs(worker.loaded, worker.runner, mode)
    return worker


def odd_steps(runner: ModelRunner) -> None:
    """Prompts of any length behind contexts of any length, alone and beside rows of one token, and such rows alone."""
    chooser = random.Random(1)
    most_in_pieces = 0 if runner.graphs is None else runner.graphs.dispatcher.most_piece_tokens
    for num_rows in (1, 3, MAX_NUM_SEQS):
        runner.run_padding(padding_shape(1, MAX_MODEL_LEN, num_rows - 1), piecewise=num_rows <= most_in_pieces)
    for _ in range(60):
        num_tokens = int(2 ** chooser.uniform(0, 10.9))
        num_decodes = chooser.choice([0, chooser.randrange(1, min(MAX_NUM_SEQS, MAX_NUM_TOKENS - num_tokens))])
        longest = max(num_tokens, int(2 ** chooser.uniform(0, 12)))
        shape = padding_shape(num_tokens, longest, num_decodes)
        runner.run_padding(shape, piecewise=shape.num_padded_tokens <= most_in_pieces)


@torch.inference_mode()
def count_compiled(family: str, mode: str, kv_dtype: str) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        worker = start(family, CUDAGraphMode(mode), kv_dtype, Path(folder))
    runner = worker.runner
    plan = WarmUpPlan.make(runner)

    def run(steps: Sequence[Callable[[], None]]) -> None:
        for step in steps:
            step()

    first_start = worker.platform.first_start
    told = {}
    if first_start is not None:
        first_start.close()
        told["early"] = len(first_start.compiled)
    told |= {
        "of_the_last_two": compile_ahead(lambda: run_with_few_layers(worker.model, plan.sentinels)),
        "of_all": compile_ahead(lambda: run_with_few_layers(worker.model, plan.all())),
        "of_all_layers": compile_ahead(lambda: run(plan.all()[::5])),
        "of_odd_steps": compile_ahead(lambda: odd_steps(runner)),
    }
    return told


def main(starts: str, family: str, mode: str, kv_dtype: str = "auto") -> None:
    pretend_hopper()
    subprocess.Popen = Popen  # type: ignore[misc]
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has one thread of several"
    for _ in range(int(starts)):
        child = os.fork()
        if child == 0:
            with WithoutProducts():
                print(json.dumps(count_compiled(family, mode, kv_dtype)))
            return
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"a start ended with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
