"""A plugin for tests of front ends: an executor named `fake_engine` over `FakeExecutor`, and a folder that installs it.

`install(folder)` writes package metadata that makes this module a plugin for every process that has the folder on its
import path; `make_model_folder(folder)` writes a model without weights. The engine process then starts without torch,
in a fraction of a second. What goes wrong is scripted with `plugin_config={"fake_engine": {...}}`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pelton.config import EngineConfig
from pelton.entries import Entry
from pelton.errors import ConfigError
from pelton.executor.interface import StepHandle
from pelton.hookspecs import hookimpl
from pelton.messages.step import ModelOutput, SchedulerOutput
from pelton.model.resolved import ResolvedModel
from pelton.plugins import Plugins
from pelton.testing.fake_executor import FakeExecutor

PELTON_API = ">=1,<2"
VOCAB_SIZE = 300
EOS_ID = 0


@hookimpl
def pelton_executors() -> Sequence[Entry]:
    return [Entry(name="fake_engine", load="pelton.testing.fake_engine:ScriptedExecutor", priority=1, doc="for tests")]


class Script(msgspec.Struct, forbid_unknown_fields=True):
    """Script of failures; step numbers count from 0."""

    step_s: float = 0.0
    hurry: str | None = None
    """A path: steps take no time while a file is there."""
    hold_start: str | None = None
    """A path: an engine does not start while a file is there."""
    fail_start: str | None = None
    fail_from_engine: int = 0
    """`fail_start` is of engines from this number on."""
    die_at_start: bool = False
    kill_at_step: int | None = None
    hang_at_step: int | None = None
    fail_at_step: int | None = None
    fail_before_step: int = 0
    """All steps before it fail."""


class ScriptedExecutor(FakeExecutor):
    """`FakeExecutor` that takes time, hangs, fails or dies where the script says so."""

    def __init__(self, config: EngineConfig, model: ResolvedModel, plugins: Plugins) -> None:
        super().__init__(config, model, plugins)
        self.script = msgspec.convert(config.plugin_config.get("fake_engine", {}), Script)
        while self.script.hold_start is not None and os.path.exists(self.script.hold_start):
            time.sleep(0.01)
        if self.script.die_at_start:
            os.write(2, b"the device is on fire\n")
            os.kill(os.getpid(), signal.SIGKILL)
        is_failing = config.parallel.data_parallel_rank >= self.script.fail_from_engine
        if self.script.fail_start is not None and is_failing:
            raise ConfigError(self.script.fail_start) from OSError("no such device")
        self.fails = lambda step_id: (
            "as the script says"
            if step_id == self.script.fail_at_step or step_id < self.script.fail_before_step
            else None
        )

    def execute(self, output: SchedulerOutput) -> StepHandle:
        handle = super().execute(output)
        if output.step_id == self.script.kill_at_step:
            os.kill(os.getpid(), signal.SIGKILL)
        hangs = output.step_id == self.script.hang_at_step
        hurries = self.script.hurry is not None and os.path.exists(self.script.hurry)
        return _SlowHandle(handle, 3600.0 if hangs else 0.0 if hurries else self.script.step_s)

    def call(self, method: str, *args: Any) -> Any:
        if method == "sleep_s":
            time.sleep(args[0])
        return super().call(method, *args)


class _SlowHandle(StepHandle):
    def __init__(self, handle: StepHandle, takes_s: float) -> None:
        self._handle = handle
        self._end = time.monotonic() + takes_s

    def ready(self) -> bool:
        return time.monotonic() >= self._end

    def result(self, timeout_s: float | None = None) -> ModelOutput:
        left = self._end - time.monotonic()
        if timeout_s is not None and left > timeout_s:
            time.sleep(timeout_s)
            raise TimeoutError
        if left > 0:
            time.sleep(left)
        return self._handle.result()


def install(folder: Path) -> Path:
    """Make this module an installed plugin for processes with `folder` on their import path."""
    info = folder / "pelton_fake_engine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pelton-fake-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pelton]\nfake_engine = pelton.testing.fake_engine\n")
    return folder


def make_model_folder(folder: Path, max_position_embeddings: int = 256) -> Path:
    """A Llama's config.json and a byte-level tokenizer with a token for every byte; no weights."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {"<eos>": EOS_ID} | {char: i + 1 for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<eos>", "chat_template": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"})
    )
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": max_position_embeddings, "eos_token_id": EOS_ID, "hidden_size": 8, "num_attention_heads": 1,
        "num_key_value_heads": 1, "num_hidden_layers": 1, "intermediate_size": 8,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def settings(model: Path, **more: Any) -> dict[str, Any]:
    """Flat settings of an engine over the fake executor."""
    return {
        "model": str(model), "load_format": "dummy", "distributed_executor_backend": "fake_engine", "max_num_seqs": 8,
        "max_num_batched_tokens": 64, "num_gpu_blocks_override": 257, "disable_log_stats": True,
    } | more  # fmt: skip
