"""Preparation of every front end before an engine starts: plugins, settings, the model's description, its tokenizer. No torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pelton import logging as pelton_logging
from pelton.config import EngineConfig
from pelton.config.adjust import adjust_config
from pelton.engine.input_processor import InputProcessor
from pelton.errors import RequestError
from pelton.logits_processors.requests import load_processors
from pelton.lora.registry import AdapterRegistry
from pelton.lora.resolvers import make_resolvers

if TYPE_CHECKING:
    from pelton.lora.resolver import LoRAResolver
    from pelton.messages.report import EngineInfo
    from pelton.plugins import Plugins
    from pelton.tokenizer import Tokenizer

logger = pelton_logging.get_logger(__name__)


class FrontEnd:
    """explicit: flat names of the settings that the user gave; plugins may not change those. before_model: called once settings and
    plugins are known, which is long before the model and its tokenizer are."""

    def __init__(
        self, config: EngineConfig, plugins: Plugins | None = None, explicit: Collection[str] = (),
        before_model: Callable[[EngineConfig, Plugins], None] = lambda config, plugins: None,
    ) -> None:  # fmt: skip
        from pelton.model.resolve import load_tokenizer, resolve_model
        from pelton.plugins import load_plugins
        from pelton.pooling.io_processor import load_io_processor

        began = time.monotonic()
        _show_log(config)
        self.phase_s: dict[str, float] = {}
        self.resolvers: list[tuple[str, LoRAResolver]] = []
        self.plugins = plugins if plugins is not None else load_plugins()
        self.config, self.adjustments = adjust_config(config, self.plugins, explicit)
        before_model(self.config, self.plugins)
        with pelton_logging.phase("find model", self.phase_s):
            self.model = resolve_model(self.config, self.plugins)
        for note in self.model.notes:
            logger.info("%s", note)
        with pelton_logging.phase("load tokenizer", self.phase_s):
            self.tokenizer: Tokenizer | None = load_tokenizer(self.config, self.model, self.plugins)
        with self.plugins.blaming("when the IO processor is made"):
            self.io_processor = load_io_processor(self.config, self.model, self.tokenizer, self.plugins)
        backends = self.plugins.entries("pelton_structured_output_backends")
        processors = load_processors(self.plugins) if self.model.pooling is None else None
        self.input_processor = InputProcessor(
            self.config, self.model, self.tokenizer, structured_output_backends=[entry.name for entry in backends],
            logits_processors=processors,
        )  # fmt: skip
        self.adapters = AdapterRegistry(
            self.config.lora, self.config.model.served_model_name or [self.config.model.model]
        )
        self._took_s = time.monotonic() - began

    def engine_started(self, info: EngineInfo, took_s: float) -> None:
        """Complete `info.phase_s`, so that the start table accounts for every second; took_s: of the engine's start."""
        self.input_processor.engine_started(info)
        self.resolvers = make_resolvers(self.config, self.plugins, info)
        phase_s = {**self.phase_s, **info.phase_s}
        rest_s = self._took_s + took_s - sum(phase_s.values())
        info.phase_s = {**phase_s, "imports and other": max(rest_s, 0.0)}

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = False,
        chat_template: str | None = None,
        **options: Any,
    ) -> str | list[int]:
        """See `AsyncLLM.render_chat`."""
        if self.tokenizer is None:
            raise RequestError("Chat needs a tokenizer, and skip_tokenizer_init is set.", param="messages")
        text = self.tokenizer.apply_chat_template(messages, chat_template=chat_template, **options)
        # The template writes the special tokens itself.
        return self.tokenizer.encode(text, add_special_tokens=False) if tokenize else text


def _show_log(config: EngineConfig) -> None:
    """Progress is shown unless the program set up logging of its own."""
    root, ours = logging.getLogger(), logging.getLogger(pelton_logging.ROOT)
    if not root.handlers and not ours.handlers and ours.level == logging.NOTSET:
        pelton_logging.setup(config.observability.log_level)
