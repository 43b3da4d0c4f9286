"""Envs that fail once when they are told to, and a callback that ends a run when it has recovered."""

import ctypes
import os
import resource
import signal
import socket
import stat
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from corral import Callback, MultiAgentEnv

FOREVER_S = 1000.0
RECOVERY_S = 100.0
FAULT_FILE = "fault"
TOO_MUCH_BYTES = 2**28


def claim(record: Path, what: str) -> bool:
    """Return whether the caller is the one to fail: the first of all processes that asks."""
    try:
        file = os.open(record / FAULT_FILE, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    os.write(file, f"{what} in process {os.getpid()}\n".encode())
    os.close(file)
    return True


def limit_memory(spare_bytes: int) -> None:
    """Let this process have this much more memory than it has now, and no more."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + spare_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def cut_connections() -> None:
    """Shut all sockets of this process down, as a network that fails does."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    copy.shutdown(socket.SHUT_RDWR)


def fail(kind: str) -> None:
    """Let this process fail; `memory` and `disconnect` return."""
    if kind in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    elif kind == "hang":
        time.sleep(FOREVER_S)
    elif kind == "hold":
        # Waits for itself, and holds Python's global lock. A signal does not end this, as it would end a sleep in C.
        mutex, lock = ctypes.create_string_buffer(256), ctypes.PyDLL(None).pthread_mutex_lock
        lock(mutex)
        lock(mutex)
    elif kind == "exit":
        os._exit(7)
    elif kind == "raise":
        raise ArithmeticError("the simulator diverged")
    elif kind == "memory":
        limit_memory(2**20)
        bytearray(TOO_MUCH_BYTES)
    elif kind == "disconnect":
        cut_connections()


class Faults:
    """What one env leaves as a record, and whether it fails.

    Config:
        record: Directory of the record.
        fault: `kind`, `where` (make, reset or step), `at` (the how many-th time in this process, from 1), `runner`
            (its index) and `evaluation` (whether an env of evaluation fails).
        evaluation: Whether this is an env of evaluation.
        step_s: Seconds that a step takes.
        rates: Probability per step by kind, for faults that come again and again.
    """

    counts: ClassVar[Counter[tuple[Any, ...]]] = Counter()

    def __init__(self, config: Any) -> None:
        self.record, self.fault = Path(config["record"]), dict(config.get("fault") or {})
        self.evaluation, self.step_s = bool(config.get("evaluation")), float(config.get("step_s", 0.0))
        self.runner = int(getattr(config, "worker_index", 0))
        self.rates, self.rng = dict(config.get("rates") or {}), np.random.default_rng()
        name = "evaluation" if self.evaluation else "runner"
        (self.record / f"{os.getpid()}.{name}-{self.runner}").touch()
        file = self.record / f"{os.getpid()}-{uuid.uuid4().hex}.{name}-steps"
        # The kernel keeps a mapped file when the process is killed.
        keeps = config.get("keeps_record", True)
        self.steps: Any = np.memmap(file, np.int64, "w+", shape=(1,)) if keeps else np.zeros(1, np.int64)
        self.reach("make")

    def reach(self, where: str) -> None:
        """Note that the env is at a place where it may fail."""
        key = (where, self.evaluation, self.runner)
        self.counts[key] += 1
        if where == "step":
            for kind, rate in self.rates.items():
                if self.rng.random() < rate:
                    fail(kind)
        fault = self.fault
        if not fault or (fault["where"], fault["evaluation"], fault["runner"]) != key:
            return
        if self.counts[key] >= fault["at"] and claim(self.record, f"{fault['kind']} in {where}"):
            fail(fault["kind"])

    def step(self) -> None:
        """Note a step that was taken."""
        self.steps[0] += 1
        if self.step_s:
            time.sleep(self.step_s)


class Walk(gym.Env[Any, Any]):
    """A random walk with a random length, whose rewards depend on the actions, and whose state can be saved."""

    observation_space: Any = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space: Any = spaces.Discrete(3)

    def __init__(self, config: Any) -> None:
        self.faults = Faults(config)
        self.place, self.age = np.zeros(3), 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin somewhere."""
        self.faults.reach("reset")
        super().reset(seed=seed)
        self.place, self.age = self.np_random.normal(size=3), 0
        return self.place.astype(np.float32), {}

    def step(self, action: Any) -> Any:
        """Go somewhere."""
        self.faults.reach("step")
        self.age += 1
        self.place = 0.9 * self.place + 0.3 * self.np_random.normal(size=3) + 0.1 * (float(action) - 1)
        over = bool(self.np_random.random() < 1 / 12)
        self.faults.step()
        return self.place.astype(np.float32), -float(np.abs(self.place).sum()), over, self.age >= 25, {}

    def get_state(self) -> dict[str, Any]:
        """Return what the walk continues from."""
        return {"place": self.place, "age": self.age}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from there."""
        self.place, self.age = np.array(state["place"], np.float64).reshape(3), int(state["age"])


class Walks(MultiAgentEnv):
    """Two agents that each have a walk, and whose episodes end together."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.faults = Faults(config)
        self.possible_agents = self.agents = ["left", "right"]
        self.observation_spaces = dict.fromkeys(self.agents, Walk.observation_space)
        self.action_spaces = dict.fromkeys(self.agents, Walk.action_space)
        self.places, self.age = np.zeros((2, 3)), 0

    def _seen(self) -> dict[Any, Any]:
        return dict(zip(self.agents, self.places.astype(np.float32), strict=True))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin somewhere."""
        self.faults.reach("reset")
        super().reset(seed=seed)
        self.places, self.age = self.np_random.normal(size=(2, 3)), 0
        return self._seen(), {}

    def step(self, action_dict: dict[Any, Any]) -> Any:
        """Go somewhere."""
        self.faults.reach("step")
        self.age += 1
        pushes = np.array([[float(action_dict[agent]) - 1] for agent in self.agents])
        self.places = 0.9 * self.places + 0.3 * self.np_random.normal(size=(2, 3)) + 0.1 * pushes
        rewards = dict(zip(self.agents, (-np.abs(self.places).sum(1)).tolist(), strict=True))
        over, late = bool(self.np_random.random() < 1 / 12), self.age >= 25
        self.faults.step()
        return self._seen(), rewards, {"__all__": over}, {"__all__": late and not over}, {}

    def get_state(self) -> dict[str, Any]:
        """Return what the walks continue from."""
        return {"places": self.places, "age": self.age}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from there."""
        self.places, self.age = np.array(state["places"], np.float64).reshape(2, 3), int(state["age"])


def policy_of(agent_id: Any, episode: Any = None, **kwargs: Any) -> str:
    """Return the module of an agent: each has its own."""
    return str(agent_id)


class Recovered(Callback):
    """Ends the run when the fault has come, all runners are healthy again, and enough iterations are over."""

    def __init__(self) -> None:
        """Begin to wait."""
        self.began_s = time.monotonic()

    def on_train_result(self, *, algorithm: Any, result: Any, **kwargs: Any) -> None:
        """Ask for the end of the run."""
        config = algorithm.config.env_config
        wanted, health = config["until"], result["fault_tolerance"]
        counts = {"": 1, "runner": health, "evaluation": result["evaluation"]}[wanted["counted"]]
        has_come = counts == 1 or counts["num_env_runner_failures"] > 0
        healthy = health["num_healthy_workers"] >= wanted["healthy"]
        if wanted["evaluation_healthy"]:
            healthy &= result["evaluation"]["num_healthy_workers"] >= wanted["evaluation_healthy"]
        if has_come and healthy and algorithm.training_iteration >= wanted["iterations"]:
            algorithm.request_stop("recovered")
        elif time.monotonic() - self.began_s > RECOVERY_S:
            algorithm.request_stop("not recovered in time")
