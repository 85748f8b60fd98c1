from __future__ import annotations

import hashlib
import os
import random
import struct
import subprocess
import sys
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.errors import ConfigError
from pelton.kv_cache.hashing import (
    BlockHasher,
    encode_binary,
    encode_cbor,
    extend_block_hashes,
    get_hash_fn,
    pack_tokens,
    placeholder_hashes,
)

IMAGE = "sha256:cat"


def chain(token_ids, block_size=4, algo="sha256", **extras):
    hashes = []
    BlockHasher(algo, block_size).extend(hashes, token_ids, **extras)
    return hashes


def test_only_full_blocks_are_hashed():
    assert [len(chain(range(n))) for n in (0, 3, 4, 7, 8, 100)] == [0, 0, 1, 1, 2, 25]
    assert len(chain(range(100), block_size=16)) * 16 == 96  # worked example 5.4


def test_a_hash_stands_for_everything_before_it():
    base = chain(range(12))
    assert len(set(base)) == 3
    changed_first = chain([99, *range(1, 12)])
    assert not set(base) & set(changed_first)
    assert chain([*range(11), 99])[:2] == base[:2]


def test_the_same_tokens_at_another_position_hash_otherwise():
    first, second = chain([7, 7, 7, 7] * 2)
    assert first != second


def test_hashing_goes_on_where_it_stopped():
    hashes = []
    hasher = BlockHasher("sha256", 4)
    for count in range(30):
        hasher.extend(hashes, list(range(count)), cache_salt="s", adapter_id=3, block_extra_hashes={1: ["x"]})
        assert len(hashes) == count // 4
    assert hashes == chain(range(29), cache_salt="s", adapter_id=3, block_extra_hashes={1: ["x"]})


def test_each_block_is_hashed_once():
    calls = []

    def counting(parent, token_ids, *extras):
        calls.append(tuple(token_ids))
        return b"%d" % len(calls)

    hashes = []
    for count in range(1, 13):
        extend_block_hashes(hashes, range(count), 4, hash_fn=counting)
    assert calls == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]


def test_the_adapter_changes_every_block_and_the_salt_the_first_and_hence_all():
    base = chain(range(12))
    assert not set(base) & set(chain(range(12), adapter_id=1))
    assert not set(base) & set(chain(range(12), cache_salt="s"))
    assert chain(range(12), cache_salt="") != base
    parts = []
    extend_block_hashes(
        [], range(12), 4, cache_salt="s", adapter_id=5, hash_fn=lambda *args: (parts.append(args[2:]), b"h")[1]
    )
    assert parts == [(5, (), "s"), (5, (), None), (5, (), None)]


def test_multimodal_prompt_of_the_worked_example():
    placeholder = 32000
    tokens = [1, 3, 7493, 1681, 1294, 1593, 3937, 9551, *[placeholder] * 41, 4]
    assert len(tokens) == 50
    extras = placeholder_hashes([(8, 41, IMAGE)], 16)
    assert extras == {0: [IMAGE], 1: [IMAGE], 2: [IMAGE], 3: [IMAGE]}
    base = chain(tokens, 16, block_extra_hashes=extras)
    assert len(base) == 3  # the fourth block has two tokens and no hash
    other = chain(tokens, 16, block_extra_hashes=placeholder_hashes([(8, 41, "sha256:dog")], 16))
    salted = chain(tokens, 16, block_extra_hashes=extras, cache_salt="s")
    without = chain(tokens, 16)
    all_hashes = [*base, *other, *salted, *without]
    assert len(set(all_hashes)) == 12


def test_placeholders_hash_the_blocks_they_touch_in_prompt_order():
    assert placeholder_hashes([(0, 4, "a"), (4, 4, "b")], 4) == {0: ["a"], 1: ["b"]}
    assert placeholder_hashes([(1, 2, "a"), (3, 2, "b"), (9, 0, "c")], 4) == {0: ["a", "b"], 1: ["b"]}


def test_a_second_image_changes_only_the_blocks_from_its_own_on():
    tokens = [5] * 12
    one = chain(tokens, block_extra_hashes={1: ["a"], 2: ["b"]})
    two = chain(tokens, block_extra_hashes={1: ["a"], 2: ["c"]})
    assert one[:2] == two[:2] and one[2] != two[2]


def test_sha256_is_over_the_documented_bytes():
    """Equal in every process and Python version: the bytes are written out here."""
    data = b"pelton.kv.1" + b"\x00" + struct.pack("<5q", 4, 1, 2, -3, 2**40)
    first = hashlib.sha256(data).digest()
    data = b"pelton.kv.1" + b"\x20" + first + struct.pack("<5q", 4, 9, 9, 9, 9)
    data += struct.pack("<qI", 7, 1) + b"\x03\x00\x00\x00\xc3\xa9!" + b"\x00"
    second = hashlib.sha256(data).digest()
    hashes = chain([1, 2, -3, 2**40])
    assert hashes == [first]
    extend_block_hashes(
        hashes, [1, 2, -3, 2**40, 9, 9, 9, 9], 4, hash_fn=get_hash_fn("sha256"), adapter_id=7, extra_hashes={1: ["é!"]}
    )
    assert hashes[1] == second


def test_cbor_is_deterministic_cbor():
    """RFC 8949: shortest heads, definite lengths; an array of version, parent, tokens, adapter, hashes, salt."""
    encoded = encode_cbor(b"\xaa\xbb", [0, 23, 24, 255, 256, 65535, 65536, 2**32, -1, -25], 300, ["é"], "s")
    assert encoded == bytes.fromhex(
        "86" "4b70656c746f6e2e6b762e31" "42aabb"
        "8a" "00" "17" "1818" "18ff" "190100" "19ffff" "1a00010000" "1b0000000100000000" "20" "3818"
        "19012c" "81" "62c3a9" "6173"
    )  # fmt: skip
    assert encode_cbor(b"", [], 0, [], None) == bytes.fromhex("864b70656c746f6e2e6b762e3140800080f6")


def test_sha256_cbor_hashes_the_cbor():
    assert chain([1, 2, 3, 4], algo="sha256_cbor") == [
        hashlib.sha256(encode_cbor(b"", [1, 2, 3, 4], 0, [], None)).digest()
    ]


WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=2)  # by a codec it asks for a million characters
INPUTS = st.tuples(
    st.binary(max_size=3),
    st.lists(st.integers(-2, 300), max_size=3),
    st.integers(0, 2),
    st.lists(WORDS, max_size=2),
    st.none() | WORDS,
)


@pytest.mark.parametrize("encode", [encode_binary, encode_cbor])
@settings(max_examples=300, deadline=None)
@given(INPUTS, INPUTS)
def test_different_inputs_never_encode_alike(encode, one, two):
    assert (encode(*one) == encode(*two)) == (one == two)


@pytest.mark.parametrize("algo", ["sha256", "sha256_cbor"])
def test_other_processes_make_the_same_hashes(algo):
    code = (
        "from pelton.kv_cache.hashing import BlockHasher; h = []\n"
        f"BlockHasher({algo!r}, 4).extend(h, range(9), cache_salt='s', adapter_id=2, block_extra_hashes={{1: ['x']}})\n"
        "print(b''.join(h).hex())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "12345"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    expected = chain(range(9), algo=algo, cache_salt="s", adapter_id=2, block_extra_hashes={1: ["x"]})
    assert out.stdout.strip() == b"".join(expected).hex()


@pytest.mark.parametrize("algo", ["xxhash", "xxhash_cbor"])
def test_a_missing_xxhash_says_what_to_install(algo, monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigError, match=rf"'{algo}', which needs the package xxhash.*pip install xxhash"):
        BlockHasher(algo, 16)


@pytest.mark.parametrize("algo, encode", [("xxhash", encode_binary), ("xxhash_cbor", encode_cbor)])
def test_xxhash_takes_128_bits_of_the_same_encodings(algo, encode, monkeypatch):
    seen = []

    def digest(data):
        seen.append(data)
        return hashlib.md5(data).digest()

    monkeypatch.setitem(sys.modules, "xxhash", types.SimpleNamespace(xxh3_128_digest=digest))
    hashes = chain(range(8), algo=algo)
    assert seen == [encode(b"", range(4), 0, [], None), encode(hashes[0], range(4, 8), 0, [], None)]
    assert [len(h) for h in hashes] == [16, 16]


@pytest.mark.parametrize("algo", ["md5", "sha256_pickle", "", "builtin"])
def test_an_unknown_algorithm_lists_the_known_ones(algo):
    with pytest.raises(ConfigError, match="use one of sha256, sha256_cbor, xxhash, xxhash_cbor"):
        get_hash_fn(algo)


@pytest.mark.parametrize("algo", ["sha256", "sha256_cbor"])
def test_a_lone_surrogate_in_a_salt_is_hashed_like_any_text(algo):
    salts = ["\ud800", "\ud801", "?"]
    assert len({chain(range(4), algo=algo, cache_salt=salt)[0] for salt in salts}) == 3


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2**62), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=3),
    block_size=st.integers(1, 7),
    adapter_id=st.integers(0, 1),
    salt=st.sampled_from([None, "", "s"]),
    extra=st.sampled_from([None, {1: ["x"]}]),
)
def test_the_short_way_of_plain_blocks_gives_the_same_hashes(tokens, cuts, block_size, adapter_id, salt, extra):
    """However the tokens come in: at once, or some at a time."""
    expected: list[bytes] = []
    extend_block_hashes(
        expected, tokens, block_size, hash_fn=get_hash_fn("sha256"), adapter_id=adapter_id, extra_hashes=extra,
        cache_salt=salt,
    )  # fmt: skip
    found: list[bytes] = []
    for cut in [*sorted(cuts), len(tokens)]:
        BlockHasher("sha256", block_size).extend(
            found, tokens[:cut], adapter_id=adapter_id, block_extra_hashes=extra, cache_salt=salt
        )
    assert found == expected


@pytest.mark.parametrize("salt", [None, "s"])
def test_the_first_block_may_be_hashed_alone(salt, monkeypatch):
    """A long prompt that came before is known all the same, and a salt stays in the chain."""
    hasher, tokens, expected = BlockHasher("sha256", 2), list(range(200)), []
    extend_block_hashes(expected, tokens, 2, hash_fn=get_hash_fn("sha256"), cache_salt=salt)
    for packed in (None, pack_tokens(tokens)):
        hashes = []
        hasher.extend(hashes, tokens[:2], cache_salt=salt, packed=packed and packed[:16])
        assert hashes == expected[:1]
        hasher.extend(hashes, tokens, cache_salt=salt, packed=packed)
        assert hashes == expected
    if salt is None:
        assert hasher._runs[b"", pack_tokens(tokens[:2])] == (pack_tokens(tokens[:128]), expected[:64])


def test_runs_of_blocks_that_are_remembered_give_the_same_hashes(monkeypatch):
    monkeypatch.setattr("pelton.kv_cache.hashing._MOST_RUNS", 8)
    rng, hasher, size = random.Random(0), BlockHasher("sha256", 2), 2 * 64
    known = [rng.randrange(1000) for _ in range(5 * size)]
    prompts = [
        known,
        known[:300],
        [1, *known],
        [*known[: 3 * size // 2], 8, *known],  # a run that begins like one that is remembered
        known[:size] + known[2 * size :],
        [*known[: 2 * size], 7, *known],
        known,
    ]
    for prompt in prompts:
        hashes, expected = [], []
        for end in (size // 3, len(prompt)):
            hasher.extend(hashes, prompt[:end])
        extend_block_hashes(expected, prompt, 2, hash_fn=get_hash_fn("sha256"))
        in_one_go, from_packed = [], expected[:70]
        hasher.extend(in_one_go, prompt)
        hasher.extend(from_packed, prompt, packed=pack_tokens(prompt))
        assert hashes == expected == in_one_go == from_packed
    assert len(hasher._runs) == 8
    digested = []
    monkeypatch.setattr(hasher, "_digest", lambda data: digested.append(data) or hashlib.sha256(data).digest())
    again = []
    hasher.extend(again, known)
    assert again == hashes and not digested, "what is remembered is not hashed again"


def test_the_algorithms_differ():
    assert chain(range(4)) != chain(range(4), algo="sha256_cbor")


def test_the_kv_cache_package_loads_no_array_library():
    code = (
        "import sys, pelton_plugins.kv_cache.manager, pelton.kv_cache.planner, pelton.kv_cache.hashing\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
