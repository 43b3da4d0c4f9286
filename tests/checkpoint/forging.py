"""Checkpoints of plain arrays, and what an attacker or a broken disk would make of them.

Run as a script, it reads the checkpoints that it is given with little memory, and prints what came of it.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from corral.runs.checkpoint import directory, read_checkpoint, write_checkpoint

MODULE = "modules/default_policy.safetensors"
FILES = ("config.json", "policies.json", "state.msgpack", MODULE, "arrays/obs.npy")


def write(path: Path | str, number: int = 1, **contents: Any) -> Path | str:
    """Write a small checkpoint whose every file holds the number."""
    given = {
        "state": {"number": number, "nested": {"tuple": (1, [2.5, None], b"x"), "array": np.arange(4.0)}},
        "weights": {"default_policy": {"w": np.full((2, 3), number, np.float32)}},
        "config": {"algo": "PPO", "training": {"lr": 0.1}, "number": number},
        "metadata": {"algo": "PPO", "training_iteration": number},
        "policies": {"default_policy": {"number": number}},
        "arrays": {"obs": np.full((5, 3), number, np.int32)},
    }
    return write_checkpoint(path, **{**given, **contents})


def number_of(checkpoint: Any) -> int:
    """Return the number that all files of a checkpoint hold."""
    found = {
        int(checkpoint.state["number"]),
        int(checkpoint.config["number"]),
        int(checkpoint.metadata["training_iteration"]),
        int(checkpoint.policies["default_policy"]["number"]),
        *map(int, checkpoint.weights["default_policy"]["w"].ravel()),
        *map(int, checkpoint.arrays["obs"].ravel()),
    }
    [number] = found
    return number


def data(path: Path) -> Path:
    """Return the one data directory of a checkpoint."""
    [found] = path.glob("data-*")
    return found


def describe(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the metadata, and sign it as Corral does."""
    file = path / "metadata.json"
    metadata = json.loads(file.read_bytes())
    change(metadata)
    file.write_text(json.dumps({**metadata, "sha256": directory._digest(metadata)}))


def forge(path: Path, name: str, content: bytes) -> None:
    """Replace a file, and describe it as if Corral had written it."""
    (data(path) / name).write_bytes(content)
    entry = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    describe(path, lambda metadata: metadata["files"].update({name: entry}))


def level() -> int:
    """Return the most memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(paths: list[str]) -> None:
    """Read each checkpoint, and print a line of JSON with the error, the time and the memory that it took."""
    before = level()
    for path in paths:
        start = time.monotonic()
        try:
            read_checkpoint(Path(path))
            kind, message = "", ""
        except BaseException as error:
            kind, message = type(error).__name__, str(error)
        told = {"path": path, "error": kind, "message": message, "time_s": time.monotonic() - start}
        print(json.dumps({**told, "num_bytes": level() - before}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
