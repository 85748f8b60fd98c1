"""Conformance of this package's model format."""

from __future__ import annotations

import json
from pathlib import Path

from pelton.testing.model_format import ModelFormatConformance
from pelton.testing.models import VOCAB_SIZE, make_tiny_tokenizer

from pelton_skeleton.format import CONFIG, SkeletonFormat


class TestSkeletonFormat(ModelFormatConformance):
    format_class = SkeletonFormat

    def write(self, folder: Path) -> Path:
        path = make_tiny_tokenizer(folder / "model")
        (path / CONFIG).write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB_SIZE}))
        return path
