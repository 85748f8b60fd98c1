"""Interface of an IO processor: a pooling model behind requests and answers of a plugin's own types.

A plugin offers one through the hook `pelton_io_processors`; the engine's front end makes the one that is named, at the start.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pelton.config import EngineConfig
from pelton.engine.input_processor import PROMPT_KEYS, Prompt
from pelton.errors import ConfigError, PluginError, RequestError
from pelton.logging import get_logger
from pelton.messages.request import PoolingParams
from pelton.model.resolved import ResolvedModel
from pelton.outputs import PoolingOutput, PoolingRequestOutput
from pelton.plugins import FIX_IT, Plugins, make
from pelton.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pelton.tokenizer import Tokenizer

logger = get_logger(__name__)

Input = TypeVar("Input")
Output = TypeVar("Output")

DATA = "data"
"""The key of a prompt that is for the IO processor: `llm.encode({"data": ...})`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IOProcessorContext:
    """Everything that an IO processor is made from. A new feature is a new field with a default."""

    engine_config: EngineConfig
    model: ResolvedModel
    tokenizer: Tokenizer | None


class IOProcessor(ABC, Generic[Input, Output]):
    """Order for each request: `parse_data` -> `merge_pooling_params` -> `pre_process` -> the engine -> `post_process`.

    Pelton looks at neither the data nor the answer. Over HTTP the answer must be plain data: what msgspec writes as JSON. Several
    requests are under way at once; in a server all run on one event loop.
    """

    offered_as: str = ""
    """Its entry and plugin, for errors; set when it is made."""

    def __init__(self, context: IOProcessorContext) -> None:
        self.context = context

    @abstractmethod
    def parse_data(self, data: object) -> Input:
        """Check what the user sent. Raises `RequestError` that names the field; a `ValueError` or `TypeError` becomes one."""

    def merge_sampling_params(self, params: SamplingParams | None = None) -> SamplingParams:
        """The parameters of a request, with defaults where it gives none. For models that generate: not called yet."""
        return params or SamplingParams()

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        """The parameters of a request, with defaults where it gives none."""
        return params or PoolingParams()

    @abstractmethod
    def pre_process(self, prompt: Input, request_id: str | None = None, **kwargs: Any) -> Prompt | Sequence[Prompt]:
        """Make the model's prompts, one or many, of checked data."""

    async def pre_process_async(
        self, prompt: Input, request_id: str | None = None, **kwargs: Any
    ) -> Prompt | Sequence[Prompt]:
        return self.pre_process(prompt, request_id, **kwargs)

    @abstractmethod
    def post_process(
        self, model_output: Sequence[PoolingRequestOutput[PoolingOutput]], request_id: str | None = None, **kwargs: Any
    ) -> Output:
        """Make the answer of the outputs, which are in the order of the prompts."""

    def discard(self, request_id: str | None) -> None:
        """Forget what `pre_process` kept of a request. Called once for each, after it ended, however it ended."""

    async def post_process_async(
        self,
        model_output: AsyncGenerator[tuple[int, PoolingRequestOutput[PoolingOutput]], None],
        request_id: str | None = None,
        **kwargs: Any,
    ) -> Output:
        """model_output: with the index of its prompt each, in the order in which they come."""
        found = sorted([pair async for pair in model_output], key=lambda pair: pair[0])
        return self.post_process([output for _, output in found], request_id=request_id, **kwargs)


def load_io_processor(
    config: EngineConfig, model: ResolvedModel, tokenizer: Tokenizer | None, plugins: Plugins
) -> IOProcessor[Any, Any] | None:
    """The one that the setting names, else config.json's `io_processor_plugin`; None where neither names one. Raises
    `ConfigError` where no plugin offers it, or where the model does not pool."""
    name, setting = config.pooling.io_processor_plugin, "io_processor_plugin"
    if name is None:
        stated = model.raw_config.get("io_processor_plugin")
        if stated is None:
            return None
        if not isinstance(stated, str):
            raise ConfigError(f"config.json has io_processor_plugin {stated!r}; expected a name.")
        name, setting = stated, "io_processor_plugin (of config.json)"
    entry = plugins.find("pelton_io_processors", name, setting=setting)
    if model.pooling is None:
        raise ConfigError(f"{setting} is {name!r}, and this model generates. IO processors are for models that pool.")
    context = IOProcessorContext(engine_config=config, model=model, tokenizer=tokenizer)
    made: IOProcessor[Any, Any] = make(entry, IOProcessor, context)  # type: ignore[type-abstract]
    made.offered_as = str(entry)
    return made


NO_PROCESSOR = "There is no IO processor for data: start with io_processor_plugin, or send prompts."


def parse(processor: IOProcessor[Input, Any], data: object) -> Input:
    """`parse_data`; what it raises of bad data is a `RequestError`."""
    try:
        return processor.parse_data(data)
    except RequestError:
        raise
    except (ValueError, TypeError) as error:
        raise RequestError(f"The IO processor cannot read data: {error}", param=DATA) from error


def prompts_of(processor: IOProcessor[Any, Any], found: Any) -> list[Prompt]:
    """Return what `pre_process` gave, one prompt or several, as several. Raises `PluginError` for anything else."""
    is_one = not isinstance(found, (list, tuple)) or (found and type(found[0]) is int)
    prompts = [found] if is_one else list(found)
    if not all(map(_is_prompt, prompts)):
        raise PluginError(
            f"{processor.offered_as} gives {found!r} from pre_process; it has to give text, token ids, a prompt dictionary, or a list "
            f"of these. {FIX_IT}"
        )
    return prompts


def _is_prompt(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and set(value) <= set(PROMPT_KEYS)
    ids = value.tolist() if hasattr(value, "tolist") else value  # numpy arrays and tensors
    return isinstance(ids, str) or (isinstance(ids, (list, tuple)) and set(map(type, ids)) <= {int})


@contextmanager
def discarding(processor: IOProcessor[Any, Any], request_id: str) -> Iterator[None]:
    """Around a request: `discard` at its end. What that raises is logged; the request keeps its answer, or its error."""
    try:
        yield
    finally:
        try:
            processor.discard(request_id)
        except Exception:
            logger.exception("%s fails in discard, of request %s.", processor.offered_as, request_id)


def is_for_processor(prompt: Any) -> bool:
    """Return whether a prompt is {"data": ...}."""
    return isinstance(prompt, dict) and DATA in prompt
