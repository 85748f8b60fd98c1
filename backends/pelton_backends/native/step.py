"""A step's inputs in C."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int64, c_void_p, pointer
from typing import TYPE_CHECKING, ClassVar

from pelton.ops.interface import (
    PrepareInputs,
    PrepareInputsNeeds,
    PrepareInputsTensors,
)
from pelton.worker.inputs import common_metadata
from pelton_backends.native import library

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import CommonMetadata
    from pelton.worker.batch_state import BatchTensors
    from pelton.worker.inputs import InputBuffers, StepShape


class Batch(Structure):
    """The batch by slot."""

    _fields_ = (
        ("token_ids", c_void_p), ("num_computed_tokens", c_void_p),
        ("token_stride", c_int64), ("max_model_len", c_int64), ("padding_slot", c_int64),
    )  # fmt: skip


class _Group(Structure):
    _fields_ = (
        ("table", c_void_p), ("table_stride", c_int64), ("block_table", c_void_p), ("block_table_stride", c_int64),
        ("slot_mapping", c_void_p), ("block_size", c_int64), ("ratio", c_int64),
    )  # fmt: skip


class _Inputs(Structure):
    _fields_ = (
        ("batch", POINTER(Batch)), ("input_ids", c_void_p), ("positions", c_void_p), ("query_start", c_void_p),
        ("seq_lens", c_void_p), ("groups", POINTER(_Group)), ("num_groups", c_int64),
    )  # fmt: skip


def make_batch(state: BatchTensors) -> Batch:
    return Batch(
        state.token_ids.data_ptr(), state.num_computed_tokens.data_ptr(), state.token_ids.stride(0),
        state.max_model_len, state.padding_slot,
    )  # fmt: skip


def _make_groups(state: BatchTensors, buffers: InputBuffers) -> list[_Group]:
    return [
        _Group(
            table.data_ptr(), table.stride(0), buffer.data_ptr(), buffer.stride(0), slot_mapping.data_ptr(), size, ratio
        )
        for table, buffer, slot_mapping, size, ratio in zip(
            state.block_tables, buffers.block_tables, buffers.slot_mapping, state.block_sizes,
            buffers.blocks_per_block, strict=True,
        )
    ]  # fmt: skip


def _no_kernels() -> list[str]:
    why = library.reason_against(dtype=None)
    return [why] if why else []


class NativePrepareInputs:
    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: PrepareInputsNeeds) -> list[str]:
        return _no_kernels()

    @staticmethod
    def bind(needs: PrepareInputsNeeds, tensors: PrepareInputsTensors) -> PrepareInputs:
        state, buffers = tensors.state, tensors.buffers
        groups, run = _make_groups(state, buffers), library.kernels_of_any_dtype().prepare_inputs
        inputs = _Inputs(
            pointer(make_batch(state)), buffers.input_ids.data_ptr(), buffers.positions.data_ptr(),
            buffers.query_start_loc.data_ptr(), buffers.seq_lens.data_ptr(), (_Group * len(groups))(*groups), len(groups),
        )  # fmt: skip
        struct = byref(inputs)

        def prepare(slots: Tensor, num_scheduled: Tensor, shape: StepShape) -> list[CommonMetadata]:
            slots, num_scheduled = slots.contiguous(), num_scheduled.contiguous()
            run(struct, slots.data_ptr(), num_scheduled.data_ptr(), shape.num_padded_reqs, shape.num_padded_tokens)
            return [common_metadata(state, buffers, group, shape) for group in range(len(groups))]

        return prepare
