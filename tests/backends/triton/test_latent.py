"""The kernel for attention over latents against an oracle in float64."""

from __future__ import annotations

import pytest
import torch

from pelton.testing.paged_rows import step_metadata
from pelton_backends.triton.attention import latent
from pelton_backends.triton.runtime import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def random_step(rows, *, num_heads, latent_dim, rope_dim, block_size, dtype="float32", num_padding=0):
    """(query, cache, metadata, the context of each row), over scattered blocks; what no row has written is NaN."""
    generator = torch.Generator().manual_seed(0)
    head_dim, lengths = latent_dim + rope_dim, [new + before for new, before in rows]
    counts = [-(-length // block_size) for length in lengths]
    ids = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    cache = torch.full((sum(counts) + 1, block_size, head_dim), float("nan"))
    cache[0] = 0.0
    contexts = []
    for table, length in zip(tables, lengths, strict=True):
        context = torch.randn(length, head_dim, generator=generator).to(getattr(torch, dtype)).float()
        for place in range(length):
            cache[table[place // block_size], place % block_size] = context[place]
        contexts.append(context)
    common = step_metadata(rows, tables, block_size, num_padding=num_padding, device=DEVICE)
    query = torch.randn(common.num_tokens, num_heads, head_dim, generator=generator).to(getattr(torch, dtype))
    return query.to(DEVICE), cache.to(getattr(torch, dtype)).to(DEVICE), common, contexts


def oracle(query, rows, contexts, scale, latent_dim):
    results, token = [], 0
    for (new, before), context in zip(rows, contexts, strict=True):
        for position in range(before, before + new):
            seen = context[: position + 1].double()
            weights = (query[token].double().cpu() @ seen.T * scale).softmax(-1)
            results.append(weights @ seen[:, :latent_dim])
            token += 1
    return torch.stack(results)


CASES = {
    "decode": (
        ((1, 0), (1, 15), (1, 16), (1, 70)),
        {"num_heads": 4, "latent_dim": 32, "rope_dim": 16, "block_size": 16},
    ),
    "decode-long": (((1, 700),), {"num_heads": 2, "latent_dim": 16, "rope_dim": 8, "block_size": 16}),
    "prompts": (((5, 0), (17, 30)), {"num_heads": 3, "latent_dim": 24, "rope_dim": 8, "block_size": 7}),
    "mixed-padded": (
        ((1, 33), (1, 0), (9, 3), (2, 50)),
        {"num_heads": 20, "latent_dim": 40, "rope_dim": 16, "block_size": 16, "num_padding": 3},
    ),
    "bfloat16": (
        ((1, 40), (6, 20)),
        {"num_heads": 16, "latent_dim": 64, "rope_dim": 16, "block_size": 16, "dtype": "bfloat16"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, shape = CASES[name]
    query, cache, common, contexts = random_step(rows, **shape)
    latent_dim, num_tokens = shape["latent_dim"], common.num_actual_tokens
    output = torch.full((*query.shape[:2], latent_dim), 7.0, dtype=query.dtype, device=DEVICE)
    latent.latent_attention(
        query, cache, output, common.query_start_loc, common.seq_lens, common.block_table, scale=0.3,
        latent_dim=latent_dim, max_seq_len=common.max_seq_len,
    )  # fmt: skip
    want = oracle(query, rows, contexts, 0.3, latent_dim)
    tolerance = TOLERANCE[shape.get("dtype", "float32")]
    torch.testing.assert_close(output[:num_tokens].double().cpu(), want, atol=tolerance, rtol=tolerance)
    assert (output[num_tokens:] == 7.0).all(), "padding is left alone"


@pytest.mark.parametrize("splits", [3, 8])
def test_parts_of_a_context_are_merged(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "num_splits", lambda *_: splits)
    rows, shape = CASES["decode"]
    query, cache, common, contexts = random_step(rows, **shape)
    output = torch.empty(*query.shape[:2], shape["latent_dim"], dtype=query.dtype, device=DEVICE)
    latent.latent_attention(
        query, cache, output, common.query_start_loc, common.seq_lens, common.block_table, scale=0.3,
        latent_dim=shape["latent_dim"], max_seq_len=common.max_seq_len,
    )  # fmt: skip
    want = oracle(query, rows, contexts, 0.3, shape["latent_dim"])
    torch.testing.assert_close(output.double().cpu(), want, atol=2e-5, rtol=2e-5)


def test_few_tokens_share_long_contexts_among_programs() -> None:
    assert latent.splits_to_fill(1, 264, 100) == 1
    assert latent.splits_to_fill(1, 264, 100_000) == max(latent.SPLITS)
    assert latent.splits_to_fill(32, 264, 8192) == 8
    assert latent.splits_to_fill(32, 132, 8192) == 4
    assert latent.splits_to_fill(10_000, 264, 100_000) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    "num_heads, rows, num_padding, splits",
    [
        pytest.param(16, ((1, 0), (1, 15), (1, 16), (1, 1000), (1, 2047)), 0, None, id="rows-of-one-token"),
        pytest.param(16, ((1, 0), (1, 64), (1, 65), (1, 700)), 3, 3, id="parts-without-a-tile-padded"),
        pytest.param(16, ((1, 5000),), 0, 32, id="one-row-in-many-parts"),
        pytest.param(20, ((1, 33), (9, 3), (70, 900)), 3, 2, id="any-rows-some-heads"),
        pytest.param(128, ((1, 700), (1, 3000)), 0, 2, id="many-heads-in-parts"),
        pytest.param(128, ((1, 33), (9, 3), (2, 50)), 2, 1, id="many-heads-whole"),
    ],
)
def test_hopper_equals_the_oracle(num_heads, rows, num_padding, splits):
    """Programs of a context bring their parts together themselves, and leave the counters as they were."""
    from pelton_backends.triton.attention.latent_hopper import HopperLatent

    shape = {"num_heads": num_heads, "latent_dim": 512, "rope_dim": 64, "block_size": 16, "dtype": "bfloat16"}
    query, cache, common, contexts = random_step(rows, num_padding=num_padding, **shape)
    if not HopperLatent.serves(cache, latent_dim=512, dtype=torch.bfloat16):
        pytest.skip("only on Hopper")
    bound, want = HopperLatent(cache, num_heads=num_heads, scale=0.04), oracle(query, rows, contexts, 0.04, 512)
    num_tokens = common.num_actual_tokens
    for _ in range(3):
        output = torch.full((*query.shape[:2], 512), 7.0, dtype=query.dtype, device=DEVICE)
        bound(
            query, output, common.query_start_loc, common.seq_lens, common.block_table, max_seq_len=common.max_seq_len,
            splits=splits,
        )  # fmt: skip
        off = (output[:num_tokens].double().cpu() - want).norm(dim=-1) / want.norm(dim=-1)
        assert off.max() < 5e-3
        assert (output[num_tokens:] == 7.0).all(), "padding is left alone"
