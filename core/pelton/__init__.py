"""Pelton serves large language models. Light to import: torch comes with the first engine.

from pelton import LLM, SamplingParams
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pelton import moved

if TYPE_CHECKING:
    from pelton.config import EngineConfig
    from pelton.hookspecs import hookimpl
    from pelton.lora.request import LoRARequest
    from pelton.messages.request import PoolingParams
    from pelton.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput
    from pelton.sampling_params import BeamSearchParams, SamplingParams
    from pelton.sdk.async_llm import AsyncLLM
    from pelton.sdk.llm import LLM
    from pelton.sdk.llm_engine import LLMEngine

__version__ = "0.1.0"

moved.install()

_HOME = {
    "LLM": "pelton.sdk.llm",
    "LLMEngine": "pelton.sdk.llm_engine",
    "AsyncLLM": "pelton.sdk.async_llm",
    "EngineConfig": "pelton.config",
    "SamplingParams": "pelton.sampling_params",
    "BeamSearchParams": "pelton.sampling_params",
    "LoRARequest": "pelton.lora.request",
    "RequestOutput": "pelton.outputs",
    "CompletionOutput": "pelton.outputs",
    "PoolingParams": "pelton.messages.request",
    "PoolingRequestOutput": "pelton.outputs",
    "hookimpl": "pelton.hookspecs",
}

__all__ = [
    "LLM", "AsyncLLM", "BeamSearchParams", "CompletionOutput", "EngineConfig", "LLMEngine", "LoRARequest", "PoolingParams",
    "PoolingRequestOutput", "RequestOutput", "SamplingParams", "__version__", "hookimpl",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pelton' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
