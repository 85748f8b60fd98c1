"""Clients' libraries are thousands of modules: imported by the tests that use them, not by each worker that collects them."""

from __future__ import annotations

import importlib
from typing import Any


class LateImport:
    """A module that is imported when one of its names is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # collection asks each object of a module for some
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
