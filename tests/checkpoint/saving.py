"""A program that saves checkpoints to one path until it is killed, and one that reads them all the time.

`python saving.py save PATH NUMBER STEP PAUSE` saves NUMBER, NUMBER + STEP, ..., up to PAUSE seconds apart, and prints
each number when it is saved.
`python saving.py read PATH SECONDS` prints how often it read a complete checkpoint.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from pathlib import Path

import numpy as np
from forging import number_of, write

from corral.runs.checkpoint import read_checkpoint

SIZE = 200_000  # numbers in the large array; some milliseconds of writing


def save(path: Path, number: int, step: int, pause_s: float) -> None:
    """Save until somebody ends this process."""
    print("ready", flush=True)
    rng = random.Random(number)
    for saved in itertools.count(number, step):
        write(path, saved, arrays={"obs": np.full(SIZE, saved, np.int32)})
        print(saved, flush=True)
        time.sleep(rng.uniform(0.0, pause_s))  # as a run trains in between


def read(path: Path, duration_s: float) -> None:
    """Read for a while; anything except a complete checkpoint ends it with an error."""
    print("ready", flush=True)
    end = time.monotonic() + duration_s
    numbers = []
    while time.monotonic() < end:
        numbers.append(number_of(read_checkpoint(path)))
    print(len(numbers), len(set(numbers)), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "save":
        save(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
    else:
        read(Path(sys.argv[2]), float(sys.argv[3]))
