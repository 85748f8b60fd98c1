"""One tiny checkpoint of each family and transformers' model of it, made once a session."""

import pytest
import torch

import pelton_backends.sdpa.plugin
import pelton_plugins.models.plugin
from pelton.testing.model_driver import ModelDriver
from pelton.testing.models import FAMILIES, load_reference, make_tiny_checkpoint
from pelton.testing.plugins import plugins_of


@pytest.fixture(scope="session")
def model_plugins():
    return plugins_of(pelton_backends.sdpa.plugin, pelton_plugins.models.plugin)


@pytest.fixture(scope="session", params=list(FAMILIES))
def family(request):
    return request.param


@pytest.fixture(scope="session")
def checkpoint(family, tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp(family), family, with_tokenizer=False)


@pytest.fixture(scope="session")
def reference(checkpoint):
    return load_reference(checkpoint)


@pytest.fixture
def make_driver(model_plugins):
    return lambda path, **options: ModelDriver(path, plugins=model_plugins, **options)


@pytest.fixture(scope="session")
def token_ids():
    """150 tokens: past every tiny model's window, and one past a block at 145."""
    return torch.randint(5, 320, (150,), generator=torch.Generator().manual_seed(0)).tolist()
