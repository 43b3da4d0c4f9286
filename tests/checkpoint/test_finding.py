"""Finding the last or the best checkpoint of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from forging import data, write

from corral.core.places import place_of
from corral.errors import CheckpointError
from corral.runs.checkpoint import find_checkpoint, read_checkpoint


@pytest.fixture(params=["directory", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | str]:
    """The directory of a run with four checkpoints, and the same behind a URL."""
    root: Path | str = tmp_path / "run" if request.param == "directory" else "memory://run"
    for name, iteration in {"iteration-000120": 120, "iteration-000080": 80, "of_my_own": 100, "best": 90}.items():
        write(place_of(root).child("checkpoints").child(name).location, iteration)
    yield root
    if request.param == "memory":
        pytest.importorskip("fsspec").filesystem("memory").rm("/run", recursive=True)


@pytest.mark.parametrize("inside", ["", "checkpoints"])
def test_the_last_and_the_best_checkpoint_of_a_run(run: Path | str, inside: str) -> None:
    root = place_of(run).child(inside).location if inside else run
    home = place_of(run).child("checkpoints")
    assert find_checkpoint(root) == home.child("iteration-000120").location
    assert find_checkpoint(root, prefer="best") == home.child("best").location
    assert read_checkpoint(find_checkpoint(root)).metadata["training_iteration"] == 120


def test_a_damaged_best_checkpoint_is_not_replaced_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, iteration in {"iteration-000003": 3, "best": 2}.items():
        write(tmp_path / "checkpoints" / name, iteration)
    state = data(tmp_path / "checkpoints" / "best") / "state.msgpack"
    state.write_bytes(state.read_bytes()[:-1])
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path, prefer="best")
    assert f"The best checkpoint is damaged, so the last one is used: {state} has" in caplog.text
    assert len(caplog.records) == 1  # what is last does not depend on the best one


def test_a_checkpoint_is_itself(run: Path | str) -> None:
    path = place_of(run).child("checkpoints").child("iteration-000080").location
    assert find_checkpoint(path) == find_checkpoint(path, prefer="best") == path


def test_a_checkpoint_that_is_not_whole_is_passed_over(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4):
        write(tmp_path / "checkpoints" / f"iteration-{iteration:06}", iteration)
    newest, cut, gone = (tmp_path / "checkpoints" / f"iteration-{iteration:06}" for iteration in (4, 3, 2))
    (newest / "metadata.json").write_text("{", encoding="utf-8")
    (data(cut) / "state.msgpack").write_bytes(b"")
    (data(gone) / "config.json").unlink()
    (tmp_path / "checkpoints" / "iteration-000005" / "data-00").mkdir(parents=True)  # its first save was killed
    assert find_checkpoint(tmp_path) == tmp_path / "checkpoints" / "iteration-000001"
    (data(tmp_path / "checkpoints" / "iteration-000001") / "config.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(tmp_path, prefer="best")
    assert str(caught.value).startswith(f"{tmp_path} holds no complete checkpoint: ")
    for problem in (f"{newest / 'metadata.json'} is damaged", f"{data(cut) / 'state.msgpack'} has 0 bytes"):
        assert problem in str(caught.value)


def test_without_another_one_the_best_is_the_last_and_the_last_the_best(tmp_path: Path) -> None:
    write(tmp_path / "one" / "checkpoints" / "best", 5)
    assert find_checkpoint(tmp_path / "one") == tmp_path / "one" / "checkpoints" / "best"
    write(tmp_path / "two" / "checkpoints" / "iteration-000007", 7)
    assert find_checkpoint(tmp_path / "two", prefer="best") == tmp_path / "two" / "checkpoints" / "iteration-000007"


def test_where_there_is_none_the_error_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "model.zip").touch()
    for name, problem in (
        ("nowhere", "it does not exist"),
        ("empty", "it has no metadata.json"),
        ("file", "it is a file"),
        ("model.zip", "it is a file, .*; corral.from_sb3 reads models of Stable-Baselines3"),
    ):
        there = re.escape(str(tmp_path / name))
        with pytest.raises(CheckpointError, match=f"{there} holds no complete checkpoint: {problem}"):
            find_checkpoint(tmp_path / name)
