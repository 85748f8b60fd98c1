"""Each family's logits equal transformers' float32 logits, however the tokens are cut into steps."""

import pytest
import torch
from pelton_e2e import greedy_with_gaps

from pelton.testing.models import reference_logits


def assert_same_logits(got, want):
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert torch.equal(got.argmax(-1), want.argmax(-1))


# All tokens kept, windows beside, sinks, latents, an indexer's keys, caches that layers share: what the others have too.
KINDS_OF_CACHE = (
    "llama",
    "gemma3",
    "gpt_oss",
    "deepseek_v3_moe",
    "deepseek_v32",
    "axk2",
    "dots3_note",
    "hy_v4",
    "mistral_large4",
    "gemma3n",
    "gemma4",
    "cohere2",
    "olmo2",
)
of_each_kind_of_cache = pytest.mark.parametrize("family", KINDS_OF_CACHE, indirect=True)


def test_prefill_in_one_step(checkpoint, reference, make_driver, token_ids):
    got = make_driver(checkpoint).step({"a": token_ids})["a"]
    assert_same_logits(got, reference_logits(reference, token_ids))


def test_chunked_prefill(checkpoint, reference, make_driver, token_ids):
    driver = make_driver(checkpoint)
    chunks = [token_ids[:16], token_ids[16:33], token_ids[33:34], token_ids[34:97], token_ids[97:]]
    got = torch.cat([driver.step({"a": chunk})["a"] for chunk in chunks])
    assert_same_logits(got, reference_logits(reference, token_ids))


@pytest.mark.parametrize("family", [*KINDS_OF_CACHE, "llama4"], indirect=True)
def test_decode_one_token_a_step(checkpoint, reference, make_driver, token_ids):
    """Past each window, of 40 tokens at most, and past the end of three blocks; of Llama 4 past a chunk, too. The other families'
    decodes are those of `test_greedy_tokens_of_a_batch_equal_each_alone`."""
    driver = make_driver(checkpoint)
    got = torch.cat([driver.step({"a": [token]})["a"] for token in token_ids[:50]])
    assert_same_logits(got, reference_logits(reference, token_ids[:50]))


@of_each_kind_of_cache
def test_decodes_prefills_and_padding_in_one_step_do_not_touch_each_other(
    checkpoint, reference, make_driver, token_ids
):
    driver = make_driver(checkpoint)
    long, short, late = token_ids[:60], token_ids[60:67], token_ids[100:141]
    driver.step({"long": long[:49], "short": short[:3]})
    mixed = driver.step({"long": [long[49]], "late": late[:40], "short": short[3:6]}, num_padding=3)
    last = driver.step({"long": long[50:], "late": [late[40]], "short": [short[6]]}, num_padding=1)
    for name, ids, first in (("long", long, 49), ("late", late, 0), ("short", short, 3)):
        got = torch.cat([mixed[name], last[name]])
        assert_same_logits(got, reference_logits(reference, ids)[first:])


@of_each_kind_of_cache
def test_reused_blocks_leave_nothing_behind(checkpoint, reference, make_driver, token_ids):
    driver = make_driver(checkpoint)
    driver.step({"a": token_ids[:100]})
    for layer in driver.caches:  # what a failed request may have left
        for view in layer.views:
            view[1:] = float("nan")
    driver.finish("a")
    got = [driver.step({"b": token_ids[:21], "c": token_ids[50:54]})["b"]]
    got += [driver.step({"b": [token], "c": [7]})["b"] for token in token_ids[21:60]]
    assert_same_logits(torch.cat(got), reference_logits(reference, token_ids[:60]))


@of_each_kind_of_cache
def test_block_size_does_not_matter(checkpoint, reference, make_driver, token_ids):
    want = reference_logits(reference, token_ids[:90])
    for block_size in (1, 7, 128):
        driver = make_driver(checkpoint, block_size=block_size, num_blocks=600 // block_size + 3)
        got = torch.cat(
            [driver.step({"a": part})["a"] for part in (token_ids[:50], token_ids[50:51], token_ids[51:90])]
        )
        assert_same_logits(got, want)


def test_greedy_tokens_of_a_batch_equal_each_alone(checkpoint, reference, make_driver, token_ids):
    prompts = {"a": token_ids[:1], "b": token_ids[3:36], "c": token_ids[40:140], "d": token_ids[7:23]}
    is_alone = getattr(reference.config, "attention_chunk_size", None) is not None
    want, _ = greedy_with_gaps(reference, list(prompts.values()), 12, is_alone=is_alone)
    driver = make_driver(checkpoint)
    outputs = {name: [] for name in prompts}
    step = prompts
    for _ in range(12):
        logits = driver.step(step)
        step = {name: [int(logits[name][-1].argmax())] for name in step}
        for name, tokens in step.items():
            outputs[name] += tokens
    assert list(outputs.values()) == want


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3", "smollm3", "seed_oss", "glm4", "qwen3_moe", "mixtral", "minimax_m2"],
    indirect=True,
)
def test_wanted_tokens_alone(checkpoint, reference, make_driver, token_ids, monkeypatch):
    """The last layer leaves out what nobody reads, and writes every token's keys and values all the same."""
    driver = make_driver(checkpoint)
    model, wanted, compute = driver.model, torch.tensor([39, 60]), driver.model.compute_logits
    assert model.can_forward_tokens

    def logits_of_wanted(hidden, rows):
        return torch.nn.functional.pad(compute(hidden, rows[: len(wanted)]), (0, 0, 0, len(rows) - len(wanted)))

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", lambda batch: model.forward_tokens(batch, wanted))
        patch.setattr(model, "compute_logits", logits_of_wanted)
        got = driver.step({"a": token_ids[:61]})["a"][:2]
        wanted = wanted[:0]  # a prompt's part, behind which nothing is sampled
        driver.step({"a": token_ids[61:90]})
    want = reference_logits(reference, token_ids[:91])
    assert_same_logits(got, want[[39, 60]])
    assert_same_logits(driver.step({"a": [token_ids[90]]})["a"], want[90:])


@pytest.mark.parametrize("family", ["granite", "deepseek_v2", "olmo2"], indirect=True)
def test_layers_with_a_forward_of_their_own_compute_all_tokens(checkpoint, make_driver):
    assert not make_driver(checkpoint).model.can_forward_tokens


def test_layers_without_a_cache_run_for_the_memory_profile(checkpoint, make_driver, token_ids):
    from pelton.attention.metadata import ForwardBatch

    driver = make_driver(checkpoint)
    ids = torch.tensor(token_ids)
    hidden = driver.model(ForwardBatch(ids, torch.arange(len(ids)), (), len(ids)))
    assert driver.model.compute_logits(hidden, torch.tensor([0, 5])).shape == (2, 320)


def test_bfloat16_stays_near_float32(checkpoint, reference, make_driver, token_ids):
    got = make_driver(checkpoint, dtype=torch.bfloat16).step({"a": token_ids[:40]})["a"]
    want = reference_logits(reference, token_ids[:40])
    assert got.dtype == torch.float32
    near = torch.nn.functional.cosine_similarity(got, want, dim=-1) > 0.97
    # A row of a model with experts is another one where rounding chooses another expert.
    assert (
        near.float().mean() >= 0.8 if hasattr(reference.config.get_text_config(), "num_experts_per_tok") else near.all()
    )
