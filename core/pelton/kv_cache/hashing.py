"""Chain hashes of full blocks: what makes a cached block findable.

hash(block) = H(hash of the block before, its token ids, extras). Extras are the adapter's never-reused id, multimodal
content hashes of the block's placeholders, and in the first block the cache salt. The encoding is our own and
canonical: equal in every process, on every machine and Python version; nothing is pickled, Python's `hash` not used.
"""

from __future__ import annotations

import hashlib
import importlib
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from pelton.errors import ConfigError

BlockHashFn = Callable[[bytes, Sequence[int], int, Sequence[str], str | None], bytes]
"""(parent hash, token ids, adapter id, multimodal hashes, cache salt) -> hash; an empty parent is the chain's start."""

_VERSION = b"pelton.kv.1"  # a change of either encoding changes this


def get_hash_fn(algo: str) -> BlockHashFn:
    """The hash of `prefix_caching_hash_algo`. Raises `ConfigError` for an unknown one, or when its package is missing.

    sha256 makes collisions infeasible, also for an adversary; xxhash (128 bits) is faster and does not: only for trusted clients.
    """
    name, _, encoding = algo.partition("_")
    if name not in ("sha256", "xxhash") or encoding not in ("", "cbor"):
        raise ConfigError(f"prefix_caching_hash_algo is {algo!r}; use one of sha256, sha256_cbor, xxhash, xxhash_cbor.")
    digest = _digest_of(algo)
    encode = encode_cbor if encoding else encode_binary
    return lambda *block: digest(encode(*block))


def extend_block_hashes(
    hashes: list[bytes],
    token_ids: Sequence[int],
    block_size: int,
    *,
    hash_fn: BlockHashFn,
    adapter_id: int = 0,
    extra_hashes: Mapping[int, Sequence[str]] | None = None,
    cache_salt: str | None = None,
) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` lacks: each block is hashed once.

    token_ids: all known tokens of the request. extra_hashes: multimodal hashes by block index.
    """
    parent = hashes[-1] if hashes else b""
    extra_hashes = extra_hashes or {}
    for index in range(len(hashes), len(token_ids) // block_size):
        tokens = token_ids[index * block_size : (index + 1) * block_size]
        parent = hash_fn(parent, tokens, adapter_id, extra_hashes.get(index, ()), None if index else cache_salt)
        hashes.append(parent)


_RUN, _MOST_RUNS = 64, 1024
"""Blocks of a run whose hashes are remembered together, and how many runs: a million tokens in blocks of 16, 14 MB."""


class BlockHasher:
    """`extend_block_hashes` with an engine's algorithm and block size (`KVCachePlan.hash_block_size`).

    A long prompt that comes again, or one that begins like it, is not hashed again: runs of blocks are remembered by the hash
    before them and their first block, and compared with all their tokens.
    """

    def __init__(self, algo: str, block_size: int) -> None:
        self.block_size = block_size
        self._hash_fn = get_hash_fn(algo)
        self._digest = None if algo.endswith("_cbor") else _digest_of(algo)
        self._pack_block = _packer(block_size)
        # (hash before, tokens of the first block) -> (all tokens, hashes); least recently used first
        self._runs: dict[tuple[bytes, bytes], tuple[bytes, list[bytes]]] = {}

    def extend(
        self,
        hashes: list[bytes],
        token_ids: Sequence[int],
        *,
        adapter_id: int = 0,
        block_extra_hashes: Mapping[int, Sequence[str]] | None = None,
        cache_salt: str | None = None,
        packed: bytes | None = None,
    ) -> None:
        """Append what is missing; a few operations while no new block is full. packed: `pack_tokens(token_ids)` where there is one."""
        size = self.block_size
        first = len(hashes) * size
        num_missing = len(token_ids) - first
        if num_missing < size:
            return
        digest = self._digest
        # The salt is in the first block only.
        if digest is not None and not adapter_id and not block_extra_hashes and (hashes or cache_salt is None):
            if hashes and num_missing < 2 * size:  # one block: nearly all calls of requests that decode
                parent = hashes[-1]
                tokens = self._pack_block(size, *token_ids[first : first + size])
                hashes.append(digest(_VERSION + bytes((len(parent),)) + parent + tokens))
                return
            if len(hashes) == 1 and cache_salt is None and num_missing >= (_RUN - 1) * size:
                hashes.clear()  # a run is known from its first block on
            self._extend_plain(hashes, token_ids, digest, packed)
            return
        extend_block_hashes(
            hashes, token_ids, self.block_size, hash_fn=self._hash_fn, adapter_id=adapter_id,
            extra_hashes=block_extra_hashes, cache_salt=cache_salt,
        )  # fmt: skip

    def _extend_plain(
        self, hashes: list[bytes], token_ids: Sequence[int], digest: Callable[[bytes], bytes], packed: bytes | None
    ) -> None:
        """`extend_block_hashes` with `encode_binary` and no extras."""
        block_size, first = self.block_size, len(hashes)
        count = len(token_ids) // block_size
        if packed is None:  # of the missing blocks alone
            tokens, at = pack_tokens(token_ids[first * block_size : count * block_size]), first
        else:
            tokens, at = packed, 0
        while first < count:
            last = min(first + _RUN - first % _RUN, count)
            if last - first == _RUN:
                self._extend_by_run(hashes, tokens, first - at, digest)
            else:
                _hash_plain(hashes, tokens, first - at, last - at, block_size, digest)
            first = last

    def _extend_by_run(self, hashes: list[bytes], tokens: bytes, first: int, digest: Callable[[bytes], bytes]) -> None:
        size = 8 * self.block_size
        start = first * size
        key = hashes[-1] if hashes else b"", tokens[start : start + size]
        run = self._runs.pop(key, None)
        if run is not None and tokens.startswith(run[0], start):
            hashes += run[1]
        else:
            _hash_plain(hashes, tokens, first, first + _RUN, self.block_size, digest)
            run = tokens[start : start + _RUN * size], hashes[-_RUN:]
            if len(self._runs) >= _MOST_RUNS:
                del self._runs[next(iter(self._runs))]
        self._runs[key] = run


def _hash_plain(
    hashes: list[bytes], tokens: bytes, first: int, last: int, block_size: int, digest: Callable[[bytes], bytes]
) -> None:
    """Append the hashes of blocks first .. last - 1 of packed tokens, as `encode_binary` has them without extras."""
    size, length = 8 * block_size, _packer(0)(block_size)
    if not hashes:  # without a parent
        hashes.append(digest(_VERSION + b"\0" + length + tokens[first * size : (first + 1) * size]))
        first += 1
    parent = hashes[-1]
    head = _VERSION + bytes((len(parent),))
    for place in range(first * size, last * size, size):
        parent = digest(head + parent + length + tokens[place : place + size])
        hashes.append(parent)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Each as a little-endian int64."""
    return _packer(len(token_ids) - 1)(*token_ids)


def placeholder_hashes(placeholders: Sequence[tuple[int, int, str]], block_size: int) -> dict[int, list[str]]:
    """Content hashes by block index, from (offset, length, content hash) of each multimodal item, in prompt order."""
    by_block: dict[int, list[str]] = {}
    for offset, length, content_hash in placeholders:
        if length > 0:
            for index in range(offset // block_size, (offset + length - 1) // block_size + 1):
                by_block.setdefault(index, []).append(content_hash)
    return by_block


def encode_binary(
    parent: bytes, token_ids: Sequence[int], adapter_id: int, mm_hashes: Sequence[str], cache_salt: str | None
) -> bytes:
    """Lengths before everything of variable size, numbers as little-endian int64: no two inputs encode alike.

    version | u8 len(parent) | parent | i64 number of tokens | tokens | nothing, or: i64 adapter, u32 number of hashes,
    each u32 length and UTF-8, then u8 0 without salt, or u8 1 and the salt as UTF-8.
    """
    count = len(token_ids)
    head = b"%b%c%b%b" % (_VERSION, len(parent), parent, _packer(count)(count, *token_ids))
    if not adapter_id and not mm_hashes and cache_salt is None:
        return head
    parts = [head, struct.pack("<qI", adapter_id, len(mm_hashes))]
    for text in mm_hashes:
        data = text.encode("utf-8", "surrogatepass")
        parts += (struct.pack("<I", len(data)), data)
    parts.append(b"\0" if cache_salt is None else b"\1" + cache_salt.encode("utf-8", "surrogatepass"))
    return b"".join(parts)


def encode_cbor(
    parent: bytes, token_ids: Sequence[int], adapter_id: int, mm_hashes: Sequence[str], cache_salt: str | None
) -> bytes:
    """Deterministic CBOR (RFC 8949, section 4.2): [version, parent, tokens, adapter, hashes, salt or null]."""
    out = bytearray(b"\x86")
    _cbor_head(out, 2, len(_VERSION))
    out += _VERSION
    _cbor_head(out, 2, len(parent))
    out += parent
    _cbor_head(out, 4, len(token_ids))
    for token_id in token_ids:
        _cbor_int(out, token_id)
    _cbor_int(out, adapter_id)
    _cbor_head(out, 4, len(mm_hashes))
    for text in mm_hashes:
        _cbor_text(out, text)
    if cache_salt is None:
        out += b"\xf6"
    else:
        _cbor_text(out, cache_salt)
    return bytes(out)


def _cbor_head(out: bytearray, major: int, value: int) -> None:
    """A major type with its argument in the shortest form."""
    if value < 24:
        out.append(major << 5 | value)
        return
    width = next(width for width in range(4) if value < 1 << (8 << width))  # 1, 2, 4 or 8 bytes
    out.append(major << 5 | 24 + width)
    out += value.to_bytes(1 << width, "big")


def _cbor_int(out: bytearray, value: int) -> None:
    _cbor_head(out, 0 if value >= 0 else 1, value if value >= 0 else -1 - value)


def _cbor_text(out: bytearray, text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    _cbor_head(out, 3, len(data))
    out += data


@lru_cache(maxsize=256)
def _packer(count: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{count + 1}q").pack


def _digest_of(algo: str) -> Callable[[bytes], bytes]:
    return _sha256 if algo.startswith("sha256") else _xxhash_digest(algo)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _xxhash_digest(algo: str) -> Callable[[bytes], bytes]:
    try:
        module = importlib.import_module("xxhash")
    except ImportError as error:
        raise ConfigError(
            f"prefix_caching_hash_algo is {algo!r}, which needs the package xxhash, and that is not installed. "
            f"Run `pip install xxhash`, or use {algo.replace('xxhash', 'sha256')!r}."
        ) from error
    digest: Callable[[bytes], bytes] = module.xxh3_128_digest
    return digest
