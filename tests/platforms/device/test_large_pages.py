"""Tensors in large pages are memory like any other."""

import torch

from pelton.testing.model_driver import make_test_build
from pelton_platforms.device.large_pages import LEAST_BYTES, PAGE_BYTES, REGION_BYTES, LargePages
from pelton_platforms.device.make_model import use_device_memory


def test_tensors_are_zero_apart_and_aligned():
    pages = LargePages()
    shapes = [(3, 5), (LEAST_BYTES,), (LEAST_BYTES + 1,), (2, PAGE_BYTES), (REGION_BYTES + 7,), (LEAST_BYTES, 3)]
    tensors = [pages.zeros(shape, torch.bfloat16) for shape in shapes]
    for number, tensor in enumerate(tensors, start=1):
        assert tensor.dtype == torch.bfloat16 and not tensor.flatten()[:: 4096 // 2].any() and not tensor.flatten()[-1]
        assert tensor.data_ptr() % 64 == 0
        assert tensor.untyped_storage().nbytes() == tensor.numel() * 2
        tensor.flatten()[0] = tensor.flatten()[-1] = number
    for number, (shape, tensor) in enumerate(zip(shapes, tensors, strict=True), start=1):
        assert tensor.shape == shape and tensor.flatten()[0] == tensor.flatten()[-1] == number


def test_a_tensor_outlives_its_pages():
    tensor = LargePages().zeros((PAGE_BYTES,), torch.int32)
    tensor.fill_(7)
    assert tensor.sum() == 7 * PAGE_BYTES


def test_parameters_come_from_them_on_the_cpu():
    build = make_test_build({})
    use_device_memory(build)
    assert isinstance(build.allocate.__self__, LargePages)
    taken = []
    build.allocate = lambda *given: taken.append(given) or torch.ones(2)
    assert build.empty(4, 6).tolist() == [1, 1] and taken == [((4, 6), torch.float32)]
