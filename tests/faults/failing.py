"""An env that fails when it is told to, or at random, and that leaves a record which survives its process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

KINDS = ("kill", "raise", "hang", "freeze", "hold")


class FaultyEnv(gym.Env[Any, Any]):
    """Every observation is `[runner, instance, step]`, and there is no second one like it; an episode has 7 steps.

    A file `<kind>-<runner>` in the directory `record` makes the next step of that runner fail, once: `kill` ends the
    process, `raise` raises, `hang` sleeps, `freeze` stops the process, `hold` sleeps in C code that holds Python's
    global lock. With `rates`, steps fail at random too. What fails is written to the file `faults`, and each instance
    counts its steps in a file of its own, `<pid>-<instance>.steps`.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, config: Any) -> None:
        self.record, self.runner, self.task, self.steps = Path(config["record"]), config.worker_index, 0, 0
        self.rng = np.random.default_rng()
        self.instance = int(self.rng.integers(2**40))
        self.rates = config.get("rates", {})
        self.counter = np.memmap(
            self.record / f"{os.getpid()}-{self.instance}.steps", np.int64, "w+", shape=(1,)
        )  # the kernel keeps it when the process is killed

    def get_task(self) -> int:
        return self.task

    def set_task(self, task: int) -> None:
        self.task = task

    def observe(self) -> Any:
        return np.array([self.runner, self.instance, self.steps], np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        for kind in KINDS:
            if self.is_due(kind):
                self.fail(kind)
        self.steps += 1
        self.counter[0] = self.steps
        return self.observe(), 1.0, self.steps % 7 == 0, False, {}

    def is_due(self, kind: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            (self.record / f"{kind}-{self.runner}").unlink()
            return True
        return bool(self.rng.random() < self.rates.get(kind, 0.0))

    def fail(self, kind: str) -> None:
        with open(self.record / "faults", "a", encoding="utf-8") as file:
            file.write(f"{kind}\n")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "hold":
            ctypes.PyDLL(None).sleep(1000)
        if kind == "hang":
            time.sleep(1000)
        raise ArithmeticError(f"the simulator of runner {self.runner} diverged")


def faults(record: Path) -> list[str]:
    """Return the kinds of the faults so far."""
    file = record / "faults"
    return file.read_text(encoding="utf-8").split() if file.exists() else []


def steps_taken(record: Path) -> int:
    """Return the steps of all instances, dead and alive."""
    return sum(int(np.fromfile(file, np.int64)[0]) for file in record.glob("*.steps"))


def pids(record: Path) -> set[int]:
    """Return the processes in which there was an instance, without this one."""
    return {int(file.name.partition("-")[0]) for file in record.glob("*.steps")} - {os.getpid()}


def alive(pid: int) -> bool:
    """Say whether a process is there, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(processes: set[int], deadline_s: float = 20.0) -> set[int]:
    """Wait until processes have ended, and return those that have not."""
    end_s = time.monotonic() + deadline_s
    while (left := {pid for pid in processes if alive(pid)}) and time.monotonic() < end_s:
        time.sleep(0.05)
    return left
