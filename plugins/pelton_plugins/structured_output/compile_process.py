"""A process that compiles large constraints for llguidance first, so that one that takes too long or too much memory can be stopped.

It is run as a file, and imports llguidance and `helper_process` alone. What it has compiled cannot leave it: the engine compiles it
again, once it is known that it may.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Mapping, Sequence

if __name__ == "__main__":  # it is told where packages are
    sys.path[:] = sys.argv[1:]

from pelton_plugins.structured_output.deep_stack import on_deep_stack
from pelton_plugins.structured_output.helper_process import HelperProcess, pack_tokens, serve, unpack_tokens

_SIZE = struct.Struct("<Q")


class CompileProcess(HelperProcess):
    """Used by one thread at a time."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        slices: Sequence[str],
        limits: Mapping[str, int],
    ) -> None:
        settings = {
            "special": list(special_token_ids), "eos": list(eos_token_ids), "slices": list(slices), "limits": dict(limits)
        }  # fmt: skip
        told = json.dumps(settings).encode()
        super().__init__(__file__, _SIZE.pack(len(told)) + told + pack_tokens(tokens))

    def check(self, source: str, timeout_s: float) -> str:
        """Compile a source and make its first mask; what is wrong with it, if anything. Raises `NoAnswerError`."""
        return self.ask(source, timeout_s).decode(errors="replace")


class _Words:
    """A vocabulary with the names that llguidance reads. No text is tokenized: forced text is not asked for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], settings: dict[str, list[int]]) -> None:
        self.tokens, self.special_token_ids = tokens, settings["special"]
        self.eos_token_id = settings["eos"][0] if settings["eos"] else len(tokens) - 1
        known = {token: token_id for token_id, token in reversed(list(enumerate(tokens)))}
        self._ids = {byte: known.get(bytes([byte]), 0) for byte in range(256)}

    def __call__(self, text: str | bytes) -> list[int]:
        return [self._ids[byte] for byte in (text.encode() if isinstance(text, str) else text)]


def _set_up(data: bytes) -> Callable[[str], bytes]:
    import llguidance

    (size,) = _SIZE.unpack_from(data)
    settings = json.loads(data[_SIZE.size : _SIZE.size + size])
    tokens = unpack_tokens(data[_SIZE.size + size :])
    tokenizer = llguidance.LLTokenizer(
        _Words(tokens, settings), n_vocab=len(tokens), eos_token=settings["eos"] or None, slices=settings["slices"]
    )
    limits = llguidance._lib.LLParserLimits(**settings["limits"])

    def check(source: str) -> bytes:
        matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return str(matcher.get_error()).encode() if matcher.is_error() else b""

    return lambda source: on_deep_stack(lambda: check(source))


if __name__ == "__main__":
    serve(_set_up)
