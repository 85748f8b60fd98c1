"""Run ops in C by the best instruction set, each in a process of its own, in which only what the op asked for is loaded.

Says in a line of JSON of each op which libraries were loaded beside the base; null where the op failed.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace

import torch
from pelton_linear_oracle import check, make_case
from pelton_lora_op import check_lora, make_lora_case
from pelton_moe_case import ROUTINGS, check_moe, moe_case

from pelton.ops.interface import AddNormLogitsNeeds, AddNormLogitsTensors, LinearSpec, LinearWeights, NormSpec
from pelton.ops.moe import RoutingSpec
from pelton.testing.attention import AttentionCase, AttentionStep
from pelton_backends.native import library
from pelton_backends.native.backend import NativeBackend
from pelton_backends.native.linear import NativeAddNormLinear, NativeAddNormLogits, NativeLinear
from pelton_backends.native.lora import NativeLora
from pelton_backends.native.moe import NativeMoe

BF16, F32, CPU = torch.bfloat16, torch.float32, torch.device("cpu")


def product(in_features: int = 64, dtype: torch.dtype = BF16, activation: str | None = None) -> None:
    check(make_case(30, in_features, 96, dtype, CPU, activation=activation), NativeAddNormLinear)


def bare_activation() -> None:
    case = make_case(30, 64, 96, BF16, CPU, norm=False)
    op = NativeLinear.bind(case.needs, case.tensors)
    assert op.take_activation("gelu")
    op(case.hidden.clone())


def logits(soft_cap: float | None) -> None:
    spec, norm = LinearSpec(in_features=64, out_features=96), NormSpec(size=64, eps=1e-5)
    needs = AddNormLogitsNeeds(dtype="bfloat16", norm=norm, linear=spec, vocab_size=96, soft_cap=soft_cap)
    weights = LinearWeights(spec, {"weight": torch.randn(96, 64).bfloat16()})
    op = NativeAddNormLogits.bind(needs, AddNormLogitsTensors(torch.ones(64).bfloat16(), weights))
    found = op(torch.randn(30, 64).bfloat16(), None, torch.arange(30))
    assert bool(found.isfinite().all()) and (soft_cap is None or found.abs().max() <= soft_cap)


def attention(**changes: object) -> None:
    case = replace(AttentionCase(rows=((1, 300), (70, 3)), dtype="bfloat16", head_dim=64, block_size=16), **changes)  # type: ignore[arg-type]
    step = AttentionStep(NativeBackend, case)
    step.write()
    torch.testing.assert_close(step.run().double(), step.expected(), atol=2e-2, rtol=2e-2)


def experts(dtype: torch.dtype = BF16, **options: object) -> None:
    check_moe(NativeMoe, *moe_case(CPU, ROUTINGS["softmax"], 40, dtype, (64, 32), **options), tolerance=0.06)


def experts_of_gpt_oss() -> None:
    routing = RoutingSpec(num_experts=6, top_k=2)
    made = moe_case(CPU, routing, 40, BF16, (64, 32), activation="swiglu_oai", limit=0.5, has_bias=True)
    check_moe(NativeMoe, *made, tolerance=0.06)


OPS: dict[str, Callable[[], None]] = {
    "bfloat16": product,
    "silu": lambda: product(activation="silu"),
    "logits": lambda: logits(None),
    "attention": attention,
    "experts": experts,
    "experts in blocks": lambda: experts(weight_format="q4_1"),
    "adapter": lambda: check_lora(make_lora_case([-1, 0], 64, (32,), dtype=BF16), NativeLora, [-1, 0]),
    "float32": lambda: product(dtype=F32),
    "odd": lambda: product(33),
    "gelu": lambda: product(activation="gelu"),
    "bare activation": bare_activation,
    "soft cap": lambda: logits(3.0),
    "attention in float32": lambda: attention(dtype="float32"),
    "narrow heads": lambda: attention(head_dim=48),
    "odd heads": lambda: attention(head_dim=17),
    "odd blocks": lambda: attention(block_size=7),
    "experts in float32": lambda: experts(F32),
    "experts of gpt-oss": experts_of_gpt_oss,
}


def loaded_by(run: Callable[[], None]) -> list[str] | None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            run()
            os.write(write, json.dumps(sorted(library.kernels().groups)).encode())
        except BaseException:  # a child that goes on would be a second test
            traceback.print_exc()
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as said:
        return json.loads(said.read() or "null")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.testing.assert_close(torch.ones(1), torch.ones(1))  # imports 500 modules, here once
    library.kernels()
    json.dump({name: loaded_by(run) for name, run in OPS.items()}, sys.stdout)
