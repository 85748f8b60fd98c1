"""The kernels that Pelton launches, found in its code, and launches of those whose instructions no test reads.

For pelton_sm90.py, which compiles them: Triton's interpreter takes calls that its compiler refuses, such as one of a device function
that leaves out an argument whose default is a string. Optional arguments are there in one launch and None in another.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from pelton_adapted import AdaptedCase
from pelton_linear_oracle import make_case
from pelton_lora_op import make_lora_case
from pelton_moe_case import moe_case
from triton.runtime.jit import JITFunction

import pelton_backends
import pelton_platforms
from pelton.attention.interface import KVLayout
from pelton.kv_cache.spec import FullAttentionSpec
from pelton.ops.interface import (
    AddNormLogitsNeeds,
    AddNormLogitsTensors,
    EmbedNeeds,
    EmbedTensors,
    LinearSpec,
    LinearWeights,
    PrepareInputsNeeds,
    PrepareInputsTensors,
)
from pelton.ops.moe import AddNormMoeNeeds, AddNormMoeTensors, RoutingSpec
from pelton.testing.paged_rows import page_views
from pelton.worker.inputs import InputBuffers, StepShape
from pelton_backends.triton.attention.cascade import cascade_attention
from pelton_backends.triton.attention.prefill_hopper import HopperPrefill
from pelton_backends.triton.ops import embed, inputs, pinned
from pelton_backends.triton.ops import logits as head
from pelton_backends.triton.ops.linear import (
    coded,
    fp8,
    fp8_blocks,
    grouped,
    grouped_vocab,
    hopper_blocks,
    large_batch,
    split_k,
)
from pelton_backends.triton.ops.lora import gemv as lora_gemv
from pelton_backends.triton.ops.lora import linear as lora
from pelton_backends.triton.ops.moe import experts, normed
from pelton_backends.triton.ops.pieces import Norm
from pelton_platforms.device.steps.batch_state import BatchState
from pelton_platforms.gpu.peers import kernels, norm_kernel

CPU, HALF = torch.device("cpu"), torch.bfloat16


def launched_kernels() -> set[str]:
    """Names, with their modules, of Triton's functions that the host's functions name, or a value of a module (`Launcher(kernel)`)."""
    found: set[str] = set()
    for module in _modules():
        tree = ast.parse(inspect.getsource(module))
        known = {**vars(module), **dict(_imported(tree))}
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)):
                found |= {f"{value.fn.__module__}.{value.__name__}" for value in _named(node, known)}
    return found


def _modules() -> Iterator[ModuleType]:
    for package in (pelton_backends, pelton_platforms):
        (folder,) = package.__path__
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            path = Path(folder, *info.name.split(".")[1:])
            source = path / "__init__.py" if info.ispkg else path.with_suffix(".py")
            if re.search(r"launch|Launcher", source.read_text()):
                yield importlib.import_module(info.name)


def _imported(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """What functions import for themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pelton_"):
            module = importlib.import_module(node.module)
            for name in node.names:
                if hasattr(module, name.name):
                    yield name.asname or name.name, getattr(module, name.name)


def _named(node: ast.AST, known: dict[str, Any]) -> Iterator[JITFunction[Any]]:
    if isinstance(node, ast.FunctionDef) and isinstance(known.get(node.name), JITFunction):
        return
    value = None
    if isinstance(node, ast.Name):
        value = known.get(node.id)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        value = getattr(known.get(node.value.id), node.attr, None)
    if isinstance(value, JITFunction):
        yield value
    for child in ast.iter_child_nodes(node):
        yield from _named(child, known)


def attention() -> None:
    """Prompts on Hopper, whole and in parts; rows behind a common prefix that are split."""
    heads, kv_heads, dim, rows = 16, 8, 128, 64
    page = FullAttentionSpec(block_size=16, num_kv_heads=kv_heads, head_dim=dim, dtype="bfloat16")
    memory = torch.zeros(2 * page.page_size_bytes, dtype=torch.uint8)
    caches = page_views(memory, 2, page, KVLayout(heads_first=True))
    query, slopes = torch.zeros(rows, heads, dim, dtype=HALF), torch.ones(heads)
    lengths, starts = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows + 1, dtype=torch.int32)
    table = torch.zeros(rows, 512, dtype=torch.int32)
    for window, sinks, causal, skip_single, max_seq_len in (
        (64, slopes, True, True, 64), (None, None, False, False, 65536),
    ):  # fmt: skip
        bound = HopperPrefill(*caches, num_heads=heads, scale=1.0, sliding_window=window, sinks=sinks, pdl=True)
        bound(
            query, query, starts, lengths, table, num_reqs=1, first_row=0, max_seq_len=max_seq_len, causal=causal,
            skip_single=skip_single,
        )  # fmt: skip
    for sinks, cap, alibi in ((None, None, None), (slopes, 20.0, slopes)):
        cascade_attention(
            query[:2], *caches, query[:2], lengths, table, num_rows=2, prefix_len=1024, max_seq_len=65536, scale=1.0,
            sinks=sinks, soft_cap=cap, alibi_slopes=alibi, pdl=True,
        )  # fmt: skip


def steps() -> None:
    """Inputs of steps of one token a row, of few, and of many; what the host has pinned; the embedding."""
    state = BatchState(
        max_num_seqs=2, max_model_len=64, vocab_size=1000, block_sizes=(16,), num_side_slots=0, device=CPU
    )  # fmt: skip
    needs = PrepareInputsNeeds(max_num_tokens=64, max_num_seqs=2, block_sizes=(16,), max_model_len=64)
    prepare = inputs.TritonPrepareInputs.bind(
        needs, PrepareInputsTensors(state, InputBuffers(state, max_num_tokens=64))
    )
    slots = torch.zeros(2, dtype=torch.int64)
    for num_tokens, longest, decodes in ((2, 1, 2), (8, 4, 0), (64, 33, 0)):
        shape = StepShape(
            num_reqs=2, num_tokens=num_tokens, num_decode_rows=decodes, max_query_len=longest, max_seq_len=64,
            num_padded_reqs=2, num_padded_tokens=num_tokens,
        )  # fmt: skip
        prepare(slots, slots, shape)
    pinned.PinnedMemory(torch.zeros(1, 8, dtype=torch.int64)).give(torch.zeros(2, 2, dtype=torch.int32), slots[:1])
    for scale in (None, 33.9):
        given = EmbedNeeds(dtype="bfloat16", num_rows=16, hidden_size=1024, scale=scale)
        embed.TritonEmbed.bind(given, EmbedTensors(torch.zeros(16, 1024, dtype=HALF), 0))(slots)


def _packed(weight_format: str, rows: int, columns: int, *, has_bias: bool, is_ordered: bool = False) -> LinearWeights:
    """A matrix in codes, or in e4m3 with blocks, whose numbers nobody reads."""
    spec = LinearSpec(
        in_features=columns, out_features=rows, weight_format=weight_format, has_bias=has_bias, is_ordered=is_ordered
    )
    if weight_format == "fp8_blocks":
        tensors = {
            "weight": torch.zeros(rows, columns, dtype=torch.float8_e4m3fn), "weight_scale": torch.zeros(rows, columns // 128)
        }  # fmt: skip
    elif weight_format in coded.FORMATS:
        tensors = {
            "codes": torch.zeros(rows, columns // 2, dtype=torch.uint8),
            "scales": torch.zeros(rows, columns // 64),
        }
    else:
        words = columns * grouped.FORMATS[weight_format] // 32
        tensors = {
            "codes": torch.zeros(rows, words, dtype=torch.int32), "scales": torch.zeros(rows, columns // 128, dtype=torch.int32)
        }  # fmt: skip
    if is_ordered:
        tensors["order"] = torch.zeros(columns, dtype=torch.int32)
    return LinearWeights(spec, tensors, torch.zeros(rows, dtype=HALF) if has_bias else None)


def products() -> None:
    """With weights in codes and in blocks, of one row, of some, and of those that are decoded first."""
    size, out = 1024, 512
    for name, has_bias in (("nf4", False), ("fp4", True)):
        matrix = coded.CodedMatrix(_packed(name, out, size, has_bias=has_bias))
        _multiply(matrix, matrix.multiply_one, matrix.dequantized, size)
    for name, has_bias in zip(grouped.FORMATS, (False, True, True, False), strict=True):
        some = grouped.GroupedMatrix(_packed(name, out, size, has_bias=has_bias, is_ordered=has_bias), "bfloat16")
        _multiply(some, some.multiply_one, some.dequantized, size)
    for has_bias in (False, True):
        blocks = fp8_blocks.Fp8BlocksMatrix(_packed("fp8_blocks", out, size, has_bias=has_bias), "bfloat16")
        _multiply(blocks, blocks, blocks.decoded, size)
    for options in ({}, {"residual": False, "post_norm": True, "unit_offset": True}):
        for rows in (1, 32):
            for activation in (None, "silu"):
                case = make_case(rows, size, out, HALF, CPU, activation=activation, **options)
                case.packed = _packed("int4_grouped", out, size, has_bias=bool(options))
                kind = grouped.GroupedAddNormLinear if activation is None else grouped.GroupedAddNormGatedLinear
                case.call(kind.bind(case.needs, case.tensors))
    counters, weight = torch.zeros(64, dtype=torch.int32), torch.zeros(out, size, dtype=HALF)
    for bias, activation, scales in (
        (None, None, None),
        (weight[:, 0].clone(), "silu", (torch.ones(out), torch.ones(32))),
    ):
        kind = HALF if scales is None else torch.float8_e4m3fn
        x = torch.zeros(32, size).to(kind)
        split_k.multiply(x, weight.to(kind), bias, activation, counters, scales=scales, dtype=HALF)
    for activation in ("silu", "gelu", "gelu_tanh"):
        large_batch.gated(torch.zeros(2, 2 * size, dtype=HALF), activation)


def _multiply(many: Any, one: Any, decoded: Any, size: int) -> None:
    one(torch.zeros(1, size, dtype=HALF))
    many(torch.zeros(32, size, dtype=HALF))
    decoded(slice(0, 64), HALF)


def vocabulary() -> None:
    """Embedding and head, plain and in codes, of one row, of some, and of many."""
    size, out = 1024, 512
    slots = torch.zeros(2, dtype=torch.int64)
    for name, scale in (("int4_grouped", None), ("int8_minima", 33.9)):
        weights = _packed(name, out, size, has_bias=False)
        needs = EmbedNeeds(dtype="bfloat16", num_rows=out, hidden_size=size, weight_format=name, scale=scale)
        grouped_vocab.GroupedEmbed.bind(needs, EmbedTensors(weights.tensors["codes"], 0, weights))(slots)
    for options in ({}, {"residual": False, "post_norm": True, "unit_offset": True, "bias": True}):
        case = make_case(8, size, out, HALF, CPU, **options)
        for weights in (case.tensors.linear, _packed("int4_grouped", out, size, has_bias=bool(options))):
            logits = AddNormLogitsNeeds(
                dtype="bfloat16", norm=case.norm_spec, linear=weights.spec, vocab_size=500, post_norm=case.post_spec,
                soft_cap=3.0 if options else None,
            )  # fmt: skip
            is_plain = weights.spec.weight_format == "plain"
            kind = head.TritonAddNormLogits if is_plain else grouped_vocab.GroupedAddNormLogits
            op = kind.bind(logits, AddNormLogitsTensors(case.norm, weights, case.post_norm))
            for rows in (1, 8):
                op(case.hidden, case.residual, torch.zeros(rows, dtype=torch.int64))


def adapters() -> None:
    """The op of adapters, of few tokens and of many, and its tokens by slot; A x of more rows than one."""
    for count in (4, 600):
        for options in ({"norm": False}, {"norm": True, "unit_offset": True}, {"norm": True, "activation": "silu"}):
            parts = (256, 256) if "activation" in options else (256, 128, 128)
            case = make_lora_case([0, 1, -1, 2] * (count // 4), 512, parts, dtype=HALF, has_tiles=True, **options)
            case.run(lora.TritonLora)
            lora.sort_rows(case.tensors.rows, count)
    for size, parts, norm in ((1024, (512,), False), (1024, (256, 128, 128), True)):
        own = AdaptedCase([0, 1, -1, 2], size, parts, dtype=HALF, device=CPU, norm=norm)
        kind = lora_gemv.LoraGemvAddNormLinear if norm else lora_gemv.LoraGemvLinear
        own.run(kind.bind(own.needs, own.tensors))


def mixture() -> None:
    """Experts of few tokens and of some, with and without biases, and behind their norm."""
    for options in ({}, {"has_bias": True, "activation": "swiglu_oai", "limit": 7.0}):
        needs, tensors, x, slots = moe_case(
            CPU, RoutingSpec(num_experts=8, top_k=2), 64, HALF, sizes=(256, 128), **options
        )
        for rows in (1, 64):
            experts.BoundMoe(needs, tensors)(x[:rows], slots[:rows])
        case = make_case(64, 256, 16, HALF, CPU, unit_offset=bool(options))
        behind = AddNormMoeNeeds(dtype="bfloat16", norm=case.norm_spec, moe=needs)
        op = normed.FewAddNormMoe.bind(behind, AddNormMoeTensors(case.norm, tensors))
        for rows in (1, 64):
            op(x[:rows], None if options else x[:rows].clone(), slots[:rows])
        op.read_by(lambda num_tokens: SimpleNamespace(takes_unsummed=True))
        norm = Norm(case.norm, case.norm_spec.eps, case.norm_spec.unit_offset)
        sums, _, residual = op(x, x.clone(), slots)
        large_batch.add_norm(sums, residual, case.norm, case.norm_spec)
        sums, _, residual = op(x, x.clone(), slots)
        fp8.add_norm_rounded(sums, residual, norm, None, None, None)
        sums, _, residual = op(x, x.clone(), slots)
        hopper_blocks.add_norm_split(sums, residual, norm, None)


def ranks() -> None:
    """Words from rank to rank, to all and to one; sums with residual and norm of four ranks' many rows."""
    words, addresses = torch.zeros(2048, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    sizes = {"RANK": 1, "SIZE": 4, "WORDS": kernels.WORDS, "SLOTS": kernels.SLOTS}
    for dtype in (None, tl.bfloat16, tl.float16, tl.float32):
        kernels.exchange_kernel[(4,)](words, words, addresses, words, words, 2048, 1000, DTYPE=dtype, **sizes)
    for sends in (False, True):
        kernels.move_kernel[(4,)](
            words, words, addresses, words, words, 2048, 1000, 2, SENDS=sends, AHEAD=kernels.AHEAD, PROGRAMS=kernels.PROGRAMS, **sizes,
        )  # fmt: skip
    for residual, post in ((words, None), (None, words)):
        norm_kernel.sum_add_norm_shared_kernel[(4,)](
            words, residual, words, words, words, post, addresses, words, words, 4, 1000, 1e-6, 0.0, NUMBERS=4096, ROW=2048,
            BLOCK=2048, RANK=1, SIZE=4, PROGRAMS=132, TURNS=norm_kernel.TURNS, DTYPE=tl.bfloat16, UNIT_OFFSET=post is not None,
            POST_UNIT_OFFSET=post is not None, PDL=True, num_warps=8, launch_pdl=True,
        )  # fmt: skip


EVERY = {function.__name__: function for function in (attention, steps, products, vocabulary, adapters, mixture, ranks)}
