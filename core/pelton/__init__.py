"""Pelton serves large language models. Light to import: torch comes with the first engine.

from pelton import LLM, SamplingParams
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pelton import moved

if TYPE_CHECKING:
    from pelton.config import AsyncEngineArgs, EngineArgs, EngineConfig
    from pelton.engine.input_processor import EmbedsPrompt, TextPrompt, TokensPrompt
    from pelton.hookspecs import hookimpl
    from pelton.lora.request import LoRARequest
    from pelton.messages.request import PoolingParams
    from pelton.outputs import ClassificationOutput, ClassificationRequestOutput, CompletionOutput  # isort: skip
    from pelton.outputs import EmbeddingOutput, EmbeddingRequestOutput, PoolingOutput, PoolingRequestOutput  # isort: skip
    from pelton.outputs import RequestOutput, ScoringOutput, ScoringRequestOutput  # isort: skip
    from pelton.sampling_params import BeamSearchParams, SamplingParams
    from pelton.sdk.async_llm import AsyncLLM, AsyncLLMEngine
    from pelton.sdk.llm import LLM
    from pelton.sdk.llm_engine import LLMEngine

__version__ = "0.1.0"

moved.install()

_NAMES = {
    "pelton.config": "AsyncEngineArgs EngineArgs EngineConfig",
    "pelton.engine.input_processor": "EmbedsPrompt TextPrompt TokensPrompt",
    "pelton.hookspecs": "hookimpl",
    "pelton.lora.request": "LoRARequest",
    "pelton.messages.request": "PoolingParams",
    "pelton.outputs": "ClassificationOutput ClassificationRequestOutput CompletionOutput EmbeddingOutput EmbeddingRequestOutput "
    "PoolingOutput PoolingRequestOutput RequestOutput ScoringOutput ScoringRequestOutput",
    "pelton.sampling_params": "BeamSearchParams SamplingParams",
    "pelton.sdk.async_llm": "AsyncLLM AsyncLLMEngine",
    "pelton.sdk.llm": "LLM",
    "pelton.sdk.llm_engine": "LLMEngine",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "LLM", "AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine", "BeamSearchParams", "ClassificationOutput",
    "ClassificationRequestOutput", "CompletionOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "EmbedsPrompt", "EngineArgs",
    "EngineConfig", "LLMEngine", "LoRARequest", "PoolingOutput", "PoolingParams", "PoolingRequestOutput", "RequestOutput",
    "SamplingParams", "ScoringOutput", "ScoringRequestOutput", "TextPrompt", "TokensPrompt", "__version__", "hookimpl",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pelton' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
