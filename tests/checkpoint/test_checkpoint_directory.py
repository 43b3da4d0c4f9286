"""The directory of a checkpoint: there whole or not at all, and what is wrong with it is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from corral.checkpoint import directory, read_checkpoint, write_checkpoint
from corral.errors import CheckpointError

WEIGHTS = {
    "default_policy": {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "count": np.array(4)},
    "../odd/id": {"w": np.arange(6.0)[::2], "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3))},
}


def write(path: Path, number: int = 1) -> Path:
    config = {"algo": "PPO", "training": {"lr": 0.1}}
    return write_checkpoint(path, state={"number": number}, weights=WEIGHTS, config=config, metadata={"algo": "PPO"})


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_everything_comes_back(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write(tmp_path / "deep" / "checkpoint"))
    assert checkpoint.state == {"number": 1}
    assert checkpoint.config == {"algo": "PPO", "training": {"lr": 0.1}}
    assert checkpoint.metadata["algo"] == "PPO" and checkpoint.metadata["format_version"] == 1
    assert checkpoint.weights.keys() == WEIGHTS.keys()
    for module_id, arrays in WEIGHTS.items():
        assert checkpoint.weights[module_id].keys() == arrays.keys()
        for name, array in arrays.items():
            found = checkpoint.weights[module_id][name]
            assert found.dtype == array.dtype and found.shape == array.shape and np.array_equal(found, array)
    assert names(tmp_path / "deep") == ["checkpoint"]


def test_the_files_are_what_other_programs_read(tmp_path: Path) -> None:
    path = write(tmp_path / "checkpoint")
    assert names(path) == ["config.yaml", "metadata.json", "modules", "state.msgpack"]
    assert json.loads((path / "metadata.json").read_text())["format"] == "corral checkpoint"
    assert np.array_equal(load_file(path / "modules/default_policy.safetensors")["w"], WEIGHTS["default_policy"]["w"])


def test_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "of_somebody_else").touch()
    write(tmp_path / "checkpoint", number=2)
    assert read_checkpoint(tmp_path / "checkpoint").state == {"number": 2}
    assert names(tmp_path) == ["checkpoint"]
    (tmp_path / "empty").mkdir()
    assert read_checkpoint(write(tmp_path / "empty")).state == {"number": 1}


def test_nothing_else_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("text")
    for path in (tmp_path / "thesis", tmp_path / "file"):
        with pytest.raises(CheckpointError, match=f"{path} is not a checkpoint, and would be replaced"):
            write(path)
    assert (tmp_path / "thesis" / "thesis.tex").read_text() == "years of work"
    assert names(tmp_path) == ["file", "thesis"]


@pytest.mark.parametrize("file", ["state.msgpack", "default_policy.safetensors", "metadata.json"])
def test_a_write_that_fails_leaves_the_old_one(tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "checkpoint")
    write_file = directory._write

    def fail(path: Path, data: bytes) -> None:
        if path.name == file:
            write_file(path, data[: len(data) // 2])
            raise OSError("the disk is full")
        write_file(path, data)

    monkeypatch.setattr(directory, "_write", fail)
    for name in ("checkpoint", "other"):
        with pytest.raises(OSError, match="the disk is full"):
            write(tmp_path / name, number=2)
    assert read_checkpoint(tmp_path / "checkpoint").state == {"number": 1}
    assert names(tmp_path) == ["checkpoint"]


def test_a_rename_that_fails_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "checkpoint")
    rename = Path.rename

    def fail(self: Path, target: Any) -> Any:
        if self.name.endswith(".new"):
            raise OSError("the network drive is gone")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="the network drive is gone"):
        write(tmp_path / "checkpoint", number=2)
    assert read_checkpoint(tmp_path / "checkpoint").state == {"number": 1}
    assert names(tmp_path) == ["checkpoint"]


def test_a_process_that_ended_between_the_renames(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint").rename(tmp_path / ".checkpoint.0a1b.old")
    with pytest.raises(CheckpointError, match=r"does not exist, but .*\.checkpoint\.0a1b\.old does: rename it"):
        read_checkpoint(tmp_path / "checkpoint")


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes(change((path / name).read_bytes())) and None


def describe(**changes: Any) -> Callable[[Path], None]:
    return edit("metadata.json", lambda data: json.dumps({**json.loads(data), **changes}).encode())


MODULE = "modules/default_policy.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "metadata.json").unlink(), "is not a checkpoint: it has no metadata.json"),
        (lambda path: (path / "state.msgpack").unlink(), "state.msgpack cannot be read: No such file"),
        (lambda path: (path / MODULE).unlink(), "default_policy.safetensors cannot be read: No such file"),
        (edit("state.msgpack", lambda data: data[:-1]), r"state.msgpack has \d+ bytes and was written with \d+"),
        (edit(MODULE, lambda data: b""), r"default_policy.safetensors has 0 bytes and was written with \d+"),
        (edit(MODULE, lambda data: data[:-1] + b"x"), "default_policy.safetensors was changed after it was written"),
        (edit("metadata.json", lambda data: data[:50]), "metadata.json is damaged"),
        (edit("metadata.json", lambda data: b"[]"), "metadata.json is not a file of a checkpoint"),
        (
            describe(format_version=7, corral_version="9.9"),
            "format version 7, written by Corral 9.9; .* reads version 1",
        ),
        (describe(format="a recipe"), "metadata.json is not a file of a checkpoint"),
        (describe(files={}), "metadata.json is damaged: it does not list state.msgpack"),
        (describe(files=None), "metadata.json is damaged: it does not list the checkpoint's files"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    path = write(tmp_path / "checkpoint")
    damage(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(path)
    assert str(path) in str(caught.value)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a checkpoint: it does not exist"):
        read_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="it is a file, and a checkpoint is a directory"):
        read_checkpoint(tmp_path / "file")


@pytest.mark.parametrize("name", ["state.msgpack", "config.yaml", MODULE])
def test_files_whose_content_is_something_else(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "checkpoint")
    (path / name).write_bytes(b"[1, 2")
    monkeypatch.setattr(directory, "_read_file", lambda path, name, described: (path / name).read_bytes())
    with pytest.raises(CheckpointError, match=f"{path / name} is damaged"):
        read_checkpoint(path)


def test_files_that_a_later_corral_may_add_are_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "checkpoint")
    metadata = json.loads((path / "metadata.json").read_text())
    metadata["files"]["../outside"] = {"num_bytes": 1, "crc32": 0}
    metadata["files"]["replay.bin"] = {"num_bytes": 10**12, "crc32": 0}
    (path / "metadata.json").write_text(json.dumps(metadata))
    assert read_checkpoint(path).state == {"number": 1}
