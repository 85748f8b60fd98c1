"""The pooler against sums written out, with prompts cut into steps in every way."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pelton.layers.pooler import Pooler
from pelton.messages.request import PoolingParams
from pelton.model.interface import PooledRows
from pelton.model.pooling import PoolingSpec

SIZE = 6
BARE = PoolingParams(task="embed", use_activation=False)


class Model:
    """Its hidden states are what `forward` gave; its head is a sum."""

    def hidden_states(self, hidden, rows):
        return hidden if rows is None else hidden[rows]

    def classify(self, vectors):
        return vectors[:, :2] * 3


def make_pooler(pooling_type="mean", **fields):
    tasks = ["embed", "token_embed", "classify", "reward"]
    spec = PoolingSpec(tasks=tasks, pooling_type=pooling_type, **{"labels": ["a", "b"], **fields})
    return Pooler(config=SimpleNamespace(pooling=spec, dtype=torch.float32, adapters=None))


def step(parts, texts, params, num_padding=0):
    """Rows of a step: (text, first token, end), each text in the slot of its number."""
    counts = np.array([end - start for _, start, end in parts], dtype=np.int64)
    ends = counts.cumsum()
    hidden = torch.cat(
        [texts[text][start:end] for text, start, end in parts] + [torch.full((num_padding, SIZE), torch.nan)]
    )
    return hidden, PooledRows(
        params=[params[text] for text, _, _ in parts],
        slots=np.array([text for text, _, _ in parts]),
        starts=ends - counts,
        counts=counts,
        num_before=np.array([start for _, start, _ in parts]),
        is_last=np.array([end == len(texts[text]) for text, _, end in parts]),
        last_tokens=torch.from_numpy(ends - 1),
        query_start_loc=torch.tensor([0, *ends.tolist()], dtype=torch.int32),
    )


def expected(text, pooling_type):
    return {"mean": text.mean(0), "cls": text[0], "last": text[-1]}[pooling_type]


@pytest.mark.parametrize("pooling_type", ["mean", "cls", "last"])
@pytest.mark.parametrize("seed", range(4))
def test_prompts_cut_in_any_way_pool_as_whole_ones(pooling_type, seed):
    chooser, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    texts = {text: torch.randn(chooser.randint(1, 40), SIZE, generator=generator) for text in range(6)}
    params = {text: chooser.choice([BARE, PoolingParams(task="token_embed", use_activation=False)]) for text in texts}
    pooler, done, results = make_pooler(pooling_type), dict.fromkeys(texts, 0), {}
    while len(results) < len(texts):
        open_texts = [text for text in texts if text not in results]
        chooser.shuffle(open_texts)
        parts = []
        for text in open_texts[: chooser.randint(1, 4)]:
            end = min(done[text] + chooser.choice([1, 3, 50]), len(texts[text]))
            parts.append((text, done[text], end))
            done[text] = end
        hidden, rows = step(parts, texts, params, num_padding=chooser.choice([0, 3]))
        for (text, _, end), result in zip(parts, pooler(Model(), hidden, rows), strict=True):
            assert (result is None) == (end < len(texts[text]))
            if result is not None:
                results[text] = result
    for text, result in results.items():
        wanted = texts[text] if params[text].task == "token_embed" else expected(texts[text], pooling_type)
        torch.testing.assert_close(result, wanted, atol=1e-5, rtol=1e-5)


def test_a_prompt_that_starts_again_forgets_what_it_had():
    """It was preempted after its first step."""
    texts, params = {0: torch.randn(8, SIZE)}, {0: BARE}
    pooler = make_pooler("mean")
    assert pooler(Model(), *step([(0, 0, 5)], texts, params)) == [None]
    assert pooler(Model(), *step([(0, 0, 3)], texts, params)) == [None]
    (result,) = pooler(Model(), *step([(0, 3, 8)], texts, params))
    torch.testing.assert_close(result, texts[0].mean(0))


def test_rows_that_ask_for_different_things_in_one_step():
    texts = {text: torch.randn(4, SIZE) for text in range(6)}
    params = {
        0: PoolingParams(task="embed"),
        1: PoolingParams(task="embed", dimensions=2),
        2: PoolingParams(task="embed", dimensions=2, use_activation=False),
        3: PoolingParams(task="classify"),
        4: PoolingParams(task="reward"),
        5: PoolingParams(task="classify", use_activation=False),
    }
    parts = [(text, 0, 4) for text in texts]
    found = make_pooler("mean")(Model(), *step(parts, texts, params))
    means = [texts[text].mean(0) for text in texts]
    for result, wanted in zip(
        found,
        [
            means[0] / means[0].norm(), means[1][:2] / means[1][:2].norm(), means[2][:2],
            (means[3][:2] * 3).softmax(-1), means[4][:2] * 3, means[5][:2] * 3,
        ],
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(result, wanted)


def test_nan_of_one_row_stays_in_it():
    texts = {0: torch.randn(3, SIZE), 1: torch.full((2, SIZE), torch.nan), 2: torch.randn(5, SIZE)}
    parts = [(text, 0, len(texts[text])) for text in texts]
    first, second, third = make_pooler("mean")(Model(), *step(parts, texts, dict.fromkeys(texts, BARE)))
    assert second.isnan().all()
    torch.testing.assert_close(first, texts[0].mean(0))
    torch.testing.assert_close(third, texts[2].mean(0))
