"""Names of earlier versions: import paths of modules that moved, and methods of `Algorithm` that its parts have now."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import corral
from at_least import at_least
from corral.moved import MOVED, MOVED_METHODS
from small import small


@pytest.mark.parametrize("old", MOVED)
def test_an_old_import_path_leads_to_the_same_objects_with_a_warning(old: str) -> None:
    if old == "tune":
        pytest.importorskip("ray.tune")
    for name in [name for name in sys.modules if name.startswith(f"corral.{old}")]:
        del sys.modules[name]  # views that another test made
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = importlib.import_module(f"corral.{old}")
    assert str(caught[-1].message) == f"corral.{old} is corral.{MOVED[old]} now: use that name."
    assert {warning.category for warning in caught} == {DeprecationWarning}
    now = importlib.import_module(f"corral.{MOVED[old]}")
    shown = [name for name in vars(now) if not name.startswith("_")]
    assert found is not now and all(getattr(found, name) is getattr(now, name) for name in at_least(1, shown))


def test_a_module_within_a_package_that_moved_is_not_loaded_twice() -> None:
    with pytest.warns(DeprecationWarning):
        from corral.loggers.files import CSVLogger as Old
    from corral.runs.loggers import CSVLogger as Now

    assert Old is Now and pickle.loads(pickle.dumps(Old)) is Now
    with pytest.raises(ModuleNotFoundError, match=r"corral\.runs\.loggers\.nothing"):
        importlib.import_module("corral.loggers.nothing")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'corral\.nothing'"):
        importlib.import_module("corral.nothing")


def test_a_script_sees_the_warning_at_its_own_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import corral\nfrom corral.serving.client import PolicyClient\nprint(PolicyClient.__module__)\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout == "corral.runners.serving.client\n"
    assert "script.py:2: DeprecationWarning: corral.serving.client is corral.runners.serving.client now" in done.stderr


def test_methods_that_moved_to_parts_of_an_algorithm_are_found_with_a_warning() -> None:
    with small().build() as algo:
        for old, now in MOVED_METHODS.items():
            with pytest.warns(DeprecationWarning, match=rf"algorithm\.{old} is algorithm\.{now} now"):
                found = getattr(algo, old)
            part, _, name = now.partition(".")
            assert found == getattr(getattr(algo, part), name)
        with pytest.raises(corral.errors.UnknownAttributeError, match="no attribute 'loss_off'"):
            algo.loss_off  # noqa: B018
