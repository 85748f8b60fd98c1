"""Messages between the executor and its ranks, as msgpack: jobs to all of them through the ring, answers through a socket each."""

from __future__ import annotations

import importlib
import struct
from dataclasses import fields
from typing import Any

import msgspec

from pelton.config import EngineConfig
from pelton.errors import ErrorInfo, PluginError
from pelton.kv_cache.spec import KVCacheGroup, KVCachePlan, KVCacheSpec, KVCacheTensor
from pelton.messages.step import GrammarMasks, ModelOutput, SchedulerOutput
from pelton.model.resolved import ResolvedModel
from pelton.plugins import Plugins

FRAME = struct.Struct("<Q")
"""Length of an answer, before it."""


class _Message(msgspec.Struct, array_like=True, tag=True): ...


class Prepare(_Message):
    """First to each rank, perhaps while the model is being found."""

    config: EngineConfig
    plugin_names: list[str]
    plugin_digest: str
    store: str
    """File where the ranks' communicators find each other."""

    @classmethod
    def of(cls, config: EngineConfig, plugins: Plugins, store: str) -> Prepare:
        names = [plugin.name for plugin in plugins.loaded if not plugin.is_builtin]
        return cls(config, names, plugins.digest(), store)


class Start(_Message):
    """Second to each rank."""

    config: EngineConfig
    model: ResolvedModel


class Execute(_Message):
    output: SchedulerOutput


class Sample(_Message):
    masks: GrammarMasks


class Call(_Message):
    """A method of the rank's executor."""

    call_id: int
    method: str
    args: list[Any]


class Stop(_Message): ...


Job = Prepare | Start | Execute | Sample | Call | Stop


class StepDone(_Message):
    """The answer for a step, of the first rank of the last stage; another's when the step failed there, and for its transfers."""

    step_id: int
    output: ModelOutput | None = None
    error: ErrorInfo | None = None
    is_fatal: bool = False
    """The error says that the engine can do no more."""
    others_go_on: bool = False
    """The other ranks have done their part of the step: it failed behind that."""


class CallDone(_Message):
    """A rank's answer to a call; every rank gives one."""

    call_id: int
    result: Any = None
    error: ErrorInfo | None = None


Answer = StepDone | CallDone

encode = msgspec.msgpack.Encoder().encode
decode_job = msgspec.msgpack.Decoder(Job).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def spec_to_data(spec: KVCacheSpec) -> dict[str, Any]:
    """Return the class by its name, and the fields: a plugin's spec crosses as well as ours."""
    made_by = type(spec)
    return {
        "class": f"{made_by.__module__}:{made_by.__qualname__}",
        "fields": {field.name: getattr(spec, field.name) for field in fields(spec)},
    }


def spec_from_data(data: dict[str, Any]) -> KVCacheSpec:
    """Raises `PluginError` for anything but a spec with fields of plain data."""
    module, _, name = data["class"].partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, KVCacheSpec)):
        raise PluginError(f"{data['class']} is not a KVCacheSpec; ranks tell the engine of their layers by such alone.")
    try:
        spec: KVCacheSpec = msgspec.convert(data["fields"], found)
    except (msgspec.ValidationError, TypeError) as error:
        raise PluginError(
            f"{data['class']} cannot cross to another process: {error}. Give it fields of plain data (numbers, strings, tuples)."
        ) from None
    return spec


def plan_to_data(plan: KVCachePlan) -> dict[str, Any]:
    return {
        "num_blocks": plan.num_blocks,
        "tensors": [(tensor.size_bytes, tensor.shared_by) for tensor in plan.tensors],
        "groups": [
            (group.layer_names, spec_to_data(group.spec), group.num_padding_layers, list(map(spec_to_data, group.layer_specs)))
            for group in plan.groups
        ],
    }  # fmt: skip


def plan_from_data(data: dict[str, Any]) -> KVCachePlan:
    return KVCachePlan(
        num_blocks=data["num_blocks"],
        tensors=tuple(KVCacheTensor(size, tuple(shared_by)) for size, shared_by in data["tensors"]),
        groups=tuple(
            KVCacheGroup(tuple(names), spec_from_data(spec), num_padding, tuple(map(spec_from_data, specs)))
            for names, spec, num_padding, specs in data["groups"]
        ),
    )
