"""llguidance by its C functions: the same masks as by its Python classes, and matchers that are used again."""

from __future__ import annotations

import gc
import json
import random
from pathlib import Path

import numpy as np
import pytest

from pelton.sampling_params import StructuredOutputsParams
from pelton.structured.interface import StructuredOutputContext
from pelton.testing.models import EOS_ID, VOCAB_SIZE, make_tiny_tokenizer
from pelton_plugins.structured_output import llguidance_backend
from pelton_plugins.structured_output.llguidance_backend import BatchFiller, LLGuidanceBackend, NativeFiller
from pelton_plugins.structured_output.native_matcher import CannotUseError, MaskPool

WORDS = -(-VOCAB_SIZE // 32)
CONSTRAINTS = [
    StructuredOutputsParams(json={"type": "array", "items": {"enum": ["a", "ab", 1, None]}, "maxItems": 9}),
    StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}}}),
    StructuredOutputsParams(grammar='start: "x" item*\nitem: /[0-9]{1,3}/ "," | "<" item ">"'),
    StructuredOutputsParams(choice=["yes", "no", "nobody"]),
    StructuredOutputsParams(regex="(a|bc)+d?"),
]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> StructuredOutputContext:
    path = make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return StructuredOutputContext(tokenizer_path=str(path), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS_ID])


@pytest.fixture(scope="module")
def native(context) -> LLGuidanceBackend:
    backend = LLGuidanceBackend(context)
    if not isinstance(backend._filler, NativeFiller):
        pytest.skip("no C compiler is here")
    return backend


@pytest.fixture(scope="module")
def python(context) -> LLGuidanceBackend:
    def refuse(*args):
        raise CannotUseError("not here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llguidance_backend, "make_native", refuse)
        backend = LLGuidanceBackend(context)
    assert isinstance(backend._filler, BatchFiller), "without C functions the Python classes are used"
    return backend


def masks_of(grammars, drafts):
    bitmask = np.full((sum(1 + len(some) for some in drafts), WORDS), -1, dtype="<i4")
    rows, place = [], 0
    for grammar, some in zip(grammars, drafts, strict=True):
        rows.append((grammar, place, some))
        place += 1 + len(some)
    grammars[0].filler.fill(rows, bitmask)
    return bitmask


@pytest.mark.parametrize("num_threads, spin_s", [(1, 0.0), (3, 0.0), (3, 1e-3)])
def test_masks_are_those_of_the_python_classes(native, python, num_threads, spin_s, monkeypatch):
    """Over random texts, with drafts that are right and wrong."""
    monkeypatch.setattr(native._filler, "_pool", MaskPool(num_threads, spin_s))
    rng = random.Random(spin_s + num_threads)
    for _ in range(20):
        chosen = [rng.choice(CONSTRAINTS) for _ in range(rng.randint(1, 12))]
        mine, theirs = [native.compile(one) for one in chosen], [python.compile(one) for one in chosen]
        for _ in range(12):
            drafts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice([0, 0, 2]))] for _ in mine]
            found, expected = masks_of(mine, drafts), masks_of(theirs, drafts)
            first = np.cumsum([0, *(1 + len(some) for some in drafts)])[:-1]
            assert (found[first] == expected[first]).all()
            allowed = [np.flatnonzero(np.unpackbits(found[at].view(np.uint8), bitorder="little")) for at in first]
            tokens = [int(rng.choice(list(some))) for some in allowed]
            assert EOS_ID in tokens or all(theirs[row].validate([token]) for row, token in enumerate(tokens))
            right = [[token] for token in tokens]
            assert (masks_of(mine, right) == masks_of(theirs, right)).all(), "behind a draft that is right"
            going = [row for row, token in enumerate(tokens) if token != EOS_ID]
            if not going:
                break
            mine, theirs = [mine[row] for row in going], [theirs[row] for row in going]
            masks_of(mine, [[]] * len(mine)), masks_of(theirs, [[]] * len(mine))
            for row, one in zip(going, range(len(mine)), strict=True):
                assert mine[one].accept([tokens[row]]) and theirs[one].accept([tokens[row]])


def test_a_matcher_is_used_again_from_its_first_state(native):
    constraint = StructuredOutputsParams(json=json.dumps({"const": "used again"}))
    first = native.compile(constraint)
    assert native.known(constraint) is None, "its only matcher is in use"
    before = masks_of([first], [[]])
    assert first.accept([native.vocabulary.encode('"')[0]])
    masks_of([first], [[]])
    del first
    second = native.compile(constraint)
    assert (masks_of([second], [[]]) == before).all()
    handle = second.matcher.handle
    del second
    third = native.known(constraint)
    assert third is not None and third.matcher.handle == handle and (masks_of([third], [[]]) == before).all()


def test_a_matcher_that_failed_is_not_used_again(native):
    constraint = StructuredOutputsParams(json=json.dumps({"const": "failed"}))
    native.compile(constraint)
    grammar = native.compile(constraint)
    grammar.matcher.consume_token(native.vocabulary.encode("x")[0])
    assert grammar.matcher.is_error()
    del grammar
    assert native.known(constraint) is None


def test_grammars_in_cycles_leave_no_matcher_that_is_freed(native):
    """The collector runs finalizers in any order: a matcher that was given back must not be the one that was freed."""
    constraint = CONSTRAINTS[0]
    for _ in range(5):
        for _ in range(6):
            grammar = native.compile(constraint)
            holder = {"grammar": grammar, "matcher": grammar.matcher}
            holder["self"] = holder
            del grammar, holder
        gc.collect()
        kept = [native.compile(constraint) for _ in range(6)]
        assert len({grammar.matcher.handle for grammar in kept}) == 6 and all(
            grammar.matcher.handle for grammar in kept
        )
        masks_of(kept, [[]] * 6)
        del kept


def test_what_fails_in_a_call_for_all_is_told_by_its_grammar(native):
    good, bad = native.compile(CONSTRAINTS[0]), native.compile(CONSTRAINTS[3])
    bad.pending = native.vocabulary.encode("z")[0]
    with pytest.raises(Exception, match="llguidance"):
        masks_of([good, bad], [[], []])
    assert (masks_of([good], [[]]) == masks_of([native.compile(CONSTRAINTS[0])], [[]])).all()


def test_a_nul_is_refused(native):
    with pytest.raises(Exception, match="NUL character"):
        native.compile(StructuredOutputsParams(grammar='start: "a\0b"'))


def test_without_a_compiler_the_reason_is_told(monkeypatch, tmp_path: Path):
    from pelton_plugins.structured_output import native_matcher

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotUseError, match="no C compiler"):
        native_matcher._build()
