"""Envs that fail or hang when they are told to, for the tests of faults inside a runner."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from corral.testing import CountingEnv

FAR_TOO_LONG_S = 60.0


def _loop() -> None:
    end = time.monotonic() + FAR_TOO_LONG_S
    while time.monotonic() < end:
        pass


def _wait_for_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=FAR_TOO_LONG_S)


def _swallow() -> None:
    """Try again, whatever happens."""
    end = time.monotonic() + FAR_TOO_LONG_S
    while time.monotonic() < end:
        try:
            time.sleep(FAR_TOO_LONG_S)
        except Exception:
            continue


def _swallow_all_once() -> None:
    try:
        time.sleep(FAR_TOO_LONG_S)
    except BaseException:
        time.sleep(FAR_TOO_LONG_S)


def _wait_in_c(library: Any) -> None:
    mutex = ctypes.create_string_buffer(256)
    for _ in range(2):  # the second time never comes back, and no signal wakes it
        library.pthread_mutex_lock(mutex)


WAYS: dict[str, Callable[[], Any]] = {
    "nap": lambda: time.sleep(0.05),  # not too long
    "sleep": lambda: time.sleep(FAR_TOO_LONG_S),
    "read": lambda: os.read(os.pipe()[0], 1),
    "loop": _loop,
    "lock": _wait_for_lock,
    "swallow": _swallow,
    "swallow_all_once": _swallow_all_once,
    "c": lambda: _wait_in_c(ctypes.CDLL(None)),
    "c_with_gil": lambda: _wait_in_c(ctypes.PyDLL(None)),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def hang(how: str) -> None:
    """Hang, in one of many ways."""
    WAYS[how]()


class TroubleEnv(CountingEnv):
    """A `CountingEnv` that raises or hangs at given times, in one sub-env.

    Config:
        step_faults: Lifetime step numbers, counted over all envs made in this place of this process, from 1.
        reset_faults: The same for resets.
        make_faults: The same for being made.
        how: `"raise"`, or one of the ways of `hang`.
        vector_index: The sub-env.
        log: A list that notes `made`, `reset` and `closed`, with the sub-env.
        counts: A dict shared by the envs of one runner; by default each env counts for itself.
    """

    def __init__(self, config: Any = None) -> None:
        config = config or {}
        super().__init__(config)
        self.index = int(getattr(config, "vector_index", 0))
        self._counts = config.get("counts", {})
        self._config, self._trouble = config, self.index == config.get("vector_index", 0)
        self.task: Any = None
        self._note("made")
        self._count("make")

    def _note(self, what: str) -> None:
        if (log := self._config.get("log")) is not None:
            log.append((what, self.index))

    def _count(self, what: str) -> None:
        key = what, self.index
        self._counts[key] = count = self._counts.get(key, 0) + 1
        if self._trouble and count in self._config.get(f"{what}_faults", ()):
            how = self._config.get("how", "raise")
            if how == "raise":
                raise OSError(f"fault {count} in {what}")
            hang(how)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._note("reset")
        self._count("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> Any:
        self._count("step")
        return super().step(action)

    def close(self) -> None:
        self._note("closed")

    def get_task(self) -> Any:
        return self.task

    def set_task(self, task: Any) -> None:
        self.task = task


class TroubleDictEnv(gym.Env[Any, Any]):
    """A `TroubleEnv` whose observation is nested."""

    observation_space: Any = spaces.Dict(
        {
            "t": spaces.Discrete(100),
            "pair": spaces.Tuple((spaces.Box(-1, 1e6, (2,), np.float32), spaces.MultiBinary(2))),
        }
    )
    action_space: Any = spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        self._env = TroubleEnv(config)

    def _nested(self, obs: Any) -> Any:
        return {"t": np.int64(obs[1]), "pair": (obs, np.array([1, 0], np.int8))}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, info = self._env.reset(seed=seed)
        return self._nested(obs), {"started": True, **info}

    def step(self, action: Any) -> Any:
        obs, *rest = self._env.step(action)
        return self._nested(obs), *rest
