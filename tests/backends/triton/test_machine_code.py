"""What the compiler makes of kernels for compute capability 9.0, with or without a GPU here.

The interpreter takes what the compiler refuses (a variable whose dtype a branch changes), so the caches of each dtype are
compiled. Of the decode chain the instructions are read: every program waits for the kernels before (ACQBULK) before it
writes anything or adds to a counter, lets the next one start (PREEXIT), and has its first loads on their way by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pelton_programs import run_program
from pelton_sass import INSTRUCTION, unwritten
from pelton_shared import once

DECODE = ("early", "split", "streamed")
CHAIN = ("QKV", "O", "gate and up", "down", "O of 32 rows", *DECODE)
LOADS = {"LDG", "LDGSTS", "UTMALDG"}
WRITES = {"STG", "ATOM", "ATOMG", "RED", "REDG", "UTMASTG", "UTMAREDG"}


WITH_ADAPTERS = (
    "QKV with an adapter", "gate and up of 32 rows with adapters", "down of 32 rows with adapters", "down of 64 rows, an adapter each",
)  # fmt: skip
OF_8B_WITH_ADAPTERS = "O of 32 rows with adapters"
OF_PROMPTS = ("QKV of prompts with adapters", "gate and up of prompts with adapters")
IN_E4M3 = (
    "gate and up in e4m3",
    "down in e4m3",
    "large gate and up in e4m3",
    "32 normed rows in e4m3",
    "down of 32 rows in e4m3",
)
IN_BLOCKS = ("gate and up in blocks", "128 rows of down in blocks", "128 rounded rows of gate and up in blocks")
MANY_IN_BLOCKS = ("many rounded rows of gate and up in blocks", "many rounded rows of down in blocks")
IN_INTEGERS = ("experts in int4_grouped", "experts in int8_grouped", "experts in int4_minima")
ON_HOPPER = (
    "experts on Hopper", "experts that stream", "experts in mxfp4 on Hopper", "experts in int4 on Hopper", "products in int4 on Hopper",
)  # fmt: skip
PACKED = {f"packed_{name}_kernel" for name in ("few_gate_up", "few_down", "gate_up", "down")} | {"decode_kernel"}
OTHERS = (
    *WITH_ADAPTERS, OF_8B_WITH_ADAPTERS, *OF_PROMPTS, *IN_E4M3, *IN_BLOCKS, *MANY_IN_BLOCKS, *IN_INTEGERS,
    "one row of a long matrix in e4m3", "many_gated", "dealt", "latent", "hopper_latent", "sparse", "sampling with all", "speculation",
    "drafts", "parts", "sums", "sent", "logits", "shares", "states", "delta_rule", "key_delta_rule", "other_states",
    "gate and up of 128 rows", "resident", "columns", "O before a large matrix",
)  # fmt: skip
EVERY = ("attention", "steps", "products", "vocabulary", "adapters", "mixture", "ranks")
"""Kernels whose instructions nobody looks at."""
OTHER_DTYPES = {
    ("bfloat16", "fp8_e4m3"): ("early", "streamed", "dealt", "prefill", "cascade", "write"),
    ("bfloat16", "fp8_e5m2"): ("split", "write"),
    ("float16", "bfloat16"): ("streamed",),
    ("float32", "float32"): ("latent", "sparse", "states", "delta_rule", "other_states"),
    ("float16", "float16"): ("states", "delta_rule", "key_delta_rule", "other_states"),
}


READ: dict[str, tuple[int, ...]] = {
    "states": (1, 2, 3, 4, 9, 14),  # of Mamba-2's size, and products of the largest and of heads of 16 numbers
    "delta_rule": (
        1,
        3,
        4,
        5,
        10,
        11,
    ),  # of Qwen3-Next's size; of the largest those which would spill with as many warps
    "key_delta_rule": (3, 4, 5, 6),  # of Kimi Linear's size
    "other_states": (1, 3, 5),
    "hopper_latent": (1,),
    "parts": (1, 2, 4),
    "sparse": (0, 2),
    "resident": (
        2,
        3,
        6,
        7,
        8,
        9,
        10,
        11,
    ),  # two pieces of a row, many rows, four tokens of a row, and two tiles of columns
    "many_gated": (),
    **dict.fromkeys(MANY_IN_BLOCKS, (1,)),  # the products
    "sampling with all": (),
    "QKV of prompts with adapters": (),  # gate and up have more to do
    "experts on Hopper": (2, 3, 8, 10, 15, 22, 24, 29, 31, 36, 38, 42, 43, 48, 50),
    # of two bytes, in e4m3, and the first one in blocks; both of rounded rows in e4m3, and in blocks; gpt-oss's; in tiles of 192 rows
    "experts that stream": (
        5,
        10,
        13,
    ),  # the first product with 32 pairs in e4m3, the second of bfloat16, the first in blocks
    "experts in int4 on Hopper": (2, 7, 13),
    "experts in mxfp4 on Hopper": (2, 7, 13),  # the first product with 16 and 32 pairs, the second one with 64
    "experts in int4_grouped": (2, 3, 5, 6, 8),
    "experts in int8_grouped": (3, 5, 8),
    "experts in int4_minima": (2, 6),
}
"""Of these names the instructions of some launches alone are read, in the order of launches: LLVM, ptxas and the disassembler take most of
the time. The others go to Triton's first representation, which shows what comes before the wait."""
Kernels = Callable[..., list[dict[str, Any]]]
pytestmark = pytest.mark.timeout(1200)  # the first test waits until all is compiled: minutes on a slow machine


def words_of(name: str) -> str:
    return f"{name}={','.join(map(str, READ[name]))}" if name in READ else name


def with_code(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = [kernel for kernel in kernels if "instructions" in kernel]
    assert found
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, script_forks: None) -> list[dict[str, Any]]:
    """All kernels. One program compiles them: its start takes as long as ten kernels. Instructions of other dtypes are not asked for,
    which takes as long again; experts on Hopper and all that is left come last, since what they take for granted stays."""
    words = ["bfloat16", "bfloat16", *map(words_of, (*CHAIN, *OTHERS))]
    for dtypes, names in OTHER_DTYPES.items():
        words += ["--", "--no-code", *dtypes, *names]
    words += [
        "--",
        "bfloat16",
        "bfloat16",
        *map(words_of, ON_HOPPER),
    ]
    words += ["--", "--no-code", "bfloat16", "bfloat16", *EVERY, "launched"]
    return once(tmp_path_factory, "sm90", lambda: run_program("pelton_sm90.py", *words))


@pytest.fixture(scope="module")
def bfloat16(made: list[dict[str, Any]]) -> Kernels:
    """Give the kernels of these names."""
    own = [kernel for kernel in made if kernel["dtypes"] == ["bfloat16", "bfloat16"]]
    return lambda *names: [kernel for name in names for kernel in own if kernel["of"] == name]


def test_caches_of_another_dtype_have_kernels(made: list[dict[str, Any]]) -> None:
    kernels = {(tuple(kernel["dtypes"]), kernel["of"]) for kernel in made if kernel["dtypes"] != ["bfloat16"] * 2}
    assert kernels == {(dtypes, name) for dtypes, names in OTHER_DTYPES.items() for name in names}


def test_every_kernel_that_is_launched_is_compiled(made: list[dict[str, Any]]) -> None:
    """The interpreter takes what the compiler refuses. A kernel that is new gets a case in pelton_every_kernel.py, or one whose
    instructions are read in pelton_sm90.py."""
    (launched,) = (set(one["kernels"]) for one in made if one["of"] == "launched")
    compiled = {f"{kernel['module']}.{kernel['kernel']}" for kernel in made if kernel["of"] != "launched"}
    assert len(launched) > 100 and launched - compiled == set()


def test_no_kernel_writes_before_the_wait_in_the_first_representation(made: list[dict[str, Any]]) -> None:
    """Of any size and dtype, where instructions are not read. Gluon's have another representation."""
    waiting = [kernel for kernel in made if "wait" in kernel.get("operations", ())]
    assert len(waiting) > 150
    for kernel in waiting:
        check_operations(kernel)


def check_operations(kernel: dict[str, Any]) -> None:
    operations = kernel["operations"]
    before = set(operations[: operations.index("wait")])
    assert not {"store", "atomic"} & before, f"{kernel['of']}: {kernel['kernel']} writes before the wait"


def test_latents_of_deepseeks_size_have_kernels(bfloat16: Kernels) -> None:
    attend, merge = bfloat16("latent")
    assert (attend["kernel"], merge["kernel"]) == ("latent_attention_kernel", "merge_kernel")
    assert attend["stack"] == merge["stack"] == 0


def test_latents_on_hopper_take_one_launch(bfloat16: Kernels) -> None:
    """Whatever shares a context brings its parts together itself: of one and of four programs. 32, and 128 heads, are compiled too."""
    kernels = bfloat16("hopper_latent")
    assert [kernel["kernel"] for kernel in kernels] == ["hopper_latent_kernel"] * 4
    (shared,) = with_code(kernels)
    assert shared["stack"] == 0 and "ATOMG" in shared["instructions"]
    assert ["atomic" in kernel["operations"] for kernel in kernels if kernel is not shared] == [False, True, True]


def test_sparse_attention_of_deepseeks_size_keeps_all_in_registers(bfloat16: Kernels) -> None:
    kernels = bfloat16("sparse")
    assert [kernel["kernel"] for kernel in kernels] == [
        "index_scores_kernel", "choose_kernel", *["sparse_latent_kernel", "merge_kernel"] * 3
    ]  # fmt: skip
    assert {kernel["stack"] for kernel in with_code(kernels)} == {0}


def test_no_kernel_reads_a_register_that_nothing_was_written_to(made: list[dict[str, Any]]) -> None:
    found = [kernel for kernel in made if "instructions" in kernel]
    assert len(found) > 70
    assert {kernel["kernel"]: kernel["unwritten"] for kernel in found if kernel["unwritten"]} == {}


def test_registers_that_nothing_was_written_to_are_found() -> None:
    text = """
        /*0000*/                   UMOV UR4, 0x400 ;
        /*0010*/                   ULDC.64 UR8, c[0x0][0x208] ;
        /*0020*/                   UIADD3 UR6, UP0, UR13, 0x20, URZ ;
        /*0030*/                   UIADD3.X UR7, UR13, -0x3ffffff0, URZ, UP0, !UPT ;
        /*0040*/              @!P1 LDG.E.U16 R0, desc[UR8][R4.64] ;
        /*0050*/                   HGMMA.64x16x16.F32.BF16 R56, R76, gdesc[UR4].tnspB, R56 ;
        /*0060*/                   HGMMA.64x16x16.F32.BF16 R56, gdesc[UR8], R56, gsb0 ;
    """
    code = [(name, operands) for _, name, operands in INSTRUCTION.findall(text)]
    assert unwritten(code) == {13, 10, 11}, "the one that is added to, and b's place of the last product"
    assert unwritten(code[:2] + code[4:5]) == set()


STATES = {
    "states": 3 * ["conv_kernel", "step_kernel", "conv_kernel", "chunk_states_kernel", "chunk_outputs_kernel"],
    "delta_rule": 3 * [
        "conv_kernel", "delta_step_kernel", "conv_kernel", "delta_written_kernel", "delta_states_kernel", "delta_outputs_kernel",
    ],
    "key_delta_rule": 3 * [
        "conv_kernel", "delta_step_kernel", "conv_kernel", "key_delta_blocks_kernel", "key_delta_written_kernel", "delta_states_kernel",
        "key_delta_outputs_kernel",
    ],
    "other_states": [
        "conv_kernel", "selective_scan_kernel", "conv_kernel", "selective_scan_kernel", "conv_kernel", "rg_lru_kernel",
        "conv_kernel", "rg_lru_kernel", "conv_kernel", "conv_kernel", "step_kernel", "chunk_states_kernel", "chunk_outputs_kernel",
    ],
}  # fmt: skip
ON_TENSOR_CORES = {
    "chunk_states_kernel", "chunk_outputs_kernel", "delta_states_kernel", "delta_outputs_kernel", "key_delta_written_kernel",
    "key_delta_outputs_kernel",
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_states_wait_before_they_read_and_keep_all_in_registers(bfloat16: Kernels, name: str) -> None:
    """Of each size the kernels of a step of rows of one token, and of one of rows of any number."""
    found = bfloat16(name)
    assert [kernel["kernel"] for kernel in found] == STATES[name]
    assert {kernel["stack"] for kernel in with_code(found)} == {0}
    for kernel in found:
        if "operations" in kernel:
            operations = kernel["operations"]
            assert {"launch_dependents", "store"} <= set(operations)
            assert not {"load", "store", "atomic"} & set(operations[: operations.index("wait")]), kernel["kernel"]
    for kernel in with_code(found):
        code = kernel["instructions"]
        assert "PREEXIT" in code and not (WRITES | LOADS) & set(code[: code.index("ACQBULK")]), kernel["kernel"]
        assert WRITES & set(code)
        if kernel["kernel"] in ON_TENSOR_CORES:
            assert {"HGMMA", "HMMA"} & set(code), kernel["kernel"]  # the latter of heads of 16 numbers


def test_kernels_of_several_ranks_keep_all_in_registers(bfloat16: Kernels) -> None:
    """Attention to a rank's part of the tokens, split and whole, over latents too; sums with residual and norm."""
    found = bfloat16("parts", "sums")
    assert [kernel["kernel"] for kernel in found] == [
        "context_part_kernel", "merge_context_kernel", "context_part_kernel", "latent_attention_kernel", "merge_kernel",
        "sum_add_norm_kernel", "sum_add_norm_kernel", "sum_add_norm_many_kernel",
    ]  # fmt: skip
    assert {kernel["stack"] for kernel in with_code(found)} == {0}
    for kernel in found[-3:]:
        wait, write = (kernel["instructions"].index(name) for name in ("ACQBULK", "STG"))
        assert wait < write


@pytest.fixture(scope="module")
def chain(bfloat16: Kernels) -> list[dict[str, Any]]:
    kernels = bfloat16(*CHAIN)
    assert [kernel["of"] for kernel in kernels] == list(CHAIN), "a seam is one kernel"
    return kernels


def test_the_decode_chain_keeps_all_in_registers(chain: list[dict[str, Any]]) -> None:
    assert {kernel["of"]: kernel["stack"] for kernel in chain} == dict.fromkeys(CHAIN, 0)


def test_products_with_adapters_fetch_before_they_wait_and_write_behind(bfloat16: Kernels) -> None:
    kernels = bfloat16(*WITH_ADAPTERS)
    assert [kernel["kernel"] for kernel in kernels] == [
        "add_norm_linear_kernel", "_add_norm_kernel", "adapted_gated_kernel", "adapted_words_kernel", "adapted_shared_kernel"
    ], "no kernel more than without adapters"  # fmt: skip
    for kernel in kernels:
        code, name = kernel["instructions"], f"{kernel['of']}: {kernel['kernel']}"
        early = set(code[: code.index("ACQBULK")])
        assert early & LOADS, f"{name}: nothing is on its way before the wait"
        assert not early & WRITES, f"{name}: it writes before the wait"
        assert kernel["stack"] == 0, f"{name}: registers are spilled"


def test_a_program_of_attention_fits_beside_one_of_a_product_with_adapters(bfloat16: Kernels) -> None:
    """Llama-3.1-8B's QKV has this kernel, too; with 128 bytes too many, attention of 32 rows behind it took 0.9 us longer."""
    (product,) = bfloat16(OF_8B_WITH_ADAPTERS)
    attention, own = (
        18_432,
        1024,
    )  # bytes of a program of four query heads a kv head; what a multiprocessor keeps of each program's
    assert product["kernel"] == "adapted_words_kernel"
    assert product["shared"] + attention + 2 * own <= 228 << 10


def test_prompts_with_adapters_are_multiplied_by_one_kernel(bfloat16: Kernels) -> None:
    kernels = bfloat16(*OF_PROMPTS)
    names = ["_add_norm_kernel", "_shrink_kernel", "_sum_kernel", "adapted_matmul_kernel"]
    assert [kernel["kernel"] for kernel in kernels] == 2 * names, "B's product is no kernel of its own"
    for kernel in with_code(kernels):
        assert kernel["stack"] <= 24, f"{kernel['of']}: {kernel['kernel']} spills more than the base's product"


def test_nothing_is_written_before_the_wait(chain: list[dict[str, Any]]) -> None:
    for kernel in chain:
        name, code = kernel["of"], kernel["instructions"]
        assert "PREEXIT" in code, f"{name}: the next kernel may not start early"
        assert "ACQBULK" in code, f"{name}: it never waits for the kernels before"
        assert not WRITES & set(code[: code.index("ACQBULK")]), f"{name}: it writes before the wait"
        assert WRITES & set(code), f"{name}: the list of writing instructions knows none of this kernel's"


def test_products_in_e4m3_wait_before_they_write_and_keep_all_in_registers(bfloat16: Kernels) -> None:
    kernels = bfloat16(*IN_E4M3)
    assert [kernel["kernel"] for kernel in kernels] == [
        "fp8_add_norm_linear_kernel", "fp8_linear_kernel", "one_row_kernel", "_add_norm_round_kernel",
        "multiply_kernel", "_round_kernel", "multiply_kernel",
    ]  # fmt: skip
    for kernel in kernels:
        code = kernel["instructions"]
        assert kernel["stack"] == 0 and "ACQBULK" in code and not WRITES & set(code[: code.index("ACQBULK")])
    assert "QGMMA" in kernels[-1]["instructions"], "many rows are multiplied by tensor cores in e4m3"
    code = kernels[2]["instructions"]
    assert "UTMALDG" in code[: code.index("ACQBULK")] and "QGMMA" in code, "weights are on their way before the wait"


def test_weights_in_blocks_are_on_their_way_before_the_wait(bfloat16: Kernels) -> None:
    kernels = bfloat16(*IN_BLOCKS)
    rows = ("_add_norm_split_kernel", "_split_row_kernel", "_add_norm_round_kernel")
    names = [name for one in rows for name in (one, "blocks_kernel")]
    assert [kernel["kernel"] for kernel in kernels] == names
    for kernel in kernels:
        code = kernel["instructions"]
        assert kernel["stack"] == 0 and not WRITES & set(code[: code.index("ACQBULK")])
    for kernel in kernels[1::2]:
        code = kernel["instructions"]
        assert {"UTMALDG", "LDG"} <= set(code[: code.index("ACQBULK")]) and "QGMMA" in code, "and a scale of each row"


def test_sums_of_many_rows_in_blocks_stay_in_registers(bfloat16: Kernels) -> None:
    """A block's sums are added in float32, while the other warp group's are made: nothing is spilled, moved or set to zero for them."""
    kernels = bfloat16(*MANY_IN_BLOCKS)
    assert [kernel["kernel"] for kernel in kernels] == [
        "_add_norm_round_kernel", "many_blocks_kernel", "_round_kernel", "many_blocks_kernel",
    ]  # fmt: skip
    for kernel in with_code(kernels):
        code = kernel["instructions"]
        places = [place for place, name in enumerate(code) if name == "QGMMA"]
        assert kernel["stack"] == 0 and len(places) == 16, (
            "four instructions of each warp group and half of its columns"
        )
        for first in (places[0], places[8]):
            loop = code[first : first + 160]
            assert loop.count("FFMA") >= 120 and not {"LDL", "STL", "MOV", "CS2R"} & set(loop)


def test_parts_of_one_row_are_handed_over_without_a_counter(bfloat16: Kernels) -> None:
    (kernel,) = bfloat16("one row of a long matrix in e4m3")
    code = kernel["instructions"]
    assert kernel["kernel"] == "one_row_kernel" and kernel["stack"] == 0
    assert not WRITES & set(code[: code.index("ACQBULK")]) and not {"ATOM", "ATOMG", "RED", "REDG"} & set(code)


def test_gate_and_up_of_many_rows_in_e4m3_leave_by_the_copy_engine(bfloat16: Kernels) -> None:
    (kernel,) = bfloat16("many_gated")
    wanted = {"warp_group_dot", "async_tma_copy_global_to_local", "async_tma_copy_local_to_global", "e4m3"}
    assert kernel["kernel"] == "hopper_matmul_kernel" and wanted <= set(kernel["operations"])


def test_logits_fetch_before_they_wait_and_leave_only_the_best(bfloat16: Kernels) -> None:
    few, wide = bfloat16("logits")
    assert (few["kernel"], wide["kernel"]) == ("vocab_kernel", "wide_vocab_kernel")
    code = few["instructions"]
    early = set(code[: code.index("ACQBULK")])
    assert "UTMALDG" in early and not early & WRITES
    assert {"HGMMA", "REDG"} <= set(code) and "STG" not in code
    check_warps_of_their_own(wide, 2)
    assert "REDG" in wide["instructions"] and "STG" not in wide["instructions"]


def check_warps_of_their_own(kernel: dict[str, Any], groups: int) -> None:
    """Check a kernel whose warps that copy and that multiply have instructions of their own, one behind the other."""
    code = kernel["instructions"]
    assert kernel["stack"] == 0 and code.count("ACQBULK") == 1 + groups, "all of them wait"
    assert "UTMALDG" in code[: code.index("PREEXIT")], (
        "the first copies come before the next kernel may start, and that before the wait"
    )
    assert code.index("PREEXIT") < len(code) - code[::-1].index("ACQBULK")
    assert not WRITES & set(code[: code.index("ACQBULK")])


def test_gate_and_up_of_many_rows_fetch_before_they_wait(bfloat16: Kernels) -> None:
    """The norm's kernel, and the product's."""
    _, product = bfloat16("gate and up of 128 rows")
    assert product["kernel"] == "mid_batch_kernel"
    check_warps_of_their_own(product, 1)


def test_rows_are_dealt_out_by_a_kernel_that_waits_too(bfloat16: Kernels) -> None:
    deal, decode = bfloat16("dealt")
    assert (deal["kernel"], decode["kernel"]) == ("deal_kernel", "decode_kernel")
    for kernel in (deal, decode):
        code = kernel["instructions"]
        assert kernel["stack"] == 0 and "PREEXIT" in code
        assert not WRITES & set(code[: code.index("ACQBULK")])
    code = decode["instructions"]
    assert LOADS & set(code[: code.index("ACQBULK")]), "the first chunk is loaded early"


def test_programs_that_run_at_once_copy_before_they_wait_and_keep_all_in_registers(bfloat16: Kernels) -> None:
    """A program that has nothing to do waits too, if it is the first one: its wait comes before all copies."""
    kernels = bfloat16("resident")
    assert [kernel["kernel"] for kernel in kernels] == ["deal_resident_kernel", "resident_decode_kernel"] * 6
    kernels = with_code(kernels)
    for kernel in kernels:
        code = kernel["instructions"]
        assert kernel["stack"] == 0 and "PREEXIT" in code and not WRITES & set(code[: code.index("ACQBULK")])
    for kernel in kernels[1::2]:
        code = kernel["instructions"]
        before = code[: len(code) - 1 - code[::-1].index("ACQBULK")]
        assert code.count("ACQBULK") == 2 and "LDGSTS" in before and not WRITES & set(before)


def test_loads_are_on_their_way_before_the_wait(chain: list[dict[str, Any]]) -> None:
    for kernel in chain:
        code = kernel["instructions"]
        assert LOADS & set(code[: code.index("ACQBULK")]), f"{kernel['of']}: nothing is loaded before the wait"


def test_all_columns_are_asked_for_before_one_is_used(bfloat16: Kernels) -> None:
    """A read of the host's memory takes 1.2 us: one after the other they took a step 9."""
    (take,) = bfloat16("columns")
    code = take["instructions"]
    assert not WRITES & set(code[: code.index("ACQBULK")]) and "PREEXIT" in code
    assert not LOADS & set(code[code.index("STG") :]) and len(code) < 150, (
        "as few as it takes: it finds none in a cache"
    )


def test_what_is_read_next_is_asked_for_behind_the_own_codes_and_before_the_wait(bfloat16: Kernels) -> None:
    (kernel,) = bfloat16("O before a large matrix")
    before = kernel["instructions"][: kernel["instructions"].index("ACQBULK")]
    assert before.count("UBLKPF") == 2 and LOADS & set(before[: before.index("UBLKPF")]) and kernel["stack"] == 0


def test_sampling_waits_before_it_writes(bfloat16: Kernels) -> None:
    kernels = bfloat16("sampling with all")
    assert len({kernel["kernel"] for kernel in kernels}) == 8
    for kernel in kernels:
        assert {"wait", "launch_dependents"} <= set(kernel["operations"]) and {"store", "atomic"} & set(
            kernel["operations"]
        )
        check_operations(kernel)


def test_greedy_rows_of_several_ranks_wait_before_they_write(bfloat16: Kernels) -> None:
    kernels = bfloat16("shares")
    assert [kernel["kernel"] for kernel in kernels] == [
        "gather_kernel", "_add_norm_kernel", "greedy_kernel", "end_best_kernel"
    ]  # fmt: skip
    for kernel in kernels:
        code = kernel["instructions"]
        assert WRITES & set(code) and not WRITES & set(code[: code.index("ACQBULK")]), kernel["kernel"]
        assert kernel["stack"] == 0


def test_rows_that_are_sent_leave_by_the_copy_engine(bfloat16: Kernels) -> None:
    """Each of a tile's two halves to this rank's memory and to the other's, in each of three warp groups."""
    product, total = bfloat16("sent")
    assert (product["kernel"], total["kernel"]) == ("hopper_matmul_kernel", "sum_sent_add_norm_kernel")
    assert product["instructions"].count("UTMASTG") == 3 * 2 * 2
    assert product["stack"] <= 16, "as with an activation"
    code = total["instructions"]
    assert total["stack"] == 0 and code.index("ACQBULK") < code.index("STG")


def test_speculation_waits_before_it_writes(bfloat16: Kernels) -> None:
    kernels = bfloat16("speculation", "drafts")
    assert [kernel["kernel"] for kernel in kernels] == [
        "lookup_kernel", "drafted_rows_kernel", "verify_kernel", "drafts_kernel"
    ]  # fmt: skip
    for kernel in kernels:
        code = kernel["instructions"]
        assert kernel["stack"] == 0 and "PREEXIT" in code, kernel["kernel"]
        assert not WRITES & set(code[: code.index("ACQBULK")]) and WRITES & set(code)


def test_packed_experts_are_decoded_in_registers_without_conversions(bfloat16: Kernels) -> None:
    """Codes are put below the bits of a power of two: an instruction that converts an integer is many times slower."""
    for name in IN_INTEGERS:
        kernels = [kernel for kernel in bfloat16(name) if kernel["kernel"] in PACKED]
        assert {kernel["kernel"] for kernel in kernels} == PACKED
        for kernel in with_code(kernels):
            assert kernel["stack"] == 0, f"{name}: {kernel['kernel']} spills registers"
            assert not {"I2F", "I2FP"} & set(kernel["instructions"]), f"{name}: {kernel['kernel']} converts"


def test_rows_of_sorted_experts_are_gathered_by_the_product(bfloat16: Kernels) -> None:
    every = with_code(bfloat16("experts on Hopper"))
    found, in_three_groups = every[:11], every[11:]
    assert [kernel["kernel"] for kernel in found] == ["experts_matmul_kernel"] * 11
    for kernel, product in zip(found, ["HGMMA"] * 2 + ["QGMMA"] * 7 + ["HGMMA"] * 2, strict=True):
        assert {"HGMMA", "QGMMA"} & set(kernel["instructions"]) == {product} and kernel["stack"] == 0
    gathers = ["LDGSTS" in kernel["instructions"] for kernel in found]
    assert gathers == [True, False, True, False, True, True, False, True, False, True, False], "rows of x lie anywhere"
    assert [kernel["kernel"] for kernel in in_three_groups] == ["three_groups_kernel"] * 4
    for kernel, product, is_gathered in zip(
        in_three_groups, ["HGMMA"] * 2 + ["QGMMA"] * 2, [True, False] * 2, strict=True
    ):
        code = kernel["instructions"]
        assert code.count(product) == 3 * 4 and not {"LDL", "STL"} & set(code) and kernel["stack"] == 0
        assert ("LDGSTS" in code) == is_gathered and "UTMALDG" in code, "weights are copied, and rows that are sorted"


def test_rounded_rows_of_sorted_experts_are_half_of_the_copies_and_products(bfloat16: Kernels) -> None:
    """Of rows that are sums of two, in e4m3: gathered, copied, and gathered in blocks."""
    sums = with_code(bfloat16("experts on Hopper"))[2:5]
    rounded = [with_code(bfloat16("experts on Hopper"))[place] for place in (5, 6, 7)]
    for name in ("LDGSTS", "QGMMA"):
        counts = [[kernel["instructions"].count(name) for kernel in kernels] for kernels in (sums, rounded)]
        assert [2 * count for count in counts[1]] == counts[0]


def test_weights_of_experts_are_on_their_way_before_the_choice(bfloat16: Kernels) -> None:
    """The first product with 32 pairs of inputs that are two numbers in e4m3 each: weights in e4m3 are not converted. The second one,
    of bfloat16, reads the choice, which is of the launch before the last, before it waits. The third is the first product with scales for
    blocks. The others are compiled alone."""
    found = with_code(bfloat16("experts that stream"))
    assert [kernel["kernel"] for kernel in found] == ["streamed_kernel"] * 3
    assert ["QGMMA" in kernel["instructions"] for kernel in found] == [True, False, True]
    for kernel, is_first in zip(found, (True, False, True), strict=True):
        code = kernel["instructions"]
        before, copies = code[: code.index("ACQBULK")], code[code.index("UTMALDG") :]
        assert not WRITES & set(before) and {"QGMMA", "HGMMA"} & set(code) and kernel["stack"] == 0
        if is_first:
            assert not LOADS & set(before)
            assert LOADS & set(copies[: copies.index("ACQBULK")]) == {"UTMALDG"}
            assert copies[copies.index("ACQBULK") :].index("PREEXIT") < 8, "nobody starts before the choice is there"
        else:
            assert "LDG" in before and LOADS & set(copies[: copies.index("LDG")]) == {"UTMALDG"}


def test_codes_of_some_rows_become_numbers_where_they_are_multiplied(bfloat16: Kernels) -> None:
    """As those of experts, below; groups of 128, gate and up, and groups of 64."""
    found = with_code(bfloat16("products in int4 on Hopper"))
    assert [kernel["kernel"] for kernel in found] == ["hopper_grouped_kernel"] * 8
    for kernel in found:
        code = kernel["instructions"]
        end = len(code) - code[::-1].index("HGMMA")
        loop = code[code.index("HFMA2") : end]
        assert kernel["stack"] <= 96 and not {"STS", "SHFL"} & set(loop)  # of 128 rows in groups of 64 most
        before = code[: code.index("ACQBULK")]
        assert "UTMALDG" in before and not WRITES & set(before)


@pytest.mark.parametrize("name, factor", [("mxfp4", "HMUL2"), ("int4", "HFMA2")])
def test_codes_of_experts_become_numbers_where_they_are_multiplied(name: str, factor: str, bfloat16: Kernels) -> None:
    """Nothing is exchanged through shared memory, and weights are on their way before the choice of experts is waited for."""
    found = with_code(bfloat16(f"experts in {name} on Hopper"))
    assert [kernel["kernel"] for kernel in found] == [f"{name}_kernel"] * 3
    for kernel in found:
        code = kernel["instructions"]
        end = len(code) - code[::-1].index("HGMMA")
        loop = code[code.index("LDSM") if name == "mxfp4" else code.index(factor) : end]
        assert kernel["stack"] == 0 and not {"STS", "SHFL", "LDL", "STL"} & set(loop)
        assert {factor, "HGMMA"} <= set(loop) and (name == "int4" or "LDS" not in loop)
        before = code[: len(code) - code[::-1].index("ACQBULK")]
        assert "LDGSTS" in before and not WRITES & set(before)
