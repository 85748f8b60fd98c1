"""Tails: what a step does behind the model's forward pass, as values. They are parts of the key that a step is captured under.

A key without a tail ends at the hidden states.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variant:
    """Features of the `sample` op that the rows of a step ask for, at most."""

    is_greedy: bool = False  # every row takes its best token; False: each samples by its parameters and side tables
    has_mask: bool = False  # grammars
    has_logprobs: bool = False
    has_nuclei: bool = True  # rows may have a top_p without another filter

    def __str__(self) -> str:
        extras = [word for word, is_asked in (("masks", self.has_mask), ("logprobs", self.has_logprobs)) if is_asked]
        return " with ".join(["greedy" if self.is_greedy else "full", *([" and ".join(extras)] if extras else [])])

    @property
    def reads_side_tables(self) -> bool:
        return not self.is_greedy


GREEDY = Variant(is_greedy=True)
FULL = Variant()

only_best: ContextVar[bool] = ContextVar("pelton_only_best", default=False)
"""Set while `add_norm_logits` is called for rows whose `sample` op is greedy and has an attribute `takes_best = True`: both are of
one backend, and the logits' memory may stay unwritten where each row's best token goes with them."""


@dataclass(frozen=True, slots=True)
class Tail:
    """One of the classes below."""

    @property
    def reads_side_tables(self) -> bool:
        """Return whether a captured step reads the side tables where they lay then."""
        return False


@dataclass(frozen=True, slots=True)
class Logits(Tail):
    """The logits are left for a `Sample` that is run apart, or for torch ops that the host chooses."""

    def __str__(self) -> str:
        return "logits"


@dataclass(frozen=True, slots=True)
class Sample(Tail):
    """Each row that samples takes one token."""

    variant: Variant
    is_apart: bool = False
    """It begins at the logits that a step with the tail `Logits` left."""

    @property
    def reads_side_tables(self) -> bool:
        return self.variant.reads_side_tables

    def __str__(self) -> str:
        return f"sample {self.variant}" + (" from logits" if self.is_apart else "")


@dataclass(frozen=True, slots=True)
class Verify(Tail):
    """Each row keeps its drafts while they equal what is sampled in their places, and takes one token more."""

    variant: Variant

    @property
    def reads_side_tables(self) -> bool:
        return self.variant.reads_side_tables

    def __str__(self) -> str:
        return f"verify {self.variant}"


@dataclass(frozen=True, slots=True)
class Pool(Tail):
    """The model makes of each row's hidden states what a request that pools asked for. Never captured."""

    def __str__(self) -> str:
        return "pool"
