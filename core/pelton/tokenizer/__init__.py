"""Text to tokens and back: the interface, text that grows, and how a model's tokenizer is found."""

from __future__ import annotations

from pathlib import Path

from pelton.config import EngineConfig
from pelton.model.resolved import ResolvedModel
from pelton.plugins import Plugins
from pelton.tokenizer.detokenizer import IncrementalDetokenizer
from pelton.tokenizer.interface import Tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer", "load_tokenizer"]


def load_tokenizer(config: EngineConfig, model: ResolvedModel, plugins: Plugins) -> Tokenizer | None:
    """The tokenizer of a resolved model, its chat template replaced where the settings say so; None when none is wanted."""
    from pelton.model.resolve import find_format

    if model.tokenizer_path is None:
        return None
    path = Path(model.tokenizer_path)
    tokenizer = find_format(path, plugins).load_tokenizer(path)
    if config.model.chat_template is not None:
        tokenizer.set_chat_template(config.model.chat_template)
    return tokenizer
