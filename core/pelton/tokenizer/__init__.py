"""Text to tokens and back: the interface, and text that grows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pelton import moved
from pelton.tokenizer.detokenizer import IncrementalDetokenizer
from pelton.tokenizer.interface import Tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer"]

if not TYPE_CHECKING:
    __getattr__ = moved.names_of(__name__)
