"""A Jinja environment in which a hostile template can waste neither time nor memory.

Templates come from model folders, and what they read from clients. The sandbox keeps them from Python's internals; this
file keeps them from work without end. Three means: the syntax tree is changed so that every loop turn counts (`tick`) and
every operation that can make a value grow (`~`, slices, list and dict displays) is a call that checks first; operators,
methods and filters that multiply are checked likewise; and what one rendering builds in all is bounded (`Budget`).
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from pelton.limits import MAX_TEMPLATE_OUTPUT_CHARS

MAX_SECONDS = 3.0
MAX_TURNS = 1_000_000  # of all loops and macro calls together
MAX_CHARS_BUILT = 8 * MAX_TEMPLATE_OUTPUT_CHARS  # by all operations of one rendering
MAX_NODES = 1_000_000  # of one list or dict, counting what it holds as often as it would be written
MAX_NUMBER_BITS = 4096
MAX_WIDTH = 10_000  # of padding and the like
DROPPED_FILTERS = ("pprint", "xmlattr", "urlize", "wordwrap", "center", "batch", "slice", "random")
"""Each can multiply its input in one call, and no chat template needs them."""

_WIDE_FORMAT = re.compile(r"\d{5,}|\*")
_NESTED_FORMAT = re.compile(r":[^{}]*\{")


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """The template does more than a prompt can need."""


class RaisedByTemplate(jinja2.TemplateRuntimeError):
    """The template's own `raise_exception(...)`."""


class Budget:
    """Budget of what one rendering may still do."""

    def __init__(self) -> None:
        self.deadline = time.monotonic() + MAX_SECONDS
        self.turns = 0
        self.chars = 0

    def turn(self) -> None:
        self.turns += 1
        if self.turns > MAX_TURNS:
            raise TemplateLimitError(f"its loops take more than {MAX_TURNS} turns")
        if self.turns % 64 == 0:
            self.check_time()

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise TemplateLimitError(f"it takes longer than {MAX_SECONDS:g} seconds")

    def build(self, num_chars: int) -> None:
        self.chars += num_chars
        if self.chars > MAX_CHARS_BUILT:
            raise TemplateLimitError(f"it builds more than {MAX_CHARS_BUILT} characters")
        if num_chars > 65_536:
            self.check_time()


class GuardedEnvironment(ImmutableSandboxedEnvironment):
    """Made once; render inside `budget()`. Threads have budgets of their own."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
            finalize=self.written,
        )
        self._local = threading.local()
        self.globals.pop("lipsum", None)
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": self.make_dict,
            "namespace": TemplateNamespace,
        }
        for name in DROPPED_FILTERS:
            self.filters.pop(name, None)
        checked: dict[str, Callable[..., Any]] = {
            "tojson": self.tojson, "string": self.string, "replace": self.replace, "join": self.join,
            "indent": self.indent, "format": self.format_filter, "sum": self.sum,
        }  # fmt: skip
        self.filters |= {name: self._charged(function) for name, function in {**self.filters, **checked}.items()}

    @contextmanager
    def budget(self) -> Iterator[None]:
        self._local.budget = Budget()
        try:
            yield
        finally:
            self._local.budget = None

    @property
    def _budget(self) -> Budget | None:
        """None while a template is compiled: constant expressions are folded then."""
        return getattr(self._local, "budget", None)

    # -- compiled templates call these

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        guarded = _Guard().visit(source)
        guarded.set_environment(self)
        return str(super()._generate(guarded, name, filename, defer_init=defer_init))

    def tick(self) -> None:
        if (budget := self._budget) is not None:
            budget.turn()

    def concatenated(self, *values: Any) -> str:
        texts = [self.string(value) for value in values]
        _check_chars(sum(map(len, texts)))
        return str(self._built("".join(texts)))

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        return self._built(value[start:stop:step])

    def displayed(self, value: Any) -> Any:
        """A list, tuple or dict that the template writes out."""
        return self._built(value)

    def written(self, value: Any) -> Any:
        """Every `{{ value }}`, those inside macros and blocks too."""
        if value is None or isinstance(value, jinja2.Undefined):
            return value
        return self._built(self.string(value))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _CHECKS[operator](left, right)
        return self._built(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, (str, bytes, int)) and not isinstance(owner, bool):
            _check_method(owner, getattr(obj, "__name__", ""), args, kwargs)
        return self._built(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`"...".format`, which the sandbox wraps as soon as a template names it."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text, inner = str(value.__self__), wrapped

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(text, [*args, *kwargs.values()])
            return inner(*args, **kwargs)

        return checked

    # -- filters and functions

    def _charged(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def charged(*args: Any, **kwargs: Any) -> Any:
            return self._built(function(*args, **kwargs))

        charged.__dict__.update(getattr(function, "__dict__", {}))  # Jinja marks what a filter is passed in there
        return charged

    def _built(self, value: Any) -> Any:
        if isinstance(value, (str, bytes)):
            if len(value) > MAX_TEMPLATE_OUTPUT_CHARS:
                raise TemplateLimitError(f"it makes a text of more than {MAX_TEMPLATE_OUTPUT_CHARS} characters")
            if (budget := self._budget) is not None:
                budget.build(len(value))
        elif isinstance(value, (list, tuple, dict, Namespace)):
            size = weigh(value)
            if (budget := self._budget) is not None:
                budget.build(size)
        return value

    def make_dict(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def string(self, value: Any) -> str:
        if isinstance(value, (list, tuple, dict, Namespace)):
            weigh(value)
        return str(value)

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        weigh(value)
        if indent is not None and (len(indent) if isinstance(indent, str) else indent) > 16:
            raise TemplateLimitError(f"tojson indents by {indent!r}, more than 16")
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def replace(self, text: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = self.string(text), self.string(old), self.string(new)
        _check_replace(text, old, new)
        return str(text.replace(old, new, -1 if count is None else count))

    def join(self, values: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
        if attribute is not None:
            values = (self.getattr(value, attribute) for value in values)
        texts = [self.string(value) for value in values]
        separator = self.string(d)
        _check_chars(sum(map(len, texts)) + len(separator) * len(texts))
        return separator.join(texts)

    def indent(self, text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        text = self.string(text)
        prefix = width if isinstance(width, str) else " " * min(int(width), MAX_WIDTH + 1)
        _check_chars(len(text) + len(prefix) * (text.count("\n") + 1))
        if len(prefix) > MAX_WIDTH:
            raise TemplateLimitError(f"it indents by more than {MAX_WIDTH}")
        lines = (text + "\n").splitlines()
        rest = [prefix + line if line or blank else line for line in lines[1:]]
        return "\n".join([(prefix if first else "") + lines[0], *rest])

    def format_filter(self, text: Any, *args: Any, **kwargs: Any) -> str:
        values: Any = kwargs or args
        _check_modulo(str(text), values)
        return str(str(text) % values)

    def sum(self, values: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
        if attribute is not None:
            values = (self.getattr(value, attribute) for value in values)
        total = start
        for value in values:
            if not isinstance(value, (int, float)):
                raise TemplateLimitError(f"sum adds a {type(value).__name__}; numbers only")
            _check_plus(total, value)
            total = total + value
        return total


class TemplateNamespace(Namespace):
    """`namespace(...)`, without underscore names: those are Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # `self` among *args, so that a template may say namespace(self=...).
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_attribute(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


class GenerationTag(Extension):
    """`{% generation %}`: marks the assistant's tokens for training; here it only passes its body on."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_pass_on"), [], [], body).set_lineno(line)

    def _pass_on(self, caller: Macro) -> str:
        return str(caller())


class _Guard(NodeTransformer):
    """Puts the environment's checks into a template's syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _tick(node))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _tick(node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenated", node.nodes, node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        parts = (node.arg.start, node.arg.stop, node.arg.step)
        return _call("sliced", [node.node, *(nodes.Const(None) if part is None else part for part in parts)], node)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return node if _is_constant(node.items) else _call("displayed", [node], node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx != "load" or _is_constant(node.items) else _call("displayed", [node], node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _call("displayed", [node], node)


def _tick(node: nodes.Node) -> nodes.Node:
    return nodes.ExprStmt(_call("tick", [], node)).set_lineno(node.lineno)


def _call(method: str, args: list[Any], node: nodes.Node) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None)
    return call.set_lineno(node.lineno)  # type: ignore[return-value]


def _is_constant(items: list[nodes.Expr]) -> bool:
    return all(isinstance(item, nodes.Const) for item in items)


def weigh(value: Any) -> int:
    """How many parts `value` has when it is written out, shared parts counted each time. Raises at `MAX_NODES`."""
    count = 0
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Namespace):
            item = getattr(item, "_Namespace__attrs", {})
        if isinstance(item, Mapping):
            stack.extend(item.values())
            stack.extend(key for key in item if isinstance(key, tuple))
            count += len(item)
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
            count += len(item)
        if count > MAX_NODES:
            raise TemplateLimitError(f"it makes a list or mapping of more than {MAX_NODES} parts")
    return count


def _check_chars(num_chars: int) -> None:
    if num_chars > MAX_TEMPLATE_OUTPUT_CHARS:
        raise TemplateLimitError(f"it makes a text of more than {MAX_TEMPLATE_OUTPUT_CHARS} characters")


def _check_plus(left: Any, right: Any) -> None:
    if isinstance(left, (str, bytes)) and isinstance(right, (str, bytes)):
        _check_chars(len(left) + len(right))
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)) and len(left) + len(right) > MAX_NODES:
        raise TemplateLimitError(f"it makes a list of more than {MAX_NODES} parts")


def _check_times(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_NUMBER_BITS:
            raise TemplateLimitError(f"it makes a number of more than {MAX_NUMBER_BITS} bits")
        return
    for sequence, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(sequence, (str, bytes)):
            _check_chars(len(sequence) * times)
        elif isinstance(times, int) and isinstance(sequence, (list, tuple)) and len(sequence) * times > MAX_NODES:
            raise TemplateLimitError(f"it makes a list of more than {MAX_NODES} parts")


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_NUMBER_BITS:
        raise TemplateLimitError(f"it makes a number of more than {MAX_NUMBER_BITS} bits")


def _check_modulo(left: Any, right: Any) -> None:
    if isinstance(left, (str, bytes)):
        if _WIDE_FORMAT.search(left if isinstance(left, str) else left.decode("latin-1")):
            raise TemplateLimitError("it formats with a width of more than four digits, or with *")
        weigh(right)
        if isinstance(right, (str, tuple, list)):
            longest = max((len(item) for item in [right, *right] if isinstance(item, str)), default=0)
            _check_chars(len(left) + left.count("%" if isinstance(left, str) else b"%") * longest)  # type: ignore[arg-type]


_CHECKS: dict[str, Callable[[Any, Any], None]] = {
    "+": _check_plus, "*": _check_times, "**": _check_power, "%": _check_modulo,
}  # fmt: skip


def _check_replace(text: str | bytes, old: Any, new: Any) -> None:
    times = text.count(old) if old else len(text) + 1
    _check_chars(len(text) + times * len(new))


def _check_format(text: str, values: list[Any]) -> None:
    if _WIDE_FORMAT.search(text) or _NESTED_FORMAT.search(text):
        raise TemplateLimitError("it formats with a width of more than four digits, or one that is a value")
    for value in values:
        weigh(value)
    longest = max((len(value) for value in values if isinstance(value, str)), default=0)
    _check_chars(len(text) + text.count("{") * longest)


def _check_method(owner: str | bytes | int, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Methods of text and numbers that can make much of little."""
    given = [*args, *kwargs.values()]
    if isinstance(owner, (str, bytes)):
        if (
            name == "replace"
            and len(args) >= 2
            and isinstance(args[0], type(owner))
            and isinstance(args[1], type(owner))
        ):
            _check_replace(owner, args[0], args[1])
        elif name == "join" and args and isinstance(args[0], (list, tuple, dict)):
            _check_chars(sum(len(item) + len(owner) for item in args[0] if isinstance(item, (str, bytes))))
        elif name == "expandtabs":
            _check_chars(len(owner) * max([item for item in given if isinstance(item, int)], default=8))
        elif name == "translate" and args and isinstance(args[0], dict):
            longest = max((len(item) for item in args[0].values() if isinstance(item, str)), default=1)
            _check_chars(len(owner) * longest)
    if name in ("ljust", "rjust", "center", "zfill", "to_bytes"):
        widest = max((abs(item) for item in given if isinstance(item, int)), default=0)
        if widest > MAX_WIDTH:
            raise TemplateLimitError(f"{name} is asked for a width of {widest}, more than {MAX_WIDTH}")


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace cannot hold {name!r}: names with an underscore are Python's own"
        )


def _raise_exception(message: Any) -> None:
    raise RaisedByTemplate(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > MAX_WIDTH or re.search(r"\d{4,}", pattern):
        raise TemplateLimitError("strftime_now is given a pattern that is too long")
    return datetime.now().strftime(pattern)
