"""Text to tokens and back. Neither torch nor transformers is imported here."""

from __future__ import annotations

from pathlib import Path

from pelton.config import EngineConfig
from pelton.model.resolved import ResolvedModel
from pelton.plugins import Plugins
from pelton.tokenizer.chat_template import ChatTemplate
from pelton.tokenizer.detokenizer import IncrementalDetokenizer
from pelton.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "Tokenizer", "load_tokenizer"]


def load_tokenizer(config: EngineConfig, model: ResolvedModel, plugins: Plugins) -> Tokenizer | None:
    """The tokenizer of a resolved model, its chat template replaced where the settings say so; None when none is wanted."""
    from pelton.model.resolve import find_format
    from pelton.tokenizer.chat_template import read_template

    if model.tokenizer_path is None:
        return None
    path = Path(model.tokenizer_path)
    tokenizer = find_format(path, plugins).load_tokenizer(path)
    if config.model.chat_template is not None:
        tokenizer.set_chat_template(read_template(config.model.chat_template))
    return tokenizer
