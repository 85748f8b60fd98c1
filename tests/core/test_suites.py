"""Conformance suites say what they need, and fail where they would test nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pelton.lora.request import LoRARequest
from pelton.quantization.plain import PlainWeights
from pelton.testing.lora_resolver import LoRAResolverConformance
from pelton.testing.model import ModelConformance, QuantizationConformance
from pelton.testing.output_parser import OutputParserConformance

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


class WithoutBias(PlainWeights):
    """A quantization method that forgets the biases of a matrix."""

    def __init__(self, config, model):
        pass

    def create(self, config, shards, *, bias, is_vocabulary=False):
        return super().create(config, shards, bias=False, is_vocabulary=is_vocabulary)


def test_a_quantization_method_that_forgets_biases_fails():
    suite = type("Suite", (QuantizationConformance,), {"factory": WithoutBias})()
    suite.test_logits_are_near_those_of_plain_weights(False)
    with pytest.raises(AssertionError, match="logits are off by"):
        suite.test_logits_are_near_those_of_plain_weights(True)


def test_one_text_as_the_markers_of_a_parser_fails():
    """Its letters are no markers."""
    parser = type("Parser", (), {"markers": classmethod(lambda cls, context: "[[")})
    suite = type("Suite", (OutputParserConformance,), {"parser_class": parser})()
    with pytest.raises(AssertionError, match="return a tuple of texts"):
        suite.test_markers_are_texts()


def test_a_resolver_that_gives_another_name_fails(tmp_path):
    class Resolver:
        async def resolve_lora(self, base_model_name, lora_name):
            return LoRARequest("other", 1, str(tmp_path))

    suite = type("Suite", (LoRAResolverConformance,), {"known_name": "sql"})()
    with pytest.raises(AssertionError, match="asked for 'sql', it gives 'other'"):
        suite.test_finds_what_is_there(Resolver())


def test_logits_of_another_dtype_fail():
    driver = type("Driver", (), {"step": lambda self, work: {"r": torch.zeros(1, 96, dtype=torch.bfloat16)}})()
    suite = type("Suite", (ModelConformance,), {"hf_config": {"vocab_size": 96}, "make": lambda self: driver})()
    with pytest.raises(AssertionError, match=r"gives torch\.bfloat16, not torch\.float32"):
        suite.test_logits_are_numbers_over_the_vocabulary()
