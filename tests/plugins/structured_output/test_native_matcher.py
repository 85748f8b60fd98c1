"""llguidance by its C functions: the same masks as by its Python classes, and matchers that are used again."""

from __future__ import annotations

import ctypes
import gc
import json
import random
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pelton.errors import EngineError
from pelton.sampling_params import StructuredOutputsParams
from pelton.structured.interface import StructuredOutputContext
from pelton.testing.models import EOS_ID, VOCAB_SIZE, make_tiny_tokenizer
from pelton_plugins.structured_output import llguidance_backend
from pelton_plugins.structured_output.llguidance_backend import BatchFiller, LLGuidanceBackend, NativeFiller
from pelton_plugins.structured_output.native_matcher import ROW, CannotUseError, LateMasks, MaskPool

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
    late = grammars[0].filler.fill(rows, bitmask)
    for index, job in late.items() if late else ():  # on a slow machine
        made = job.result()
        bitmask[rows[index][1] : rows[index][1] + len(made)] = made
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


class HeldPool(MaskPool):
    """Over functions of the test: matcher m's masks have m in every word, and are made while the test lets it."""

    def __init__(self, num_threads: int, held: set[int], fails: set[int] = frozenset()) -> None:
        self.may_go, self.began, self.consumed = threading.Event(), [], {}
        words = ctypes.POINTER(ctypes.c_uint32)

        def consume(matcher, token):
            self.consumed.setdefault(matcher, []).append(token)
            return 0

        def compute(matcher, mask, num_bytes):
            self.began.append(matcher)
            if matcher in held:
                self.may_go.wait(60)
            for word in range(num_bytes // 4):
                mask[word] = matcher
            return int(matcher in fails)

        pointer, integer, size = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t
        self._kept = [
            ctypes.CFUNCTYPE(integer, pointer, ctypes.c_uint32)(consume),
            ctypes.CFUNCTYPE(integer, pointer, words, size)(compute),
            ctypes.CFUNCTYPE(integer, pointer, size)(lambda matcher, count: 0),
            ctypes.CFUNCTYPE(ctypes.c_bool, pointer)(lambda matcher: False),
        ]
        self._open(num_threads, 0.0, [ctypes.cast(one, pointer).value for one in self._kept])

    def masks(self, matchers: list[int], bitmask: np.ndarray, drafts: dict[int, np.ndarray]) -> np.ndarray:
        """The table of a call, row i's masks from place 3 i on."""
        table = np.zeros(len(matchers), dtype=ROW)
        table["matcher"], table["token"] = matchers, 7
        for place, matcher in enumerate(matchers):
            table["masks"][place] = bitmask[3 * place :].ctypes.data
            if matcher in drafts:
                table["drafts"][place], table["num_drafts"][place] = drafts[matcher].ctypes.data, len(drafts[matcher])
        self.num_failed = self.fill(table, 4 * WORDS, bitmask.strides[0])
        return table


@pytest.fixture
def compiled(native):
    """There is a compiler."""


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("held", [{4}, {1, 8}, {1, 2, 3, 4, 5}], ids=str)
def test_masks_that_are_held_up_are_left_behind_and_come_later(compiled, held, num_threads):
    """With threads enough and with fewer than are held up, with drafts too; others' masks are made meanwhile, time and again."""
    pool, matchers = HeldPool(num_threads, held, fails={6}), list(range(1, 10))
    drafts = {
        4: np.array([2, 3], dtype=np.uint32),
        5: np.array([0], dtype=np.uint32),
    }  # both allow token 2, 5 not token 0's bit
    bitmask = np.zeros((30, WORDS), dtype="<u4")
    table = pool.masks(matchers, bitmask, drafts)
    late = {int(row["matcher"]): int(row["late"]) for row in table if row["late"]}
    assert set(late) == held and pool.num_failed == 1 and table["failed"].tolist() == [m == 6 for m in matchers]
    for place, matcher in enumerate(matchers):
        assert (bitmask[3 * place] == (0 if matcher in held else matcher)).all()
    others = [matcher for matcher in matchers if matcher not in held]
    for _ in range(3):
        again = np.zeros((30, WORDS), dtype="<u4")
        assert not pool.masks(others, again, {})["late"].any()
        assert again[0 : 3 * len(others) : 3, 0].tolist() == others
    owners = {matcher: SimpleNamespace(late=None, get_error=lambda: "it broke") for matcher in held}
    jobs = {m: LateMasks(late[m], owners[m], (1 + len(drafts.get(m, ())), WORDS)) for m in held}
    assert not any(job.done() for job in jobs.values()) and all(owners[m].late is jobs[m] for m in held)
    pool.may_go.set()
    for matcher, job in jobs.items():
        made = job.result()
        assert job.done() and owners[matcher].late is None and (made[0] == matcher).all()
        if matcher == 4:
            assert (made[1] == 4).all() and (made[2] == -1).all(), "token 3 is not in its mask"
    assert all((bitmask[3 * place] == 0).all() for place, matcher in enumerate(matchers) if matcher in held)
    assert all(tokens[0] == 7 for tokens in pool.consumed.values()) and set(pool.consumed) == set(matchers)


def test_a_late_mask_that_fails_is_told_where_it_is_taken(compiled):
    pool, bitmask = HeldPool(1, {3}, fails={3}), np.zeros((2, WORDS), dtype="<u4")
    late = int(pool.masks([3], bitmask, {})["late"][0])
    job = LateMasks(late, SimpleNamespace(late=None, get_error=lambda: "it broke"), (1, WORDS))
    pool.may_go.set()
    with pytest.raises(EngineError, match="it broke"):
        job.result()


def test_a_request_that_ends_while_its_mask_is_late_leaves_its_matcher_alone(native, monkeypatch):
    """Nothing of it is freed or used again before the thread is done with it."""
    constraint = StructuredOutputsParams(json=json.dumps({"const": "left alone"}))
    grammar = native.compile(constraint)
    handle, pool = grammar.matcher.handle, HeldPool(1, {grammar.matcher.handle})
    monkeypatch.setattr(native, "_filler", NativeFiller(pool))
    grammar.filler = native._filler
    (job,) = native._filler.fill([(grammar, 0, ())], np.zeros((1, WORDS), dtype="<i4")).values()
    assert grammar.matcher.is_busy
    del grammar
    assert native.known(constraint) is None, "it was not given back"
    pool.may_go.set()
    assert (job.result() == handle % 2**32 - (2**32 if handle % 2**32 >= 2**31 else 0)).all()


def test_masks_that_nobody_takes_are_freed_with_their_matcher(native, monkeypatch):
    """They are in a cycle, whose finalizers run in any order."""
    constraint = StructuredOutputsParams(json=json.dumps({"const": "nobody's"}))
    for _ in range(4):
        grammar = native.compile(constraint)
        pool = HeldPool(1, {grammar.matcher.handle})
        grammar.filler = NativeFiller(pool)
        late = grammar.filler.fill([(grammar, 0, ())], np.zeros((1, WORDS), dtype="<i4"))
        assert list(late) == [0]
        threading.Timer(0.05, pool.may_go.set).start()
        del grammar, late
        gc.collect()
    assert (masks_of([native.compile(constraint)], [[]]) == masks_of([native.compile(constraint)], [[]])).all()
