"""Adapters on the GPU: greedy ids in float32 equal those of merged weights, in any mix, captured and not; in bfloat16 every kernel
of a product with adapters is near merged weights in float64, and rows without one keep their bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pelton_adapted import CASES, AdaptedCase, check_adapted
from pelton_e2e import GapReference, gap_reference, greedy, make_llm
from pelton_lora import merged_checkpoint

from pelton import LLM, LoRARequest
from pelton.testing.models import make_tiny_checkpoint

pytestmark = pytest.mark.gpu

NUM_TOKENS = 32
LENGTHS = (1, 5, 16, 17, 48, 130)
RANKS = {"one": 8, "two": 16, "wide": 40}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, tuple[GapReference, LoRARequest | None]]:
    """Of the base, and of adapters of several ranks: ids of merged weights, and the request."""
    folder = tmp_path_factory.mktemp("adapters")
    # Sizes that the kernels which add adapters themselves are made for.
    path = str(
        make_tiny_checkpoint(
            folder / "model", "llama", with_tokenizer=False, hidden_size=256, intermediate_size=512, head_dim=64,
            num_attention_heads=4, num_key_value_heads=2,
        )
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(10, 300, (length,), generator=generator).tolist() for length in LENGTHS]
    found: dict[str | None, tuple[GapReference, LoRARequest | None]] = {
        None: (gap_reference("base", path, prompts, NUM_TOKENS, "cuda"), None)
    }
    for seed, (name, rank) in enumerate(RANKS.items()):
        (folder / name).mkdir()
        adapter, merged = merged_checkpoint(folder / name, path, seed=seed, rank=rank, strength=0.03)
        reference = gap_reference(name, merged, prompts, NUM_TOKENS, "cuda")
        assert reference.outputs != found[None][0].outputs
        found[name] = reference, LoRARequest(name, seed + 1, adapter)
    return found


@pytest.fixture(params=["captured", "eager"])
def llm(request: pytest.FixtureRequest, references: Any) -> Iterator[LLM]:
    settings = {"enforce_eager": True, "max_num_batched_tokens": 64} if request.param == "eager" else {}
    with make_llm(
        references[None][0].path, device="cuda", enable_lora=True, max_loras=4, max_lora_rank=40, **settings
    ) as llm:
        yield llm


def run(llm: LLM, prompts: list[list[int]], requests: Any) -> list[list[int]]:
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], greedy(NUM_TOKENS), use_tqdm=False, lora_request=requests
    )
    assert not [output.error for output in outputs if output.error is not None]
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_ids_equal_merged_weights_in_any_mix(llm: LLM, references: Any) -> None:
    order = [(reference, lora) for reference, lora in references.values()]
    prompts = [prompt for index in range(len(LENGTHS)) for prompt in [order[0][0].prompts[index]] * len(order)]
    for _ in range(2):  # the second time captured, and with prefixes found
        outputs = run(llm, prompts, [lora for _ in LENGTHS for _, lora in order])
        for place, (reference, _) in enumerate(order):
            reference.check(outputs[place :: len(order)])
    reference, lora = references["two"]
    for prompt, expected in zip(reference.prompts[:3], reference.outputs, strict=False):  # one row
        assert run(llm, [prompt], lora) == [expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_products_of_few_rows(name: str, dtype: torch.dtype) -> None:
    slots, options = CASES[name]
    case = AdaptedCase(slots, dtype=dtype, device="cuda", **options)
    for family in ("gemv", "hopper"):
        if family == "gemv" or dtype is not torch.float32:  # tensor cores would round float32's inputs
            check_adapted(case, family)


@pytest.mark.parametrize("count", [9, 16, 33, 64])
@pytest.mark.parametrize("rank", [16, 64])
def test_products_of_more_rows(count: int, rank: int) -> None:
    slots = [index % 4 - 1 for index in range(count)]
    for parts, options in (
        ((512, 128, 128), {"norm": True, "has_bias": True}),
        ((256,), {}),
        ((768, 768), {"norm": True, "activation": "silu"}),
    ):
        case = AdaptedCase(slots, 512, parts, dtype=torch.bfloat16, device="cuda", rank=rank, **options)
        check_adapted(case, "hopper")


@pytest.mark.parametrize(("count", "num_slots", "rank"), [(32, 8, 16), (64, 64, 16), (40, 30, 64), (64, 20, 32)])
def test_products_of_many_adapters(count: int, num_slots: int, rank: int) -> None:
    """More than fill one buffer of the kernel, twice in turn with others: what one step leaves is not taken in the next."""
    slots = [(7 * index) % (num_slots + 1) - 1 for index in range(count)]
    for size, parts, options in (
        (1024, (1024, 256, 256), {"norm": True}),
        (9216, (512,), {"has_bias": True}),
        (1024, (9216, 9216), {"norm": True, "activation": "silu"}),
        (4096, (9216, 9216), {"norm": True, "activation": "silu"}),  # A of few of them in more shares
    ):
        case = AdaptedCase(
            slots, size, parts, dtype=torch.bfloat16, device="cuda", rank=rank, num_slots=num_slots, **options
        )
        check_adapted(case, "hopper")
        check_adapted(case, "hopper")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize(
    ("size", "parts", "options"),
    [
        pytest.param(1024, (2048, 512, 512), {"norm": True}, id="QKV"),
        pytest.param(1088, (4608,), {}, id="halved tiles"),
        pytest.param(1024, (1536, 1536), {"norm": True, "activation": "silu"}, id="gate and up"),
        pytest.param(1024, (2304, 2304), {"norm": True, "activation": "silu"}, id="halved tiles of gate and up"),
        pytest.param(1024, (520,), {}, id="by the library"),
    ],
)
def test_products_of_prompts(size: int, parts: tuple[int, ...], options: Any, rank: int, dtype: torch.dtype) -> None:
    """Of 2,100 rows: long runs of one adapter, each row another, and runs of rows without one."""
    slots = [0] * 500 + [(5 * index) % 8 - 1 for index in range(600)] + [-1] * 400 + [6] * 30 + [-1, 3] * 285
    case = AdaptedCase(slots, size, parts, dtype=dtype, device="cuda", rank=rank, num_slots=7, **options)
    check_adapted(case, "many")
