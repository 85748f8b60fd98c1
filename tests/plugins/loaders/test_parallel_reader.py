"""Tensors come into place whole, whatever slice, dtype and strides; what a thread raises reaches the caller."""

import pytest
import torch
from safetensors.torch import save_file

from pelton.errors import ConfigError
from pelton_plugins.loaders.parallel_reader import FileSource, ParallelReader
from pelton_plugins.loaders.safetensors_header import read_header
from pelton_plugins.loaders.safetensors_loader import header_of

SHAPES = {"rows": (1100, 600), "experts": (6, 300, 400), "vector": (700_001,), "small": (8, 8)}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    path = tmp_path_factory.mktemp("reader") / "model.safetensors"
    save_file(tensors, path)
    return path, tensors


CASES = [
    ("rows", None, 0, None), ("rows", 0, 300, 900), ("rows", 1, 100, 350), ("experts", 0, 2, 5), ("experts", 1, 10, 200),
    ("experts", 2, 0, 200), ("vector", None, 0, None), ("vector", 0, 3, 600_000),
]  # fmt: skip


@pytest.mark.parametrize("part_bytes", [2000, 300_000, 2**23])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_slice_comes_into_place(file, part_bytes, dtype):
    path, tensors = file
    source = FileSource(path)
    header, targets = header_of(source), []
    reader = ParallelReader(3, part_bytes)
    with reader.running():
        for name, dim, start, stop in CASES:
            whole = tensors[name]
            wanted = whole if dim is None else whole[(slice(None),) * dim + (slice(start, stop),)]
            strided = torch.zeros(*wanted.shape[:-1], wanted.shape[-1] + 3, dtype=dtype)[..., : wanted.shape[-1]]
            for target in (torch.zeros(wanted.shape, dtype=dtype), strided):
                done = reader.fill(source, header.tensors[name], target, dim, start, stop)
                assert done or part_bytes < 300_000
                if done:
                    targets.append((name, target, wanted))
    assert len(targets) >= 6
    for name, target, wanted in targets:
        assert torch.equal(target, wanted.to(dtype)), name


def test_small_tensors_are_left_to_the_caller(file):
    source, reader = FileSource(file[0]), ParallelReader(1)
    target = torch.zeros(8, 8, dtype=torch.bfloat16)
    with reader.running():
        assert not reader.fill(source, header_of(source).tensors["small"], target, None, 0, None)
    assert not target.any()


def test_a_file_that_ends_early_is_named(file, tmp_path):
    source = FileSource(file[0])
    place = header_of(source).tensors["rows"]
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(file[0].read_bytes()[: place.offset + 5000])
    reader = ParallelReader(2, 1000)
    with pytest.raises(ConfigError, match=r"cut\.safetensors ends at byte \d+, within a tensor"), reader.running():
        reader.fill(FileSource(cut), place, torch.zeros(SHAPES["rows"], dtype=torch.bfloat16), None, 0, None)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"abc", "it has 3 bytes"),
        ((1000).to_bytes(8, "little") + b"{}", "its header would have 1000 bytes, the file has 10"),
        ((2).to_bytes(8, "little") + b"[]", "its header is not a JSON object"),
        ((4).to_bytes(8, "little") + b"oops", "its header is not JSON"),
        ((58).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,  16 ]}}', "'a' does not fit"),
        ((58).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[4],"data_offset":[0,   16 ]}}', "header has .* for tensor 'a'"),
    ],
)  # fmt: skip
def test_a_broken_header_is_named(content, message):
    with pytest.raises(ConfigError, match=f"x is not a valid safetensors file: .*{message}"):
        read_header("x", len(content), lambda offset, size: content[offset : offset + size])
