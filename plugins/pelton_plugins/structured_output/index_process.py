"""A process that builds outlines' indexes, so that a regex which takes too long or too much memory can be stopped.

It is run as a file, and imports outlines_core and `helper_process` alone.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence

if __name__ == "__main__":  # it is told where packages are
    sys.path[:] = sys.argv[1:]

from pelton_plugins.structured_output.helper_process import (
    HelperProcess,
    NoAnswerError,
    pack_tokens,
    serve,
    unpack_tokens,
)

IndexError_ = NoAnswerError
"""Why a regex has no index."""
_EOS = struct.Struct("<Q")
_START = "\U0010ffff"
START_ID = 2**32 - 1
"""A token of no vocabulary: the state behind it, from the index's own first one, is where texts begin."""


class IndexProcess(HelperProcess):
    """Used by one thread at a time."""

    def __init__(self, tokens: Sequence[bytes], skipped: Sequence[int], eos_token_id: int) -> None:
        hidden = set(skipped)
        parts = [b"" if token_id in hidden else token for token_id, token in enumerate(tokens)]
        super().__init__(__file__, _EOS.pack(eos_token_id) + pack_tokens(parts))

    def build(self, regex: str, timeout_s: float) -> bytes:
        """The index of a regex, as bytes. Raises `IndexError_`."""
        return self.ask(regex, timeout_s)


def _set_up(data: bytes) -> Callable[[str], bytes]:
    import outlines_core

    (eos,) = _EOS.unpack_from(data)
    tokens: dict[bytes, list[int]] = {}
    for token_id, token in enumerate(unpack_tokens(data[_EOS.size :])):
        if token:
            tokens.setdefault(token, []).append(token_id)
    tokens.setdefault(_START.encode(), []).append(START_ID)
    vocabulary = outlines_core.Vocabulary(eos, tokens)
    characters = outlines_core.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})

    def build(regex: str) -> bytes:
        # outlines_core 0.2.14 drops tokens that go on behind a whole match and do not end in one: "(ab)+" takes "ab" and no "aba".
        # Its automaton reports a match one byte late, but for one at the end of the text; so the regex gets an end. An automaton that
        # may look for it at its start is refused: so it gets a start too, by which no other look at it may be hidden.
        outlines_core.Index(regex, characters)
        _, (index,) = outlines_core.Index(rf"{_START}(?:{regex})\z", vocabulary).__reduce__()
        return bytes(index)

    return build


if __name__ == "__main__":
    serve(_set_up)
