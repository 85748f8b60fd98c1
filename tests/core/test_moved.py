"""Old public places of modules and names."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings

import pytest

from pelton import moved
from pelton_platforms.device.graphs import call_graph, captures


@pytest.mark.parametrize("old", moved.modules())
def test_a_module_is_the_same_under_its_old_name(old, monkeypatch):
    monkeypatch.delitem(sys.modules, old, raising=False)
    new = moved.modules()[old]
    with pytest.warns(DeprecationWarning, match=f"^{old} is {new} now"):
        found = importlib.import_module(old)
    assert found is importlib.import_module(new)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert importlib.import_module(old) is found, "warned of once"


@pytest.mark.parametrize("module, name", [(module, name) for module, names in moved.names().items() for name in names])
def test_a_name_is_found_in_its_old_module(module, name):
    home, _, new = moved.names()[module][name].rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"{name} is {home}.{new} now"):
        assert getattr(importlib.import_module(module), name) is getattr(importlib.import_module(home), new)


@pytest.mark.parametrize(
    "module, name", [(module, name) for module in (call_graph, captures) for name in module.OLD_NAMES]
)
def test_a_module_of_another_tree_keeps_its_old_names(module, name):
    home, _, new = module.OLD_NAMES[name].rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"{name} is {home}.{new} now"):
        assert getattr(module, name) is getattr(importlib.import_module(home), new)


def test_other_names_are_missing_as_ever():
    with pytest.raises(ImportError, match="no_such_module"):
        importlib.import_module("pelton.no_such_module")
    with pytest.raises(ImportError, match="no_such_name"):
        from pelton.tokenizer import no_such_name  # noqa: F401


def test_the_warning_points_at_the_import_and_the_new_module_stays_itself():
    code = (
        "import warnings; warnings.simplefilter('always')\n"
        "from pelton.scheduler.output import SchedulerOutput\n"
        "import pelton.messages.step as step\n"
        "assert step.__spec__.name == step.__name__ == SchedulerOutput.__module__ == 'pelton.messages.step'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.startswith("<string>:2: DeprecationWarning: pelton.scheduler.output is pelton.messages.step now")
