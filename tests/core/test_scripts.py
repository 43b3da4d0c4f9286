"""What another script defines is found by name, and nothing else of that script runs."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from corral.core.scripts import find_script, found_script
from corral.core.settings import found_by_name, import_path, path_of
from corral.errors import ConfigError

TRAINS = """
from __future__ import annotations
import dataclasses, sys
from math import tau as turn
SIZE = 2 * 3
unused = 1 / 0

def scaled(value):
    return value * SIZE * turn

@dataclasses.dataclass
class Net:
    size: int = SIZE
    def out(self) -> NotDefined:
        return scaled(1.0)

class Broken(undefined):
    pass

sys.exit("trained")
if __name__ == "__main__":
    class Inner(Net):
        pass
    sys.exit("trained in the guard")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("corral.core.scripts._known", {})
    (tmp_path / "trains.py").write_text(TRAINS)
    return tmp_path


def test_only_what_a_name_needs_runs_and_once() -> None:
    net = import_path("trains.py:Net")
    assert net().size == 6 and net().out() == pytest.approx(6 * 6.283185307)
    assert import_path("trains.py:Net") is net and issubclass(import_path("trains.py:Inner"), net)
    assert "trains.py" not in sys.modules and "unused" not in vars(find_script("trains.py"))


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("sizes = [64]\nsizes += [32]\nfound = sizes", [64, 32]),
        ("table, key = {}, 1\ntable[key] = 2\nfor n in 'bc': table[n] = [0 for key in 'x']\nfound = len(table)", 3),
        ("class Net: pass\nclass Net(Net): more = 1\nNet.size = 3\nfound = Net.size, Net.more", (3, 1)),
        ("try: import missing as fast\nexcept ImportError: fast = 5\nfound = fast", 5),
        ("with open(__file__) as file: line = file.readline()\nfound = line[:4]", "with"),
        ("if (limit := 7) > 0: found = limit", 7),
        ("key = 1\nother = [undefined for key in 'xy']\nkey + undefined\nfound = key", 1),
    ],
)
def test_all_statements_that_change_a_name_run(source: str, value: object, folder: Path) -> None:
    (folder / "changes.py").write_text(source)
    assert import_path("changes.py:found") == value


def test_what_was_found_is_saved_by_its_name_again() -> None:
    net = import_path("trains.py:Net")
    assert path_of(net) == "trains.py:Net" and found_by_name(net)
    assert import_path(path_of(net)) is net and found_script("trains.py") is not None


def test_its_classes_travel_with_their_source() -> None:
    data = cloudpickle.dumps(import_path("trains.py:Net"))
    again = pickle.loads(data)
    assert again().out() == import_path("trains.py:Net")().out()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("trains.py:Nothing", r"'trains\.py:Nothing' cannot be imported: 'trains\.py' has no 'Nothing'"),
        ("trains.py:Broken", r"trains\.py: its definitions raised NameError: name 'undefined' is not defined"),
        ("other.py:Net", r"it is in the script other\.py.*nor in the working directory\. Move the class"),
        ("folder/trains.py:Net", r"it is in the script folder/trains\.py"),
        ("syntax.py:Net", r"syntax\.py cannot be read as a script"),
    ],
)
def test_what_is_not_found_says_why(path: str, message: str, folder: Path) -> None:
    (folder / "syntax.py").write_text("class Net(:")
    (folder / "folder").mkdir()
    (folder / "folder" / "trains.py").write_text(TRAINS)
    with pytest.raises(ConfigError, match=message):
        import_path(path)


def test_the_folder_of_the_script_that_runs_comes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = folder / "scripts"
    other.mkdir()
    (other / "trains.py").write_text("class Net:\n    size = 1")
    main: Any = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", str(other / "restores.py"), raising=False)
    assert import_path("trains.py:Net").size == 1
