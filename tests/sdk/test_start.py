"""What `LLM(...)` imports: every module costs a start of the demo a third of a millisecond."""

from __future__ import annotations

import subprocess
import sys

import pytest

START = """
import sys
from pelton import LLM
LLM(model="smollm2", max_model_len=256, num_gpu_blocks_override=17, device="cpu", log_level="warning")
sys.stdout.write("\\n".join(sys.modules))
"""

NOT_USED = (
    "jsonschema", "litestar", "llguidance", "prometheus_client", "transformers", "triton", "zmq",
    "pelton.engine.process", "pelton.engine.process_client", "pelton.lora.peft", "pelton.sdk.async_llm",
    "pelton.sdk.beam_search", "pelton_platforms.device.adapters", "pelton_platforms.device.steps.step_drafts",
    "pelton_plugins.models.experts", "pelton_plugins.server.serve", "pelton_plugins.speculative.ngram",
)  # fmt: skip


@pytest.fixture(scope="module")
def modules() -> set[str]:
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines())


def test_a_start_imports_nothing_that_it_does_not_use(modules):
    assert not modules.intersection(NOT_USED)


def test_a_start_imports_few_modules(modules):
    own = [name for name in modules if name.partition(".")[0].startswith("pelton")]
    assert len(own) <= 365, sorted(own)
    assert len(modules) <= 1_560


def test_ranks_wait_for_no_numpy():
    """They are started by `LLM(...)`, so when its module is imported: numpy would be half of that."""
    code = "import sys, pelton; pelton.LLM; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
