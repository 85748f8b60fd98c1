"""The rule by which a proposed token is kept so that the law of what is sampled stays the model's (Leviathan et al., Fast Inference
from Transformers via Speculative Decoding, ICML 2023, arXiv:2211.17192).

Steps of the engine have drafts that were proposed with certainty. There the rule comes to keeping a draft while the token that is
sampled in its place equals it: this is done by the op `verify`, and tested against the rule here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def rejection(p: Floats, q: Floats, u: Floats) -> npt.NDArray[np.bool_]:
    """Return whether each draft is kept: with probability min(1, p / q).

    p, q [n]: what the model and the proposer gave the drafted token, q > 0; u [n]: uniform in (0, 1).
    """
    kept: npt.NDArray[np.bool_] = np.asarray(u) * np.asarray(q) < np.asarray(p)
    return kept


def residual(p: Floats, q: Floats) -> Floats:
    """[V], from which the token is drawn that replaces a draft: max(0, p - q), normed. p, q [V]: both laws, not the same."""
    left = np.maximum(np.asarray(p) - q, 0.0)
    law: Floats = left / left.sum()
    return law


def speculate(p: Floats, q: Floats, drafts: npt.NDArray[np.int64], u: Floats, v: float) -> list[int]:
    """The tokens of one step: drafts up to the first that is rejected, its replacement, or one more where all k are kept.

    p [k + 1, V], q [k, V]: the model's laws behind each draft and the proposer's of it; drafts [k]; u [k]; v: for the last token.
    """
    places = np.arange(len(drafts))
    kept = rejection(p[places, drafts], q[places, drafts], u)
    count = len(drafts) if kept.all() else int(kept.argmin())
    law = p[count] if count == len(drafts) else residual(p[count], q[count])
    last = int(np.searchsorted(law.cumsum() / law.sum(), v, side="right"))
    return [*(int(token) for token in drafts[:count]), min(last, len(law) - 1)]
