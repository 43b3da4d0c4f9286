"""Files of a checkpoint that an attacker wrote or a disk damaged: one clear error each, and nothing else happens."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forging
import msgpack
import numpy as np
import pytest
from forging import FILES, MODULE, data, describe, forge, write

from corral import Algorithm, PPOConfig, load_policy
from corral.errors import CheckpointError
from corral.runs.checkpoint import read_checkpoint
from corral.runs.checkpoint.codec import encode

DEADLINE_S = 120.0
MAX_BYTES = 64 * 2**20  # all cases together
Damage = Callable[[Path], object]


class Harm:
    """A pickle that leaves a mark."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.path}/harm",))


def forged(name: str, content: bytes) -> Damage:
    return lambda path: forge(path, name, content)


def pickled(name: str) -> Damage:
    return lambda path: forge(path, name, pickle.dumps(Harm(path.parent)))


def pickled_array(path: Path) -> None:
    file = path.parent / "objects.npy"
    np.save(file, np.array([Harm(path.parent)], object), allow_pickle=True)
    forge(path, "arrays/obs.npy", file.read_bytes())
    file.unlink()


def file_of(path: Path, name: str) -> Path:
    return path / name if name == "metadata.json" else data(path) / name


def linked(name: str, target: str | None = None) -> Damage:
    """Move a file or directory away, and put a link in its place."""

    def damage(path: Path) -> None:
        file = file_of(path, name)
        elsewhere = path.parent / "elsewhere"
        file.rename(elsewhere)
        file.symlink_to(elsewhere if target is None else target)

    return damage


def fifo(name: str) -> Damage:
    def damage(path: Path) -> None:
        file_of(path, name).unlink()
        os.mkfifo(file_of(path, name))

    return damage


def folder(name: str) -> Damage:
    def damage(path: Path) -> None:
        file_of(path, name).unlink()
        file_of(path, name).mkdir()

    return damage


def device(path: Path) -> None:
    file_of(path, "state.msgpack").unlink()
    try:
        os.mknod(file_of(path, "state.msgpack"), 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        file_of(path, "state.msgpack").symlink_to("/dev/zero")


def sparse(name: str, num_bytes: int) -> Damage:
    """Make a file long without taking room on the disk."""

    def damage(path: Path) -> None:
        os.truncate(file_of(path, name), num_bytes)
        if name != "metadata.json":
            describe(path, lambda metadata: metadata["files"][name].update(num_bytes=num_bytes))

    return damage


def listed(**entry: Any) -> Damage:
    return lambda path: describe(path, lambda metadata: metadata["files"]["state.msgpack"].update(entry))


def safetensors(header: dict[str, Any], num_bytes: int = 0, length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(num_bytes)


def npy(header: str, num_bytes: int = 0) -> bytes:
    text = header.encode() + b" " * (-(10 + len(header) + 1) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(num_bytes)


def array(dtype: Any, shape: Any, num_bytes: int = 0, order: str = "C") -> bytes:
    header = msgpack.packb([dtype, shape, order])
    return msgpack.packb({"a": msgpack.ExtType(3, struct.pack("<I", len(header)) + header + bytes(num_bytes))})


def nested(before: bytes, after: bytes = b"", depth: int = 100_000) -> bytes:
    return before * depth + b"\xc0" + after * depth


ANNOUNCED = b"".join(b"\xdd" + struct.pack(">I", 2**22 - 1000) for _ in range(190)) + b"\xc4" * 2**22
STATE, CONFIG, ARRAY = "state.msgpack", "config.json", "arrays/obs.npy"
CASES: dict[str, Damage] = {
    **{f"pickle in {name}": pickled(name) for name in FILES},
    "pickle in an array of objects": pickled_array,
    "pickle as an extension": forged(STATE, msgpack.packb({"a": msgpack.ExtType(3, pickle.dumps(Harm(Path("/"))))})),
    "data directory elsewhere": lambda path: describe(path, lambda metadata: metadata.update(data="../elsewhere")),
    "data directory of root": lambda path: describe(path, lambda metadata: metadata.update(data="/etc")),
    "data directory through itself": lambda path: describe(
        path, lambda metadata: metadata.update(data=f"{metadata['data']}/../..")
    ),
    **{f"link in place of {name}": linked(name) for name in ("metadata.json", *FILES, "modules", "arrays", "")},
    **{f"link to a device in place of {name}": linked(name, "/dev/zero") for name in ("metadata.json", STATE, ARRAY)},
    **{f"FIFO in place of {name}": fifo(name) for name in ("metadata.json", *FILES)},
    **{f"directory in place of {name}": folder(name) for name in ("metadata.json", *FILES)},
    "device": device,
    **{f"sparse {name}": sparse(name, 2**44 - 2**20) for name in ("metadata.json", *FILES[:4])},
    "negative size": listed(num_bytes=-1),
    "fraction as size": listed(num_bytes=1.5),
    "text as size": listed(num_bytes="many"),
    "huge size": listed(num_bytes=2**70),
    "number as hash": listed(sha256=5),
    "no hash": lambda path: describe(path, lambda metadata: metadata["files"][STATE].pop("sha256")),
    "no metadata of files": lambda path: describe(path, lambda metadata: metadata.update(files=["state.msgpack"])),
    # Lengths of msgpack.
    "long list": forged(STATE, b"\xdd\xff\xff\xff\xff"),
    "long dict": forged(STATE, b"\xdf\xff\xff\xff\xff"),
    "long text": forged(STATE, b"\xdb\xff\xff\xff\xff"),
    "long bytes": forged(STATE, b"\xc6\xff\xff\xff\xff"),
    "long extension": forged(STATE, b"\xc9\xff\xff\xff\xff\x03"),
    "lists that each announce the rest": forged(STATE, ANNOUNCED),
    "deep lists": forged(STATE, nested(b"\x91")),
    "lists in each other that msgpack would read": forged(STATE, b"\x81\xa1a" + nested(b"\x91", depth=600)),
    "deep dicts": forged(STATE, nested(b"\x81\xa1a")),
    "deep tuples": forged(STATE, nested(b"\x92\xc7\x00\x01")),
    "dicts as keys": forged(STATE, b"\x81" + nested(b"\x81", b"\x01", depth=100) + b"\x01"),
    "deep extensions": forged(STATE, b"\xc9\xff\xff\xff\xff\x03" * 1000),
    "unknown extension": forged(STATE, msgpack.packb({"a": msgpack.ExtType(77, b"x")})),
    "integer that is none": forged(STATE, msgpack.packb({"a": msgpack.ExtType(2, b"os.system")})),
    "two values": forged(STATE, encode({"a": 1}) * 2),
    "no value": forged(STATE, b""),
    "state that is a list": forged(STATE, encode([1, 2, 3])),
    "state that is a number": forged(STATE, encode(3)),
    # Arrays in the state.
    "array of objects": forged(STATE, array("|O", [1], 8)),
    "array of voids": forged(STATE, array("|V8", [1], 8)),
    "array of a named type": forged(STATE, array("os.system", [1], 8)),
    "array of many fields": forged(STATE, array("i4,i4", [1], 8)),
    "array of nested fields": forged(STATE, array([["a", [["b", "|O", []]], []]], [1], 8)),
    "array of nothing": forged(STATE, array("<U0", [10**12])),
    "huge array": forged(STATE, array("<f8", [2**40])),
    "array that overflows": forged(STATE, array("<f8", [2**32, 2**32, 0])),
    "array of negative size": forged(STATE, array("<f8", [-1, -8], 64)),
    "array of fractions": forged(STATE, array("<f8", [0.5, 2], 8)),
    "array of many axes": forged(STATE, array("<f8", [1] * 100, 8)),
    "array of another order": forged(STATE, array("<f8", [1], 8, "K")),
    "array whose shape is text": forged(STATE, array("<f8", "11", 8)),
    "array with a long header": forged(STATE, msgpack.packb({"a": msgpack.ExtType(3, b"\xff\xff\xff\xff")})),
    # safetensors.
    "long header of weights": forged(MODULE, safetensors({}, length=2**63)),
    "large header of weights": forged(MODULE, safetensors({}, length=10**8)),
    "huge weights": forged(MODULE, safetensors({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}})),
    "weights that overflow": forged(
        MODULE, safetensors({"w": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}})
    ),
    "weights that overlap": forged(
        MODULE,
        safetensors({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in ("v", "w")}, 4),
    ),
    "weights of an unknown dtype": forged(
        MODULE, safetensors({"w": {"dtype": "F8_E5M2", "shape": [1], "data_offsets": [0, 1]}}, 1)
    ),
    "deep header of weights": forged(MODULE, struct.pack("<Q", 200_000) + b"[" * 100_000 + b"]" * 100_000),
    # npy.
    "huge mapped array": forged(ARRAY, npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }")),
    "mapped array of objects": forged(ARRAY, npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", 8)),
    "mapped array with code": forged(ARRAY, npy("{'descr': __import__('os').system('touch harm')}", 8)),
    "mapped array with a deep header": forged(ARRAY, npy("-" * 60_000)),
    "mapped array of another version": forged(ARRAY, b"\x93NUMPY\x03\x00" + bytes(100)),
    "mapped array without end": forged(ARRAY, b"\x93NUMPY\x01\x00\xff\xff"),
    # JSON.
    **{f"deep {name}": forged(name, b'{"a":' * 100_000) for name in FILES[:2]},
    **{f"list in {name}": forged(name, b"[1, 2]") for name in FILES[:2]},
    **{f"number in {name}": forged(name, b"1") for name in FILES[:2]},
    **{f"long number in {name}": forged(name, b'{"a": ' + b"9" * 10_000 + b"}") for name in FILES[:2]},
    "no UTF-8 in config.json": forged(CONFIG, b'{"a": "\xff\xfe"}'),
    "deep metadata": lambda path: (path / "metadata.json").write_text('{"a":' * 100_000),
    "metadata of text": lambda path: (path / "metadata.json").write_text('"corral checkpoint"'),
    # Versions.
    **{
        f"version {version!r}": lambda path, version=version: describe(
            path, lambda metadata: metadata.update(format_version=version, corral_version="9" * 10_000)
        )
        for version in (0, 2, -1, 1.0, "1", None, True, [1])
    },
}


def snapshot(path: Path) -> dict[str, Any]:
    """Return names, kinds and sizes of everything below a directory."""
    return {str(file): (file.lstat().st_mode, file.lstat().st_size) for file in path.rglob("*")}


def test_each_hostile_checkpoint_ends_in_one_clear_error(tmp_path: Path) -> None:
    for index, (name, damage) in enumerate(CASES.items()):
        (tmp_path / f"{index}").mkdir()
        write(tmp_path / f"{index}" / "checkpoint")
        assert damage(tmp_path / f"{index}" / "checkpoint") is not NotImplemented, name
    before = snapshot(tmp_path)
    paths = [str(tmp_path / f"{index}" / "checkpoint") for index in range(len(CASES))]
    done = subprocess.run(
        [sys.executable, forging.__file__, *paths], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr[-2000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    for name, path, found in zip(CASES, paths, told, strict=True):
        assert found["error"] == "CheckpointError", (name, found)
        assert path in found["message"] and len(found["message"]) < 1000 and "\n" not in found["message"], (name, found)
        assert found["num_bytes"] < MAX_BYTES and found["time_s"] < 10, (name, found)
    assert snapshot(tmp_path) == before  # nothing was executed or written
    assert not [file for file in before if file.endswith("harm")]


def test_files_outside_of_the_data_directory_are_never_read(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint")
    os.mkfifo(tmp_path / "outside.safetensors")  # a reader would wait for it
    entry = {"num_bytes": 10, "sha256": ""}
    outside = [
        "../outside.safetensors",
        "modules/../../../outside.safetensors",
        str(tmp_path / "outside.safetensors"),
        "arrays/../../outside.npy",
        "modules/a/b.safetensors",
        "modules\\..\\outside.safetensors",
    ]
    describe(tmp_path / "checkpoint", lambda metadata: metadata["files"].update(dict.fromkeys(outside, entry)))
    assert forging.number_of(read_checkpoint(tmp_path / "checkpoint")) == 1


@pytest.mark.parametrize("name", ["metadata.json", *FILES])
def test_a_file_that_was_cut_off_or_changed_anywhere_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    write(path)
    file = file_of(path, name)
    content = file.read_bytes()
    step = max(1, len(content) // 100)
    for at in range(0, len(content), step):
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        for damaged in (content[:at], bytes(flipped)):
            file.write_bytes(damaged)
            try:
                found = read_checkpoint(path)
            except CheckpointError as error:
                assert str(file) in str(error)
            else:  # white space between the entries of the metadata, and nothing else
                assert name == "metadata.json" and json.loads(damaged) == json.loads(content)
                assert forging.number_of(found) == 1
    file.write_bytes(content + b"more")
    with pytest.raises(CheckpointError, match=name.rpartition("/")[2]):
        read_checkpoint(path)


@pytest.mark.parametrize("name", FILES)
def test_a_forged_file_gives_only_an_error(name: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    write(path)
    content = file_of(path, name).read_bytes()
    rng = random.Random(3)
    outcomes = set()
    for _ in range(400):
        forged_content = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(forged_content))
            forged_content[at : at + rng.randint(0, 4)] = rng.randbytes(rng.randint(0, 4))
            forged_content = forged_content or bytearray(b"x")
        forge(path, name, bytes(forged_content))
        try:
            read_checkpoint(path)
            outcomes.add("read")
        except CheckpointError as error:
            assert str(path) in str(error)
            outcomes.add("refused")
    assert "refused" in outcomes


def change(path: Path, name: str, how: Callable[[dict[str, Any]], object]) -> None:
    """Change a file of JSON of a checkpoint, as if Corral had written it so."""
    found = json.loads(file_of(path, name).read_bytes())
    how(found)
    forge(path, name, json.dumps(found).encode())


HUGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "layers": lambda policy: policy["model_config"].update(fcnet_hiddens=[10**9, 10**9]),
    "one layer": lambda policy: policy["model_config"].update(fcnet_hiddens=[10**9]),
    "a layer that torch cannot count": lambda policy: policy["model_config"].update(fcnet_hiddens=[10**12, 10**12]),
    "actions": lambda policy: policy["action_space"].update(n=10**9),
    "observations": lambda policy: policy.update(
        observation_space={"type": "Discrete", "n": 10**9, "start": 0, "dtype": "int64"}
    ),
    "memory": lambda policy: policy.update(
        module_class="RecurrentActorCritic", model_config={"use_lstm": True, "lstm_cell_size": 10**9}
    ),
}


@pytest.mark.parametrize("name", HUGE)
def test_a_module_that_is_larger_than_its_weights_is_refused_before_it_takes_memory(name: str, tmp_path: Path) -> None:
    path, before = tmp_path / "checkpoint", forging.level()
    with PPOConfig().environment("CartPole-v1").rl_module(model_config={"fcnet_hiddens": [8]}).build() as algo:
        algo.save(path)
    assert load_policy(path)(np.zeros(4, np.float32)) in (0, 1)
    change(path, "policies.json", lambda policies: HUGE[name](policies["default_policy"]))
    with pytest.raises(CheckpointError, match=f"{path}: its settings ask for a module that is far larger"):
        load_policy(path)
    if "layer" in name:
        change(path, "config.json", lambda config: HUGE[name](config["rl_module"]))
        with pytest.raises(CheckpointError, match=f"{path}: its settings ask for a module that is far larger"):
            Algorithm.from_checkpoint(path)
    assert forging.level() - before < 2**29
