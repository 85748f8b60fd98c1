"""`PrefixRouter`: requests that begin alike go to one engine, whose prefix cache has their beginning.

It remembers by hash which engines were sent which beginnings, in pieces of a few tokens. The engines' own caches are not asked: what
they have dropped meanwhile costs a prompt that is computed again, never a wrong answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from pelton.config import EngineConfig
from pelton.config.plugin_settings import read_settings
from pelton.messages.request import EngineRequest
from pelton_plugins.data_parallel.client import SeveralEngines
from pelton_plugins.data_parallel.router import EngineLoad, RequestRouter
from pelton_plugins.data_parallel.settings import PrefixSettings

MAX_PROMPT_PIECES = 512  # of one prompt that are looked at


class PrefixRouter(RequestRouter):
    """Among engines whose score is near the lowest, the one that was sent the longest beginning of the prompt; else the lowest score."""

    def __init__(self, config: EngineConfig, num_engines: int) -> None:
        self._settings = read_settings(config, "data_parallel", PrefixSettings)
        self._engines_of: OrderedDict[int, int] = OrderedDict()  # piece to a bit for each engine

    def route(self, request: EngineRequest, loads: Sequence[EngineLoad], ready: Sequence[int]) -> int:
        scores = {engine: loads[engine].score for engine in ready}
        most = min(scores.values()) + self._settings.max_imbalance
        candidates = sum(1 << engine for engine, score in scores.items() if score <= most)
        pieces = list(self._pieces(request))
        for piece in pieces:
            holders = self._engines_of.get(piece, 0) & candidates
            if not holders:
                break
            candidates = holders
        chosen = min((engine for engine in ready if candidates >> engine & 1), key=scores.__getitem__)
        self._remember(pieces, 1 << chosen)
        return chosen

    def forget(self, engine: int) -> None:
        for piece, holders in list(self._engines_of.items()):
            left = holders & ~(1 << engine)
            if left:
                self._engines_of[piece] = left
            else:
                del self._engines_of[piece]

    def _pieces(self, request: EngineRequest) -> Iterator[int]:
        """A hash for each piece and all that comes before it; what tells equal tokens apart comes first."""
        tokens, size = request.prompt_token_ids, self._settings.piece_tokens
        end = min(len(tokens), size * MAX_PROMPT_PIECES)
        last = hash((request.adapter_id, request.cache_salt, *request.placeholders()))
        for start in range(0, end - size + 1, size):
            last = hash((last, *tokens[start : start + size]))
            yield last

    def _remember(self, pieces: Sequence[int], bit: int) -> None:
        known = self._engines_of
        for piece in pieces:
            known[piece] = known.get(piece, 0) | bit
            known.move_to_end(piece)
        while len(known) > self._settings.max_pieces:
            known.popitem(last=False)


class ByPrefix(SeveralEngines):
    """`--data-parallel-routing prefix`."""

    router_class = PrefixRouter
