"""Grammars are compiled off the step loop; the fake grammar's masks have one bit a token."""

from __future__ import annotations

import threading

import pytest

from pelton.errors import RequestError
from pelton.sampling_params import StructuredOutputsParams
from pelton.structured.manager import GrammarManager
from pelton.testing.fake_grammar import FakeGrammar, FakeGrammarBackend


@pytest.fixture
def made():
    return []


@pytest.fixture
def manager(made):
    class Recorded(FakeGrammarBackend):
        def compile(self, params):
            made.append(threading.current_thread().name)
            return super().compile(params)

    def make():
        made.append("backend")
        return Recorded()

    manager = GrammarManager(make)
    yield manager
    manager.shutdown()


def test_compiles_on_its_own_thread_with_one_backend(manager, made):
    assert made == []  # nothing is made before the first constraint
    futures = [manager.submit(StructuredOutputsParams(regex=str(length))) for length in (1, 2, 3)]
    assert [future.result(60).length for future in futures] == [1, 2, 3]
    assert made.count("backend") == 1
    assert all(name.startswith("pelton-grammar") for name in made if name != "backend")
    assert len(manager.take_compile_times()) == 3 and manager.take_compile_times() == []


def test_a_constraint_that_is_not_valid_fails_its_future(manager):
    with pytest.raises(RequestError, match="not a number"):
        manager.submit(StructuredOutputsParams(regex="(")).result(60)


@pytest.mark.parametrize("vocab_size, words", [(32, 1), (33, 2), (50, 2)])
def test_masks_have_a_word_for_each_32_tokens(vocab_size, words):
    grammar = FakeGrammar(4, vocab_size, (0,))
    row = bytearray(4 * ((vocab_size + 31) // 32))
    grammar.fill_bitmask(row)
    assert len(row) == 4 * words
    allowed = [token for token in range(vocab_size) if row[token // 8] >> (token % 8) & 1]
    assert allowed == [token for token in range(1, vocab_size) if token % 3 != 0]
    before = grammar.position
    grammar.fill_bitmask(row, [1, 2])
    assert grammar.position == before
