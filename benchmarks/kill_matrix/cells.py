"""The cells of the kill matrix: which fault comes in which phase, to which process, of which kind of run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

ITERATIONS = 12
FAULTS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP",
    "end": "SIGTERM, SIGINT",
    "raise": "exception",
    "exit": "exit",
    "hang": "hang",
    "hold": "hang",
    "memory": "memory limit",
    "disk": "full disk",
    "disconnect": "lost connection",
    "node": "lost node",
}
"""Names of the faults in the table, by kind."""
ENGINES = ("local", "process", "ray", "two nodes")
SHARES = {"local": 0.56, "process": 0.38, "ray": 0.045, "two nodes": 0.015}
"""Shares of the trials: on Ray a trial takes many times as long."""

EXIT_ENV, EXIT_WORKER, EXIT_DIRECTORY = 3, 5, 6


@dataclass(frozen=True)
class Cell:
    """A cell.

    Attributes:
        kind: What happens; a key of `FAULTS`.
        phase: When.
        actor: To which process: `driver`, `runner`, `evaluation` (a runner of evaluation), `learner` or `node`.
        engine: One of `ENGINES`.
        agents: `single` or `several`.
        mode: `sync` or `async`.
        algo: The algorithm.
        expects: What must follow: the run `survives` and says so; `skips` an evaluation and says so; `warns`; `ends`
            with an error; `dies`; is `interrupted`; does not notice (`unnoticed`); or `any` of these.
        in_env: Whether an env fails by itself; otherwise something is done to a process from outside.
    """

    kind: str
    phase: str
    actor: str
    engine: str
    agents: str
    mode: str
    algo: str
    expects: str
    in_env: bool = False

    @property
    def fault(self) -> str:
        """Name of the fault in the table."""
        return FAULTS[self.kind]

    @property
    def name(self) -> str:
        """Name for `--cells`."""
        parts = (self.engine.replace(" ", "-"), self.algo, self.agents, self.mode, self.actor, self.phase, self.kind)
        return ":".join(parts) + (":env" if self.in_env else "")

    @property
    def config_name(self) -> str:
        """Name of what the undisturbed run depends on."""
        workers = f"{self.num_runners}-{self.num_evaluation_runners}-{int(self.has_learners)}"
        return ":".join((self.engine, self.algo, self.agents, self.mode, workers))

    @property
    def num_runners(self) -> int:
        """Number of runners of the engine; starting them is most of what a trial takes."""
        if self.engine == "local" or self.has_learners:
            return 0
        if self.engine == "two nodes":
            return 3
        return 1 if self.actor == "driver" and (self.algo, self.agents) != ("PPO", "single") else 2

    @property
    def num_evaluation_runners(self) -> int:
        """Number of evaluation runners of the engine."""
        return int(self.engine in ("process", "ray") and self.phase == "evaluation" and not self.has_learners)

    @property
    def has_learners(self) -> bool:
        """Whether learners have processes of their own."""
        return self.actor == "learner"

    @property
    def is_exact(self) -> bool:
        """Whether a run that continues must end with the weights of an undisturbed run."""
        return self.engine == "local" and self.expects in ("dies", "unnoticed", "warns")


KINDS_OF_RUNS = {
    "local": (
        ("PPO", "single", "sync"),
        ("DQN", "single", "sync"),
        ("PPO", "several", "sync"),
        ("APPO", "single", "async"),
    ),
    "process": (
        ("PPO", "single", "sync"),
        ("APPO", "single", "async"),
        ("PPO", "several", "sync"),
        ("DQN", "single", "sync"),
    ),
    "ray": (("PPO", "single", "sync"), ("APPO", "single", "async")),
    "two nodes": (("PPO", "single", "sync"), ("APPO", "single", "async")),
}
PHASES = ("start", "sample", "update", "weights", "evaluation", "checkpoint", "log", "resume")


def cells() -> list[Cell]:
    """Return all cells."""
    found = [
        Cell(*what, engine, agents, mode, algo, *rest)
        for engine, kinds in KINDS_OF_RUNS.items()
        for algo, agents, mode in kinds
        for what, *rest in _cells_of(engine, mode)
    ]
    found += [
        Cell(kind, "update", "learner", "process", agents, "sync", "PPO", "ends")
        for kind, agents in product(("kill", "stop", "disconnect"), ("single", "several"))
    ]
    found += [
        Cell(kind, "export", "driver", "local", agents, "sync", "PPO", "any")
        for kind, agents in product(("kill", "disk", "end"), ("single", "several"))
    ]
    return list(dict.fromkeys(found))


def _cells_of(engine: str, mode: str) -> Iterator[tuple[Any, ...]]:
    """Yield kind, phase and actor, then what follows, and whether it happens in an env."""
    if engine == "two nodes":
        for phase in ("sample", "update", "evaluation", "checkpoint"):
            yield ("node", phase, "node"), "survives"
        return
    for phase in PHASES if engine != "ray" else ("sample", "checkpoint", "resume"):
        yield ("kill", phase, "driver"), "dies"
        yield ("end", phase, "driver"), "interrupted"
        if phase not in ("start", "resume"):
            yield ("stop", phase, "driver"), "unnoticed"
    if engine != "ray":
        for phase in ("sample", "update", "checkpoint"):
            yield ("memory", phase, "driver"), "any"
    if engine == "local":
        yield ("disk", "start", "driver"), "any"
        yield ("disk", "checkpoint", "driver"), "warns"
        yield ("disk", "log", "driver"), "warns"
        yield from _embedded()
    else:
        yield from _runners(engine)


def _embedded() -> Iterator[tuple[Any, ...]]:
    """Yield what happens in the env of the runner in the algorithm's process."""
    for kind in ("raise", "memory"):
        yield (kind, "start", "runner"), "ends", True
    for kind in ("raise", "memory", "hang"):
        yield (kind, "sample", "runner"), "ends", True
        yield (kind, "evaluation", "evaluation"), "any" if kind == "memory" else "skips", True


def _runners(engine: str) -> Iterator[tuple[Any, ...]]:
    """Yield what happens to runners of an engine."""
    kinds = ("kill", "stop", "raise", "exit", "hang", "hold", "memory", "disconnect")
    for kind in kinds:
        yield (kind, "sample", "runner"), "survives", True
        yield (kind, "evaluation", "evaluation"), "survives", True
    for kind in ("kill", "raise", "exit", "disconnect", "memory"):
        yield (kind, "start", "runner"), "ends", True
    for phase in ("update", "weights", "checkpoint"):
        for kind in ("kill", "stop", "disconnect") if engine == "process" else ("kill", "stop"):
            yield (kind, phase, "runner"), "survives"
    for kind in ("kill", "stop"):
        yield (kind, "resume", "runner"), "any"


def schedule(seed: int, num_trials: int, wanted: list[Cell]) -> list[Cell]:
    """Return the cell of each trial: engines by `SHARES`, and the cells of an engine in turn, in an order by chance."""
    rng = random.Random(seed)
    decks = {engine: [cell for cell in wanted if cell.engine == engine] for engine in ENGINES}
    decks = {engine: rng.sample(deck, len(deck)) for engine, deck in decks.items() if deck}
    taken = dict.fromkeys(decks, 0)
    found = []
    for _ in range(num_trials):
        engine = min(decks, key=lambda name: (taken[name] + 0.5) / SHARES[name])
        found.append(decks[engine][taken[engine] % len(decks[engine])])
        taken[engine] += 1
    return found


# The run of a cell.


def settings(cell: Cell, seed: int, record: Path, fault: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings by group of the run of a cell, as in a YAML file.

    Args:
        cell: The cell.
        seed: Seed of the run.
        record: Directory of the record of envs and faults.
        fault: What an env fails with; see `kill_matrix.envs.Faults`.
    """
    num_runners, num_evaluation = cell.num_runners, cell.num_evaluation_runners
    several, remote = cell.agents == "several", num_runners > 0
    env_config = {"record": str(record), "fault": dict(fault) if fault else None, "step_s": 0.002 if remote else 0.0}
    until = {
        "counted": "" if cell.expects != "survives" else "evaluation" if cell.actor == "evaluation" else "runner",
        "healthy": min(num_runners, 2),
        "evaluation_healthy": num_evaluation,
        "iterations": ITERATIONS,
    }
    found: dict[str, Any] = {
        "algo": cell.algo,
        "environment": {
            "env": f"kill_matrix.envs:{'Walks' if several else 'Walk'}",
            "env_config": {**env_config, "until": until},
            "disable_env_checking": True,
        },
        "env_runners": {"num_env_runners": num_runners, "num_envs_per_env_runner": 2},
        "rl_module": {"model_config": {"fcnet_hiddens": [8]}},
        "training": {"train_batch_size_per_learner": 64},
        "evaluation": {
            "evaluation_interval": 3,
            "evaluation_duration": 4,
            "evaluation_num_env_runners": num_evaluation,
            "evaluation_sample_timeout_s": 4.0,
            "evaluation_config": {"env_config": {**env_config, "evaluation": True, "until": until}},
        },
        "fault_tolerance": {"env_step_timeout_s": 0.8},
        "checkpointing": {"checkpoint_every_iterations": 1, "checkpoint_every_s": None},
        "debugging": {"seed": seed},
        "stop": {"training_iteration": 5000 if remote else ITERATIONS},
    }
    if cell.algo == "PPO":
        found["training"] |= {"minibatch_size": 32, "num_epochs": 1}
    elif cell.algo == "DQN":
        found["training"] |= {
            "train_batch_size_per_learner": 16,
            "num_steps_sampled_before_learning_starts": 32,
            "training_intensity": 1.0,
            "replay_buffer_config": {"capacity": 500},
            "target_network_update_freq": 50,
        }
        found["reporting"] = {"min_sample_timesteps_per_iteration": 60}
    else:
        found["env_runners"]["rollout_fragment_length"] = 8
        found["training"]["train_batch_size_per_learner"] = 32
        found["reporting"] = {"min_sample_timesteps_per_iteration": 64}
    if several:
        found["multi_agent"] = {"policies": ["left", "right"], "policy_mapping_fn": "kill_matrix.envs:policy_of"}
    if remote or cell.has_learners:
        found["engine"] = {"engine_name": "process" if cell.engine == "process" else "ray", "start_timeout_s": 40.0}
        found["fault_tolerance"]["worker_timeout_s"] = 5.0
    if remote:
        found["callbacks"] = {"callbacks_class": ["kill_matrix.envs:Recovered"]}
        found["fault_tolerance"]["delay_between_env_runner_restarts_s"] = 0.05
    if cell.mode == "async" and num_evaluation:
        found["evaluation"]["evaluation_parallel_to_training"] = True
    if cell.has_learners:
        found["learners"] = {"num_learners": 2}
        found["training"]["train_batch_size_per_learner"] = 32
    return found


def draw_env_fault(cell: Cell, rng: random.Random) -> dict[str, Any]:
    """Return what an env of a cell fails with, at a moment by chance."""
    where = "make" if cell.phase == "start" else rng.choice(("step", "step", "reset"))
    at = {"make": rng.randint(1, 2), "step": rng.randint(1, 150), "reset": rng.randint(1, 12)}[where]
    if cell.actor == "evaluation":
        at = {"step": rng.randint(1, 60), "reset": rng.randint(1, 6)}[where]
    runner = 0 if cell.engine == "local" else 1 if cell.actor == "evaluation" else rng.randint(1, 2)
    return {"kind": cell.kind, "where": where, "at": at, "runner": runner, "evaluation": cell.actor == "evaluation"}
