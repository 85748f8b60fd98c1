"""A kernel plugin can take every part of a step: five calls a layer, and nothing beside them."""

import sys
from types import ModuleType

import pytest
import torch

import pelton_backends.sdpa.plugin
import pelton_plugins.models.plugin
from pelton.entries import BackendEntry, OpEntry
from pelton.hookspecs import hookimpl
from pelton.testing.model_driver import ModelDriver
from pelton.testing.models import make_tiny_checkpoint
from pelton.testing.plugins import plugins_of
from pelton_backends.reference import ops as reference
from pelton_backends.sdpa.backend import SDPAAttention, SDPABackend

MODULE = "test_seams_kernels"
SEAMS = {
    "embed": reference.ReferenceEmbed,
    "add_norm_linear": reference.ReferenceAddNormLinear,
    "linear": reference.ReferenceLinear,
    "add_norm_gated_linear": reference.ReferenceAddNormGatedLinear,
    "add_norm_logits": reference.ReferenceAddNormLogits,
}


@pytest.fixture
def calls(monkeypatch):
    """A module of kernels that note their calls."""
    seen = []
    module = ModuleType(MODULE)

    def counting(seam, implementation):
        class Kernel:
            handles = frozenset(["has_bias", "unit_offset", "post_norm", "soft_cap", "scale"])
            unsupported = staticmethod(implementation.unsupported)

            @staticmethod
            def bind(needs, tensors):
                inner = implementation.bind(needs, tensors)

                def call(*args):
                    seen.append(seam)
                    return inner(*args)

                return call

        return Kernel

    class FusedAttention(SDPAAttention):
        def write_and_attend(self, qkv, positions, slot_mapping, metadata, output):
            seen.append("attention")
            super().write_and_attend(qkv, positions, slot_mapping, metadata, output)

    class FusedBackend(SDPABackend):
        name = "fused"

        def bind(self, layer):
            return FusedAttention(layer)

    for seam, implementation in SEAMS.items():
        setattr(module, seam, counting(seam, implementation))
    module.FusedBackend = FusedBackend
    monkeypatch.setitem(sys.modules, MODULE, module)
    return seen


class KernelPlugin:
    PELTON_API = ">=1,<2"

    @hookimpl
    def pelton_ops(self):
        return [OpEntry(name=f"kernel.{seam}", seam=seam, load=f"{MODULE}:{seam}", priority=100) for seam in SEAMS]

    @hookimpl
    def pelton_attention_backends(self):
        return [BackendEntry(name="fused", load=f"{MODULE}:FusedBackend", priority=100)]


FIVE_CALLS = pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "gemma3"], indirect=True, scope="session"
)
"""Families whose layers are keys and values of their own and a gated MLP, and no more."""


@FIVE_CALLS
def test_a_decode_step_is_five_calls_a_layer(calls, family, checkpoint, token_ids):
    plugins = plugins_of(pelton_backends.sdpa.plugin, pelton_plugins.models.plugin, KernelPlugin())
    driver = ModelDriver(checkpoint, plugins=plugins)
    assert {name for choice in driver.build.ops.choices for name in choice.names} == {
        *(f"kernel.{seam}" for seam in SEAMS), "reference.qk_norm_rope_write_kv",
    }  # fmt: skip
    driver.step({"a": token_ids[:20]})
    calls.clear()
    driver.step({"a": [7]})
    layer = ["add_norm_linear", "attention", "linear", "add_norm_gated_linear", "linear"]
    assert calls == ["embed", *layer * len(driver.model.layers), "add_norm_logits"]


@FIVE_CALLS
def test_a_layer_runs_no_torch_operator_outside_the_seams(checkpoint, make_driver, token_ids):
    """What a captured step would hold: with the seams replaced by fakes, a layer's own code allocates one output."""
    driver = make_driver(checkpoint)
    layer = driver.model.layers[1]
    operators = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            operators.append(str(function).split(".")[1])
            return function(*args, **(kwargs or {}))

    hidden = torch.zeros(1, driver.build.hf.hidden_size)
    qkv = torch.zeros(1, layer.qkv_proj.weight.shape[0])
    layer.qkv_proj.add_norm_linear = lambda hidden, residual: (qkv, hidden)
    layer.gate_up_proj.add_norm_gated_linear = lambda hidden, residual: (hidden, hidden)
    layer.o_proj.linear = layer.down_proj.linear = lambda x: x
    layer.attn.attend.write_and_attend = lambda qkv, positions, slot_mapping, metadata, output: None

    class Batch:
        cut = None
        attention = slot_mappings = (None,) * len(driver.backends)
        positions = torch.zeros(1, dtype=torch.int64)

    with Watch():
        layer(hidden, hidden, Batch)
    assert operators == ["empty", "view"]


@pytest.mark.parametrize("family", ["llama", "qwen3"], indirect=True, scope="session")
def test_o_is_told_which_tensors_are_read_behind_it(checkpoint, make_driver, monkeypatch):
    bind, told = reference.ReferenceLinear.bind, []

    def with_read_next(needs, tensors):
        inner = bind(needs, tensors)

        def call(x):
            return inner(x)

        call.read_next = lambda following: told.append((tensors.linear, following))
        return call

    monkeypatch.setattr(reference.ReferenceLinear, "bind", staticmethod(with_read_next))
    layers = make_driver(checkpoint).model.layers
    assert len(told) == len(layers) > 1
    for layer, (own, following) in zip(layers, told, strict=True):
        assert own.tensors["weight"].data_ptr() == layer.o_proj.weight.data_ptr()
        assert following["weight"].data_ptr() == layer.gate_up_proj.weight.data_ptr()


def test_a_backend_named_in_the_settings_beats_a_plugins_priority(calls, tmp_path, token_ids):
    from pelton.attention.selector import AttentionSelector

    path = make_tiny_checkpoint(tmp_path, "llama", with_tokenizer=False)
    plugins = plugins_of(pelton_backends.sdpa.plugin, pelton_plugins.models.plugin, KernelPlugin())
    entries = plugins.entries("pelton_attention_backends", device_type="cpu")
    ModelDriver(path, plugins=plugins, attention=AttentionSelector(entries, named="sdpa")).step({"a": token_ids[:9]})
    assert "attention" not in calls and calls.count("embed") == 1


def test_no_operator_of_a_step_needs_the_host(checkpoint, make_driver, token_ids, monkeypatch):
    """A captured graph can hold what the references run; attention itself is the backend's matter."""
    driver = make_driver(checkpoint)
    monkeypatch.setattr(SDPAAttention, "__call__", lambda self, query, metadata, output: output.copy_(query))
    operators = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            operators.add(str(function).split(".")[1])
            return function(*args, **(kwargs or {}))

    with Watch():
        driver.step({"a": [7], "b": token_ids[:20]}, num_padding=1)
    assert {"embedding", "index_put_"} <= operators and operators & {"mm", "addmm", "linear"}
    assert not operators & {"_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal"}
