"""One table makes every column of a sampling parameter, so that a new one touches few files."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from pelton.messages.step import NewRequest
from pelton.sampling import columns
from pelton.sampling.columns import SAMPLING_COLUMNS, SamplingColumn, active_columns, columns_of, host_columns
from pelton.sampling_params import SamplingParams
from pelton_platforms.device.steps import batch_state
from pelton_platforms.device.steps.batch_state import BatchState

ROOT = Path(__file__).resolve().parents[3]
VOCAB = 50
TREES = ("core", "platforms", "backends", "plugins", "examples")
TRAFFIC = "plugins/pelton_plugins/bench/"  # draws requests with every parameter there is


def make_state(*params: SamplingParams) -> BatchState:
    state = BatchState(
        max_num_seqs=4,
        max_model_len=16,
        vocab_size=VOCAB,
        block_sizes=(4,),
        num_side_slots=1,
        device=torch.device("cpu"),
    )
    state.add(
        [
            NewRequest(
                request_id=str(slot),
                slot=slot,
                token_ids=[1, 2],
                num_prompt_tokens=2,
                sampling_params=one,
                block_ids=[[1]],
            )
            for slot, one in enumerate(params)
        ]
    )
    return state


def files_that_name(parameter: str) -> list[str]:
    found = [
        str(path.relative_to(ROOT))
        for tree in TREES
        for path in (ROOT / tree).rglob("*")
        if path.suffix in (".py", ".c", ".h") and re.search(rf"\b{parameter}\b", path.read_text())
    ]
    return sorted(name for name in found if not name.startswith(TRAFFIC))


FURTHER_PROTOCOLS = {
    f"plugins/pelton_plugins/server/{name}.py" for name in ("responses_input", "responses_protocol", "rules")
}


def test_a_parameter_with_kernels_on_every_device_touches_eight_files():
    """The parameter itself, its column, its filter, the HTTP field, and the kernels of two devices in two files each.

    Beside them a further protocol (`/v1/responses`), and the rules of fields, say which sampling fields they take."""
    assert [name for name in files_that_name("min_p") if name not in FURTHER_PROTOCOLS] == [
        "backends/pelton_backends/native/csrc/sampling.c",
        "backends/pelton_backends/native/csrc/sampling.h",
        "backends/pelton_backends/triton/ops/sampling/rows.py",
        "backends/pelton_backends/triton/ops/sampling/wide.py",
        "core/pelton/sampling/columns.py",
        "core/pelton/sampling_params.py",
        "platforms/pelton_platforms/device/sampling/filters.py",
        "plugins/pelton_plugins/server/protocol.py",
    ]


def test_every_column_is_a_parameter_and_neutral_by_default_but_for_the_temperature():
    greedy = SamplingParams(temperature=0.0)
    for column in SAMPLING_COLUMNS:
        assert column.name in SamplingParams.__struct_fields__
        assert column.read(greedy, VOCAB) == column.neutral_value(VOCAB)


def test_host_and_device_hold_what_the_requests_say():
    state = make_state(
        SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125),
        SamplingParams(),
        SamplingParams(temperature=0),
    )
    expected = {
        "temperature": [0.5, 1, 0, 0, 0], "top_k": [7, VOCAB, VOCAB, VOCAB, VOCAB],
        "top_p": [0.25, 1, 1, 1, 1], "min_p": [0.125, 0, 0, 0, 0],
    }  # fmt: skip
    assert {name: column.tolist() for name, column in state.sampling.items()} == expected
    assert {name: column.tolist() for name, column in state.host.sampling.items()} == expected
    assert list(state.sampling) == [column.name for column in SAMPLING_COLUMNS]
    for name in expected:
        assert torch.equal(getattr(state, name), state.sampling[name])
        assert state.sampling[name].data_ptr() % 16 == 0


def test_columns_that_no_row_uses_are_not_active():
    """Greedy rows use none, whatever they say."""
    greedy = SamplingParams(temperature=0, top_p=0.5, top_k=3)
    for params, active, max_top_k in (
        ([SamplingParams(temperature=0)], set(), 0),
        ([greedy], set(), 0),
        ([greedy, SamplingParams()], {"temperature"}, 0),
        ([SamplingParams(top_k=9), SamplingParams(top_k=4, min_p=0.1)], {"temperature", "top_k", "min_p"}, 9),
        ([SamplingParams(top_k=VOCAB), SamplingParams(top_p=0.9)], {"temperature", "top_p"}, 0),
    ):
        found, names, most = columns_of(params, VOCAB)
        assert (set(names), most) == (active, max_top_k)
        assert {name: column.tolist() for name, column in found.items()} == {
            column.name: pytest.approx([column.read(one, VOCAB) for one in params]) for column in SAMPLING_COLUMNS
        }


def test_a_row_of_the_table_is_all_that_a_new_column_takes(monkeypatch):
    new = SamplingColumn("sharpness", "float32", 2.0, lambda params, _: (params.extra_args or {}).get("sharpness", 2.0))
    for module in (columns, batch_state):
        monkeypatch.setattr(module, "SAMPLING_COLUMNS", (*SAMPLING_COLUMNS, new))
        monkeypatch.setattr(module, "FLOAT_COLUMNS", (*columns.FLOAT_COLUMNS, new), raising=False)
    state = make_state(SamplingParams(top_p=0.5), SamplingParams(extra_args={"sharpness": 3.5}))
    assert state.sampling["sharpness"].tolist() == [2.0, 3.5, 2.0, 2.0, 2.0]
    assert state.top_p.tolist() == [0.5, 1, 1, 1, 1]
    assert "sharpness" in active_columns(state.host.sampling, np.array([0, 1]), VOCAB)[0]
    assert "sharpness" not in active_columns(state.host.sampling, np.array([0]), VOCAB)[0]
    assert host_columns(2, VOCAB)["sharpness"].tolist() == [2.0, 2.0]
