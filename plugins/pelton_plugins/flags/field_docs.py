"""Strings below the fields of a settings struct: help texts and the docs' tables are made from them.

Read from the source when asked for, by its syntax tree: nothing is imported and nothing costs at start-up.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache


@cache
def field_docs(struct: type) -> dict[str, str]:
    """Field name to the text below it, bases included; empty where there is no source."""
    docs: dict[str, str] = {}
    for cls in reversed(struct.__mro__):
        docs.update(_module_docs(cls.__module__).get(cls.__qualname__, {}))
    return docs


def first_line(struct: type) -> str:
    """The first line of the struct's own docstring, or of its module's."""
    text = struct.__dict__.get("__doc__") or sys.modules[struct.__module__].__doc__ or ""
    return text.strip().splitlines()[0] if text.strip() else ""


@cache
def _module_docs(module_name: str) -> dict[str, dict[str, str]]:
    module = sys.modules.get(module_name)
    if module is None or module_name in ("builtins", "msgspec", "msgspec._core"):
        return {}
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError):
        return {}
    return {node.name: _class_docs(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _class_docs(node: ast.ClassDef) -> dict[str, str]:
    docs: dict[str, str] = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
            docs[field.target.id] = " ".join(text.value.value.split())
    return docs
