"""Stop strings are found whatever the pieces, and nothing given out is ever taken back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pelton.engine.stop_strings import StopMatcher


def run(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[str, str | None, list[str]]:
    matcher = StopMatcher(stops, include_in_output=include)
    given_out = []
    for piece in pieces:
        given_out.append(matcher.push(piece))
        if matcher.matched is not None:
            break
    else:
        given_out.append(matcher.flush())
    return "".join(given_out), matcher.matched, given_out


@pytest.mark.parametrize(
    "pieces, stops, text, matched",
    [
        pytest.param(["abc", "def"], ["cd"], "ab", "cd", id="across-two-pieces"),
        pytest.param(list("hello END more"), ["END"], "hello ", "END", id="one-character-at-a-time"),
        pytest.param(["hello END more END"], ["END"], "hello ", "END", id="first-occurrence"),
        pytest.param(["xEy"], ["END"], "xEy", None, id="a-start-alone-is-given-back"),
        pytest.param(["xEN"], ["END"], "xEN", None, id="flushed-at-the-end"),
        pytest.param(["aab"], ["ab"], "a", "ab", id="overlapping-start"),
        pytest.param(["abcd"], ["bcd", "c"], "ab", "c", id="the-one-complete-first-wins"),
        pytest.param(["xabc"], ["bc", "abc"], "x", "abc", id="ending-together-the-longer-wins"),
        pytest.param(["🙂", "🙃!"], ["🙃"], "🙂", "🙃", id="beyond-ascii"),
    ],
)
def test_cuts_at_the_first_occurrence(pieces: list[str], stops: list[str], text: str, matched: str | None) -> None:
    assert run(pieces, stops)[:2] == (text, matched)


def test_include_keeps_the_stop_string_and_nothing_after_it() -> None:
    assert run(["a STO", "P b"], ["STOP"], include=True)[:2] == ("a STOP", "STOP")


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.push("hi <en") == "hi "
    assert matcher.push("emy") == "<enemy"
    assert matcher.matched is None


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    include=st.booleans(),
)
def test_pieces_do_not_matter(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if ends:
        end, start, stop = min(ends)
        expected = (text[: end if include else start], stop)
    else:
        expected = (text, None)
    assert run(pieces, stops, include=include)[:2] == expected
