"""Kernels that are compiled when they are first launched, and steps that are run to have them compiled."""

from __future__ import annotations

from contextvars import ContextVar

compile_only: ContextVar[bool] = ContextVar("pelton_compile_only", default=False)
"""Set by a platform's `compile_ahead` in the worker's thread: who would launch a kernel has it compiled instead. A kernel that is
launched all the same finds a step of nothing but padding, in memory that holds zeros where another one left its result out."""
