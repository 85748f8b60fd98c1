"""One pass of a model on the meta device: which modules attend and how, which products read the same input.

Everything that the model is later run with is what was seen here, not guessed from names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pelton.errors import ConfigError
from pelton_plugins.transformers_models.attention import TORCH, TRACE, TorchCalls, default_scale, received_by
from pelton_plugins.transformers_models.products import is_linear
from pelton_plugins.transformers_models.source import TRACE_DTYPE, refusal, set_ropes

if TYPE_CHECKING:
    from pelton_plugins.transformers_models.source import Source

_NUM_TOKENS = 3
_CONVOLUTION = "a convolution over tokens keeps a state of its own"
_KNOWN_OPTIONS = (
    "scaling",
    "sliding_window",
    "softcap",
    "s_aux",
    "is_causal",
    "dropout",
    "position_ids",
    "logits_to_keep",
)


@dataclass(frozen=True, slots=True)
class TracedAttention:
    """One module's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    sinks: str | None  # name of the parameter


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a module's call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that a module's call returned, and its place where that was a tuple."""

    tensor: Tensor  # kept, so that no other gets its id
    module: str
    call: Call
    index: int | None


@dataclass(slots=True)
class Trace:
    """Findings of one forward pass."""

    body: str
    """Name of the module that gives the hidden states of which the model's head makes logits."""
    attention: dict[str, TracedAttention]
    """By the name of the module, in the order of the calls."""
    products: list[list[str]]
    """Names of linear modules; those of one list read the same input, one after the other."""
    read_tokens: frozenset[str]
    """Names of the body's linear modules whose rows are the step's tokens, in each of their calls."""
    calls_torch: bool
    """Whether its modules call torch's attention themselves."""
    calls: dict[str, Call]
    """By the name of the module; of modules that are called once."""
    unused: list[str]
    """Names of whole models among its modules that a pass over tokens does not call: those that read images or sound."""
    made: dict[int, Made]
    """By the id of the tensor: outputs of modules. The innermost module that returned it."""
    positions: Tensor


def trace(source: Source, max_model_len: int) -> Trace:
    """Raises `ConfigError` that names the module which cannot run, and why."""
    found: Trace | str = source.name
    with torch.inference_mode(False), torch.no_grad():  # tensors of inference do not say when they are written
        for calls_torch in (False, True) if source.model_class._supports_sdpa else (False,):
            found = _trace(source, max_model_len, calls_torch=calls_torch)
            if isinstance(found, Trace):
                return found
    raise refusal(found, "its attention does not go through transformers' attention interface")


def _trace(source: Source, max_model_len: int, *, calls_torch: bool) -> Trace | str:
    """Return what does not attend where no attention is seen."""
    try:
        with torch.device("meta"):
            model = source.build_to_trace(TORCH if calls_torch else TRACE)
    except KeyError as error:
        if error.args == (TRACE,):  # a table of classes by the function's name
            return source.name
        raise
    set_ropes(model, max_model_len)
    positions = torch.arange(_NUM_TOKENS, device="meta")[None]
    tracer = _Tracer(source.name, model, max_model_len, positions)
    mask = _mask(1, None) if calls_torch else torch.ones_like(positions)
    try:
        with received_by(tracer), TorchCalls(tracer, tracer.innermost) if calls_torch else nullcontext():
            model(input_ids=torch.zeros_like(positions), position_ids=positions, attention_mask=mask, use_cache=False)
    except ConfigError:
        raise
    except Exception as error:
        tracer.refuse_convolutions()
        raise refusal(tracer.where(), f"it does not run on tensors that have shapes alone ({error})") from error
    return tracer.result(calls_torch=calls_torch)


class _Watched(nn.Module):
    """A linear module whose calls are noted, and reads of its tensors by others."""

    def __init__(self, linear: nn.Module, name: str, tracer: _Tracer) -> None:
        super().__init__()
        self.linear, self._name, self._tracer = linear, name, tracer

    def forward(self, x: Tensor) -> Tensor:
        self._tracer.calls.append((self._name, x, x._version))
        if x.numel() != _NUM_TOKENS * x.shape[-1]:
            self._tracer.of_other_rows.add(self._name)
        output: Tensor = self.linear(x)
        return output

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            self._tracer.read.add(self._name)
            return getattr(self.linear, name)
        return super().__getattr__(name)


class _Mask(Tensor):
    """A mask that stands for one window. What is made of it is another tensor, and no mask of this kind."""

    window: int | None
    why: str | None  # it stands for nothing that can run

    __torch_function__ = torch._C._disabled_torch_function_impl


def _mask(num_tokens: int, window: int | None, why: str | None = None) -> _Mask:
    mask = torch.empty(1, 1, num_tokens, num_tokens, dtype=TRACE_DTYPE, device="meta").as_subclass(_Mask)
    mask.window, mask.why = window, why
    return mask


class _Tracer:
    """A `Receiver`."""

    def __init__(self, name: str, model: Any, max_model_len: int, positions: Tensor) -> None:
        self.calls: list[tuple[str, Tensor, int]] = []
        self.read: set[str] = set()
        self.of_other_rows: set[str] = set()
        self._positions = positions
        self._calls_of: dict[str, list[Call]] = {}
        self._made: dict[int, Made] = {}
        self._name, self._model, self._max_model_len = name, model, max_model_len
        self._names = {module: name for name, module in model.named_modules()}
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self._found: dict[str, TracedAttention] = {}
        self._stack: list[nn.Module] = []
        self._called_by_head: list[str] = []
        for linear_name, module in list(model.named_modules()):
            if is_linear(module):
                parent, _, child = linear_name.rpartition(".")
                setattr(model.get_submodule(parent), child, _Watched(module, linear_name, self))
        for module in self._names:
            module.forward = self._without_values(module)  # type: ignore[method-assign]
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(self._leave, with_kwargs=True)

    def _without_values(self, module: nn.Module) -> Callable[..., Any]:
        """Make a module that reads values on the host, and attends to nothing, return what has its input's shape: experts do."""
        forward = module.forward

        def shaped(*args: Any, **kwargs: Any) -> Any:
            depth = len(self._stack)
            try:
                return forward(*args, **kwargs)
            except (NotImplementedError, RuntimeError) as error:
                attends = any(f"{name}.".startswith(f"{self._names[module]}.") for name in self._found)
                if "meta" not in str(error) or attends or not args or not isinstance(args[0], Tensor):
                    raise
                del self._stack[depth:]
                return torch.empty_like(args[0])

        return shaped

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if isinstance(module, nn.Conv1d):
            raise refusal(self._subject(module), _CONVOLUTION)
        if len(self._stack) == 1:
            self._called_by_head.append(self._names[module])
        self._stack.append(module)
        self._calls_of.setdefault(self._names[module], []).append(Call(args, kwargs))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._stack.pop()
        outputs: list[tuple[int | None, Tensor]] = [(None, output)] if isinstance(output, Tensor) else []
        if isinstance(output, tuple | list):
            outputs = [(index, one) for index, one in enumerate(output) if isinstance(one, Tensor)]
        for index, one in outputs:
            self._made.setdefault(id(one), Made(one, self._names[module], Call(args, kwargs), index))

    def innermost(self) -> nn.Module:
        """Return the module whose forward pass runs."""
        return self._stack[-1]

    def where(self) -> str:
        """Name the innermost module, too: that of the error where a pass has ended with one."""
        return self._subject(self._stack[-1]) if len(self._stack) > 1 else self._name

    def _subject(self, module: nn.Module) -> str:
        return f"{self._name} ({self._names[module]}, {type(module).__name__})"

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Mapping[str, Any]
    ) -> Tensor:
        name, subject = self._names[module], self._subject(module)
        if name in self._found:
            raise refusal(subject, "it attends more than once in a step")
        is_causal = options.get("is_causal")
        if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            raise refusal(subject, "it attends to later tokens too")
        for option, given in options.items():
            if option not in _KNOWN_OPTIONS and given is not None and not isinstance(given, bool):
                raise refusal(subject, f"it gives attention {option!r}, which Pelton's does not take")
        if mask is not None and not isinstance(mask, _Mask):
            raise refusal(subject, "it makes an attention mask of its own, or adds to it (ALiBi, say)")
        if mask is not None and mask.why is not None:
            raise refusal(subject, mask.why)
        if not query.shape[2] == key.shape[2] == value.shape[2] == _NUM_TOKENS:
            raise refusal(subject, f"it attends to {key.shape[2]} keys of {_NUM_TOKENS} tokens")
        window = mask.window if mask is not None else options.get("sliding_window")
        sinks = options.get("s_aux")
        scale = options.get("scaling")
        self._found[name] = TracedAttention(
            num_heads=query.shape[1], num_kv_heads=key.shape[1], head_dim=max(query.shape[3], value.shape[3]),
            scale=default_scale(query.shape[3]) if scale is None else float(scale), sliding_window=window,
            soft_cap=options.get("softcap"), sinks=None if sinks is None else self._parameters[id(sinks)],
        )  # fmt: skip
        return query.new_empty(1, _NUM_TOKENS, query.shape[1], value.shape[3])

    def make_mask(self, options: Mapping[str, Any]) -> _Mask:
        """Read the window from the function that says which key each query sees."""
        try:
            return _mask(_NUM_TOKENS, self._window(options["mask_function"]))
        except ValueError as error:  # nothing is lost where no attention gets it
            return _mask(_NUM_TOKENS, None, str(error))
        except RuntimeError:  # it reads tensors that have no values here
            return _mask(_NUM_TOKENS, None, "its attention mask follows from the tokens")

    def _window(self, sees: Any) -> int | None:
        """Raises `ValueError` where it is none."""
        count = self._max_model_len
        keys = torch.arange(count, device="cpu")[None]
        queries = torch.tensor(sorted({0, 1, count // 3, count // 2, count - 1}), device="cpu")[:, None]
        zero = torch.zeros((), dtype=torch.int64, device="cpu")
        seen = sees(zero, zero, queries, keys).expand(len(queries), count)
        window = int(seen[-1].sum())
        expected = (keys <= queries) & (keys > queries - window)
        if not torch.equal(seen, expected):
            raise ValueError("its attention mask is neither causal nor a sliding window")
        return None if window == count else window

    def result(self, *, calls_torch: bool) -> Trace | str:
        if not self._found:
            modules = [self._model.get_submodule(name) for name in self._calls_of]
            return next((self._subject(one) for one in modules if "Atten" in type(one).__name__), self._name)
        num_layers = self._model.config.get_text_config(decoder=True).num_hidden_layers
        if len(self._found) != num_layers:
            raise refusal(
                self._name,
                f"{len(self._found)} of its {num_layers} layers go through transformers' attention interface",
            )
        bodies = [name for name in self._called_by_head if all(one.startswith(f"{name}.") for one in self._found)]
        if len(bodies) != 1:
            raise refusal(self._name, "its head is not apart from its layers")
        self.refuse_convolutions()
        unused = self._unused()
        calls = {name: calls[0] for name, calls in self._calls_of.items() if len(calls) == 1}
        read_tokens = {name for name, _, _ in self.calls if name.startswith(f"{bodies[0]}.")} - self.of_other_rows
        return Trace(
            bodies[0],
            self._found,
            self._products(),
            frozenset(read_tokens),
            calls_torch,
            calls,
            unused,
            self._made,
            self._positions,
        )

    def refuse_convolutions(self) -> None:
        unused = self._unused()
        for module, name in self._names.items():
            if isinstance(module, nn.Conv1d) and not any(name.startswith(f"{one}.") for one in unused):
                raise refusal(self._subject(module), _CONVOLUTION)

    def _unused(self) -> list[str]:
        from transformers import PreTrainedModel

        def is_called(name: str) -> bool:
            return any(called == name or called.startswith(f"{name}.") for called in self._calls_of)

        unused: list[str] = []
        for module, name in self._names.items():
            is_part = any(name.startswith(f"{one}.") for one in unused)
            if isinstance(module, PreTrainedModel) and not is_part and not is_called(name):
                unused.append(name)
        return unused

    def _products(self) -> list[list[str]]:
        counts: dict[str, int] = {}
        for name, _, _ in self.calls:
            counts[name] = counts.get(name, 0) + 1
        groups: list[list[str]] = []
        before: tuple[Any, ...] | None = None
        for name, x, version in self.calls:
            if counts[name] > 1 or name in self.read:
                before = None
                if name not in self.read and [name] not in groups:
                    groups.append([name])
                continue
            linear = self._model.get_submodule(name).linear
            key = (name.rpartition(".")[0], id(x), version, linear.in_features, linear.bias is None)
            if key == before:
                groups[-1].append(name)
            else:
                groups.append([name])
            before = key
        return groups
