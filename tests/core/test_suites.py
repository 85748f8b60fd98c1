"""Conformance suites say what they need, and fail where they would test nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("script_forks")

SUITES = """
import pytest
from pelton.kv_cache.interface import KVManagerContext
from pelton.testing.attention import AttentionBackendConformance
from pelton.testing.kv_cache import KVCacheManagerConformance
from pelton_backends.sdpa.backend import SDPABackend
from pelton_plugins.kv_cache.manager import PagedKVCacheManager


class Refusing(SDPABackend):
    @classmethod
    def unsupported(cls, needs, capability=None):
        return ["head size"] if needs.head_dim != 96 else super().unsupported(needs, capability)


class TestOfNothing(AttentionBackendConformance):
    backend = Refusing


class TestOfItsHeads(AttentionBackendConformance):
    backend = Refusing
    changes = {"head_dim": 96}


class TestForgetful(KVCacheManagerConformance):
    finds_prefixes = False

    def make_manager(self, plan, config, max_model_len, max_num_batched_tokens):
        context = KVManagerContext(
            plan=plan, config=type(config)(block_size=config.block_size, enable_prefix_caching=False), max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        return PagedKVCacheManager.make(context)


class TestThatForgetsToSaySo(TestForgetful):
    finds_prefixes = True
"""


def test_what_they_test_is_what_they_say(tmp_path):
    """A backend that refuses every case; one for heads of 96 alone; a KV-cache manager that finds no prefix."""
    module = tmp_path / "test_them.py"
    module.write_text(SUITES)
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-rfs", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-k",
            "some_case or OfItsHeads and oracle and mixed or Forg and not random", str(module),
        ],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert any("TestOfNothing::test_some_case_is_served" in line for line in failed), done.stdout[-3000:]
    assert not any("TestOfItsHeads" in line or "TestForgetful" in line for line in failed), failed
    assert any("TestThatForgetsToSaySo::test_a_salt_separates" in line for line in failed)
    assert "Refusing refuses every case" in done.stdout or "refuses every case, so nothing is tested" in done.stdout
    assert "finds_prefixes is False" in done.stdout
