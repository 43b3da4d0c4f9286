"""The directory of a checkpoint: there whole or not at all, and what is wrong with it is named."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forging
import numpy as np
import pytest
from forging import MODULE, data
from safetensors.numpy import load_file

from corral.core import places
from corral.errors import CheckpointError
from corral.runs.checkpoint import directory, read_checkpoint, write_checkpoint

WEIGHTS = {
    "default_policy": {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "count": np.array(4)},
    "../odd/id": {"w": np.arange(6.0)[::2], "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3))},
}
ARRAYS = {
    "obs": np.arange(24, dtype=np.uint8).reshape(2, 3, 4).transpose(2, 0, 1),
    "../odd": np.array(3),
    "none": np.zeros((0, 3)),
    "days": np.array(["2020-01-01"], "datetime64[D]"),
}


def write(path: Path | str, number: int = 1) -> Path | str:
    return write_checkpoint(
        path,
        state={"number": number},
        weights=WEIGHTS,
        config={"algo": "PPO", "training": {"lr": 0.1}},
        metadata={"algo": "PPO"},
        policies={"default_policy": {"number": number}},
        arrays={**ARRAYS, "number": np.full(3, number)},
    )


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.name != ".lock")


@pytest.fixture(params=["directory", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | str]:
    """A directory, and a URL for fsspec."""
    if request.param == "directory":
        yield tmp_path / "deep" / "checkpoint"
    else:
        fsspec = pytest.importorskip("fsspec")
        yield "memory://deep/checkpoint"
        fsspec.filesystem("memory").rm("/deep", recursive=True)


def test_everything_comes_back(place: Path | str) -> None:
    assert write(place) == place
    checkpoint = read_checkpoint(place)
    assert checkpoint.path == place
    assert checkpoint.state == {"number": 1}
    assert checkpoint.config == {"algo": "PPO", "training": {"lr": 0.1}}
    assert checkpoint.policies == {"default_policy": {"number": 1}}
    assert checkpoint.metadata["algo"] == "PPO" and checkpoint.metadata["format_version"] == 1
    assert checkpoint.weights.keys() == WEIGHTS.keys()
    for module_id, arrays in WEIGHTS.items():
        assert_same(checkpoint.weights[module_id], arrays)
    assert_same(checkpoint.arrays, {**ARRAYS, "number": np.full(3, 1)})
    assert not checkpoint.arrays["obs"].flags.writeable


def assert_same(found: dict[str, Any], arrays: dict[str, Any]) -> None:
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert np.array_equal(found[name], array)


def test_a_policy_in_use_reads_neither_state_nor_arrays(place: Path | str) -> None:
    write(place)
    if isinstance(place, Path):
        (data(place) / "state.msgpack").unlink()
        (data(place) / "arrays" / "obs.npy").unlink()
    checkpoint = read_checkpoint(place, with_state=False)
    assert checkpoint.state == {} and checkpoint.arrays == {}
    assert checkpoint.policies == {"default_policy": {"number": 1}} and checkpoint.weights.keys() == WEIGHTS.keys()


def test_the_files_are_what_other_programs_read(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    write(path)
    assert names(path) == sorted(["metadata.json", data(path).name])
    assert names(data(path)) == ["arrays", "config.json", "modules", "policies.json", "state.msgpack"]
    assert json.loads((path / "metadata.json").read_text())["format"] == "corral checkpoint"
    weights = load_file(data(path) / "modules/default_policy.safetensors")
    assert np.array_equal(weights["w"], WEIGHTS["default_policy"]["w"])
    assert np.array_equal(np.load(data(path) / "arrays" / "obs.npy"), ARRAYS["obs"])


def test_a_checkpoint_is_replaced(place: Path | str) -> None:
    write(place)
    write(place, number=2)
    checkpoint = read_checkpoint(place)
    assert checkpoint.state == {"number": 2} and checkpoint.policies["default_policy"] == {"number": 2}
    assert len([name for name in places.place_of(place).names() if name.startswith("data-")]) == 1


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
def test_files_are_on_the_disk_before_the_checkpoint_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure, no file of a checkpoint may be empty."""
    on_disk: set[str] = set()
    replace = os.replace

    def check(source: Any, target: Any) -> None:
        there = {str(file) for file in tmp_path.rglob("*") if file.is_file() and file.name != ".lock"}
        assert len(there) > 3 and there <= on_disk
        replace(source, target)

    monkeypatch.setattr(os, "fsync", lambda descriptor: on_disk.add(os.readlink(f"/proc/self/fd/{descriptor}")))
    monkeypatch.setattr(os, "replace", check)
    write(tmp_path / "checkpoint")
    assert str(tmp_path / "checkpoint") in on_disk  # the directory, with the new name


def test_the_files_of_the_user_stay(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    write(path)
    (path / "notes.txt").write_text("the good one")
    (path / "data-2026").mkdir()
    write(path, number=2)
    assert read_checkpoint(path).state == {"number": 2}
    assert (path / "notes.txt").read_text() == "the good one" and (path / "data-2026").is_dir()
    assert names(tmp_path) == ["checkpoint"]
    (tmp_path / "empty").mkdir()
    assert read_checkpoint(write(tmp_path / "empty")).state == {"number": 1}


def test_a_link_to_a_directory_stays_a_link(tmp_path: Path) -> None:
    write(tmp_path / "first")
    (tmp_path / "latest").symlink_to("first")
    write(tmp_path / "latest", number=2)
    assert (tmp_path / "latest").is_symlink()
    for name in ("first", "latest"):
        assert read_checkpoint(tmp_path / name).state == {"number": 2}


def test_links_inside_of_a_checkpoint_lead_no_saver_astray(tmp_path: Path) -> None:
    path, outside = tmp_path / "checkpoint", tmp_path / "outside"
    write(path)
    outside.mkdir()
    (outside / "thesis.tex").write_text("years of work")
    (path / f"data-{1:032x}").symlink_to(outside)
    (path / "metadata.json").rename(outside / "metadata.json")
    (path / "metadata.json").symlink_to(outside / "metadata.json")
    before = (outside / "metadata.json").read_bytes()
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        write(path, number=2)
    (path / "metadata.json").unlink()
    write(path, number=2)
    (path / ".lock").unlink()
    (path / ".lock").symlink_to(outside / "thesis.tex")
    with pytest.raises(CheckpointError, match=r"\.lock is a symbolic link"):
        write(path, number=3)
    assert read_checkpoint(path).state == {"number": 2}
    assert (outside / "thesis.tex").read_text() == "years of work"
    assert (outside / "metadata.json").read_bytes() == before


def test_what_a_killed_saver_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    for number in (1, 2):
        left = path / f"data-{number:032x}" / "modules"
        left.mkdir(parents=True)
        (left / "default_policy.safetensors").write_bytes(b"half")
        write(path, number)  # the first time there is no checkpoint yet
        assert read_checkpoint(path).state == {"number": number}
        assert names(path) == sorted(["metadata.json", data(path).name])


def test_nothing_else_is_mixed_with_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "metadata.json").write_text('{"format": "a recipe"}')
    for name, file in (("thesis", "thesis.tex"), ("recipes", "metadata.json")):
        with pytest.raises(CheckpointError, match=f"{tmp_path / name} is not a checkpoint, and holds other .*{file}"):
            write(tmp_path / name)
        assert names(tmp_path / name) == [file] and not (tmp_path / name / ".lock").exists()
    (tmp_path / "file").write_text("text")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name in ("file", "nowhere"):
        with pytest.raises(CheckpointError, match=f"{tmp_path / name} is no directory"):
            write(tmp_path / name)
    assert (tmp_path / "file").read_text() == "text" and (tmp_path / "nowhere").is_symlink()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"config": {"a": object()}}, "the config cannot be saved as JSON: Object of type object"),
        ({"metadata": {"a": {1}}}, "the metadata cannot be saved as JSON"),
        ({"policies": {"a": {"b": b""}}}, "the description of the policies cannot be saved as JSON"),
        ({"weights": {"a": {"b": np.array(["x"])}}}, "the weights of module 'a' cannot be saved"),
        ({"state": {"a": {1}}}, r"\['a'\] is builtins.set"),
        ({"arrays": {"a": np.array([{}])}}, "the array 'a' cannot be saved: its dtype is object"),
        ({"arrays": {"a": np.zeros(2, [("x", "f4")])}}, "the array 'a' cannot be saved"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(
    part: dict[str, Any], message: str, tmp_path: Path
) -> None:
    whole: dict[str, Any] = {"state": {}, "weights": {}, "config": {}, "metadata": {}}
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path / "checkpoint", **{**whole, **part})
    assert names(tmp_path) == []


@pytest.mark.parametrize("file", ["state.msgpack", "default_policy.safetensors", "metadata.json"])
def test_a_write_that_fails_leaves_the_old_one(tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "checkpoint")
    before = names(tmp_path / "checkpoint")
    write_file = places.LocalPlace.write

    def fail(self: places.LocalPlace, name: str, chunks: Any) -> None:
        write_file(self, name, [b"half of it"] if name.endswith(file) else chunks)
        if name.endswith(file):
            raise OSError("the disk is full")

    monkeypatch.setattr(places.LocalPlace, "write", fail)
    (tmp_path / "of the user").mkdir()
    for name in ("checkpoint", "of the user", "other"):
        with pytest.raises(OSError, match="the disk is full"):
            write(tmp_path / name, number=2)
    assert read_checkpoint(tmp_path / "checkpoint").state == {"number": 1}
    assert names(tmp_path / "checkpoint") == before
    assert names(tmp_path) == ["checkpoint", "of the user"]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_failure_at_the_last_step_leaves_a_whole_checkpoint(
    is_replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint"
    write(path)
    replace = os.replace

    def fail(source: Any, target: Any) -> None:
        if is_replaced:
            replace(source, target)
        raise OSError("the network drive is gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="the network drive is gone"):
        write(path, number=2)
    assert read_checkpoint(path).state == {"number": 2 if is_replaced else 1}
    assert names(path) == sorted(["metadata.json", data(path).name])


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        file = path / name if name == "metadata.json" else data(path) / name
        file.write_bytes(change(file.read_bytes()))

    return damage


def describe(**changes: Any) -> Callable[[Path], None]:
    return lambda path: forging.describe(path, lambda metadata: metadata.update(changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "metadata.json").unlink(), "is not a checkpoint: it has no metadata.json"),
        (lambda path: (data(path) / "state.msgpack").unlink(), "state.msgpack cannot be read: No such file"),
        (lambda path: (data(path) / MODULE).unlink(), "default_policy.safetensors cannot be read: No such file"),
        (edit("state.msgpack", lambda data: data[:-1]), r"state.msgpack has \d+ bytes and was written with \d+"),
        (edit("arrays/obs.npy", lambda data: data[:-1]), r"obs.npy has \d+ bytes and was written with \d+"),
        (edit(MODULE, lambda data: b""), r"default_policy.safetensors has 0 bytes and was written with \d+"),
        (edit(MODULE, lambda data: data[:-1] + b"x"), "default_policy.safetensors was changed after it was written"),
        (edit("arrays/obs.npy", lambda data: data[:-1] + b"x"), "obs.npy was changed after it was written"),
        (edit("metadata.json", lambda data: data[:50]), "metadata.json is damaged"),
        (edit("metadata.json", lambda data: b"[]"), "metadata.json is not a file of a checkpoint"),
        (edit("metadata.json", lambda data: b"[" * 100_000), "metadata.json is damaged"),
        (
            edit("metadata.json", lambda data: data.replace(b'"algo": "PPO"', b'"algo": "DQN"')),
            "metadata.json was changed after it was written",
        ),
        (
            describe(format_version=7, corral_version="9.9"),
            "format version 7, written by Corral '9.9'; .* reads version 1: install the Corral",
        ),
        (describe(format_version=True), "format version True"),
        (describe(format="a recipe"), "metadata.json is not a file of a checkpoint"),
        (describe(files={}), "metadata.json is damaged: it does not list config.json"),
        (describe(files=None), "metadata.json is damaged: it does not list the checkpoint's files"),
        (describe(data="../data"), "metadata.json is damaged: it names no data directory"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    path = tmp_path / "checkpoint"
    write(path)
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
    with pytest.raises(CheckpointError, match="memory://nowhere is not a checkpoint: it does not exist"):
        read_checkpoint("memory://nowhere")
    with pytest.raises(CheckpointError, match=r"nonsense://x cannot be opened: .*nonsense"):
        read_checkpoint("nonsense://x")


@pytest.mark.parametrize("name", ["state.msgpack", "config.json", "policies.json", MODULE, "arrays/obs.npy"])
def test_files_whose_content_is_something_else(tmp_path: Path, name: str) -> None:
    path = tmp_path / "checkpoint"
    write(path)
    forging.forge(path, name, b"[1, 2")
    with pytest.raises(CheckpointError, match=f"{re.escape(str(data(path) / name))} is damaged"):
        read_checkpoint(path)


def test_files_that_a_later_corral_may_add_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    write(path)
    entry = {"num_bytes": 10**12, "sha256": ""}
    forging.describe(path, lambda metadata: metadata["files"].update({"../outside": entry, "replay.bin": entry}))
    assert read_checkpoint(path).state == {"number": 1}


@pytest.mark.parametrize("is_strided", [False, True])
def test_large_arrays_are_neither_written_nor_read_through_memory(is_strided: bool, tmp_path: Path) -> None:
    num_rows, num_columns = 64, 2**18  # 64 MiB
    mapped = np.memmap(tmp_path / "buffer", np.int32, "w+", shape=(num_rows, num_columns))
    mapped[:] = np.arange(num_rows)[:, None]
    array = mapped[::2, ::2] if is_strided else mapped
    tracemalloc.start()
    try:
        write_checkpoint(
            tmp_path / "checkpoint",
            state={},
            weights={},
            config={},
            metadata={},
            arrays={"obs": array, "more": array[:3]},
        )
        found = read_checkpoint(tmp_path / "checkpoint").arrays["obs"]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * directory.CHUNK_BYTES
    assert found.shape == array.shape and np.array_equal(found[:, 0], array[:, 0]) and found[-1, -1] == array[-1, -1]
