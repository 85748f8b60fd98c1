"""GGUF headers: what is read, and what a broken or hostile file gets."""

import random
import struct
import time

import gguf
import numpy as np
import pytest

from pelton.errors import ConfigError
from pelton.model.source import SourceRequest
from pelton_plugins.loaders.gguf.file import QUANT_TYPES, GGUFFile
from pelton_plugins.sources.demo import resolve

TOKENS = ["a", "é", "", "日本" * 20]


def write_small(path, *, alignment=None):
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.eps", 1e-5)
    writer.add_bool("flag", True)
    writer.add_int64("big", -(2**40))
    writer.add_array("tokens", TOKENS)
    writer.add_array("numbers", [1, -2, 3])
    writer.add_string("last", "end")
    writer.add_tensor("one.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("two.weight", np.arange(8, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def small(tmp_path):
    return write_small(tmp_path / "small.gguf")


@pytest.mark.parametrize("alignment", [None, 64])
def test_reads_metadata_and_places_of_tensors(tmp_path, alignment):
    file = GGUFFile(write_small(tmp_path / "x.gguf", alignment=alignment))
    assert file.architecture == "llama" and file.get("last") == "end"
    assert file.section("llama")["block_count"] == 2
    assert file.get("flag") is True and file.get("big") == -(2**40) and file.get("llama.eps") == pytest.approx(1e-5)
    assert file.strings("tokens") == TOKENS and file.get("numbers") == [1, -2, 3]
    assert file.get("nothing", 7) == 7 and "tokens" in file and "nothing" not in file
    one, two = file.tensors["one.weight"], file.tensors["two.weight"]
    assert one.shape == (2, 3) and one.quant_type.name == "F32"
    assert np.frombuffer(file.data, np.float32, 6, one.start).tolist() == [0, 1, 2, 3, 4, 5]
    assert np.frombuffer(file.data, np.float16, 8, two.start).tolist() == list(range(8))


def test_block_sizes_are_those_of_the_gguf_package():
    for kind, quant in QUANT_TYPES.items():
        assert gguf.GGMLQuantizationType(kind).name == quant.name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)] == (quant.block_size, quant.block_bytes)


def test_agrees_with_the_gguf_package_on_the_demo_model_and_is_quick():
    path = resolve(SourceRequest(name="smollm2"))
    start = time.process_time()
    file = GGUFFile(path)
    tokens = file.strings("tokenizer.ggml.tokens")
    merges = file.strings("tokenizer.ggml.merges")
    took_s, start = time.process_time() - start, time.process_time()
    theirs = gguf.GGUFReader(path)
    assert took_s < (time.process_time() - start) / 5
    assert tokens == theirs.fields["tokenizer.ggml.tokens"].contents()
    assert merges == theirs.fields["tokenizer.ggml.merges"].contents()
    places = {t.name: (t.data_offset, t.n_bytes, tuple(int(d) for d in t.shape[::-1])) for t in theirs.tensors}
    assert {t.name: (t.start, t.num_bytes, t.shape) for t in file.tensors.values()} == places


def header(num_tensors, num_values, body=b"", version=3, magic=b"GGUF"):
    return struct.pack("<4sIQQ", magic, version, num_tensors, num_values) + body


def text(value, length=None):
    data = value.encode()
    return struct.pack("<Q", len(data) if length is None else length) + data


def tensor(name="x", dims=(4,), kind=0, offset=0, num_dims=None):
    return text(name) + struct.pack(
        f"<I{len(dims)}QIQ", len(dims) if num_dims is None else num_dims, *dims, kind, offset
    )


HOSTILE = {
    "empty": (b"", "cannot be read"),
    "text": (b"version https://git-lfs.github.com/spec/v1", "is not a GGUF file"),
    "short": (b"GGUF", "ends early"),
    "version": (header(0, 0, version=1), "version 1"),
    "big-endian": (header(0, 0, version=3 << 24), "big-endian"),
    "many-values": (header(0, 2**63), "metadata values"),
    "many-tensors": (header(2**63, 0), "tensors"),
    "key-length": (header(0, 1, text("k", 2**63)), "claims"),
    "string-length": (header(0, 1, text("k") + struct.pack("<IQ", 8, 2**64 - 1)), "claims"),
    "array-length": (header(0, 1, text("k") + struct.pack("<IIQ", 9, 4, 2**62)), "claims"),
    "string-array-length": (header(0, 1, text("k") + struct.pack("<IIQ", 9, 8, 2**61)), "claims"),
    "string-in-array": (header(0, 1, text("k") + struct.pack("<IIQ", 9, 8, 1) + text("x", 2**64 - 9)), "past the file"),
    "nested-array": (header(0, 1, text("k") + struct.pack("<IIQ", 9, 9, 1)), "array of type 9"),
    "type": (header(0, 1, text("k") + struct.pack("<I", 77)), "unknown type 77"),
    "key-utf8": (header(0, 1, struct.pack("<Q", 1) + b"\xff"), "damaged"),
    "alignment": (header(0, 1, text("general.alignment") + struct.pack("<II", 4, 0)), "power of two"),
    "dims": (header(1, 0, tensor(num_dims=9)), "9 dimensions"),
    "overflowing-dims": (header(1, 0, tensor(dims=(2**32, 2**32))), "ends at byte"),
    "wrapping-offset": (header(1, 0, tensor(offset=2**64 - 32)), "ends at byte"),
    "unaligned": (header(1, 0, tensor(offset=1)), "aligned"),
    "row": (header(1, 0, tensor(dims=(33, 2), kind=2)), "no multiple of 32"),
    "quant-type": (header(1, 0, tensor(kind=255)), "GGML type 255"),
    "twice": (header(2, 0, tensor() + tensor()) + b"\0" * 256, "twice"),
}


@pytest.mark.parametrize("data, message", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_one_clear_error(tmp_path, data, message):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message) as caught:
        GGUFFile(path)
    assert "hostile.gguf" in str(caught.value)


def test_a_file_cut_anywhere_is_an_error(small, tmp_path):
    data = small.read_bytes()
    path = tmp_path / "cut.gguf"
    last_byte = max(t.start + t.num_bytes for t in GGUFFile(small).tensors.values())
    for length in range(0, last_byte, 7):
        path.write_bytes(data[:length])
        with pytest.raises(ConfigError, match=r"cut.gguf"):
            GGUFFile(path)


def test_changed_bytes_never_do_more_than_raise_config_error(small, tmp_path):
    data, rng = bytearray(small.read_bytes()), random.Random(0)
    path = tmp_path / "changed.gguf"
    refused = 0
    for _ in range(500):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(4, 400)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
        path.write_bytes(changed)
        try:
            file = GGUFFile(path)
            file.get("tokens")
        except ConfigError:
            refused += 1
    assert 100 < refused < 500


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none.gguf cannot be read"):
        GGUFFile(tmp_path / "none.gguf")
