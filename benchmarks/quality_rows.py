"""The envs and the rows of the leaderboard; see `quality.py`. One more row here is one more row there."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """An env of the leaderboard.

    Attributes:
        threshold: Return that counts as reached, or with goals the percentage of episodes.
        num_steps: Env steps of a run.
        every: Env steps between two evaluations.
        has_goals: Whether episodes count by `is_success` in their last `info`, not by their return.
    """

    threshold: float
    num_steps: int
    every: int
    has_goals: bool = False


@dataclass(frozen=True)
class Row:
    """A row of the leaderboard: one library and algorithm with settings.

    Attributes:
        name: Name in the table, of which there is one for each env.
        library: `"corral"` or `"sb3"`, which stands for Stable-Baselines3 and its contrib package.
        algo: Name of the algorithm.
        settings: For Corral, settings by path, as `corral train --set` takes them; for Stable-Baselines3, arguments
            of the algorithm.
    """

    name: str
    library: str
    algo: str
    settings: dict[str, Any] = field(default_factory=dict)


NUM_SEEDS = 5

TASKS = {
    "CartPole-v1": Task(threshold=475.0, num_steps=60_000, every=2_000),
    "Acrobot-v1": Task(threshold=-100.0, num_steps=30_000, every=1_000),
    "Pendulum-v1": Task(threshold=-200.0, num_steps=8_000, every=500),
    "InvertedDoublePendulum-v5": Task(threshold=9_000.0, num_steps=15_000, every=1_000),
    "corral.testing:ReachEnv": Task(threshold=95.0, num_steps=5_000, every=1_000, has_goals=True),
    "gymnasium_robotics:FetchReach-v4": Task(threshold=95.0, num_steps=10_000, every=1_000, has_goals=True),
    "Hopper-v5": Task(threshold=2_000.0, num_steps=100_000, every=5_000),
    "HalfCheetah-v5": Task(threshold=3_000.0, num_steps=100_000, every=5_000),
}

# Stable-Baselines3 and its contrib package begin to learn after 100 env steps.
EARLY = {"training.num_steps_sampled_before_learning_starts": 100}
# SimbaV2 as its authors train it (arXiv:2502.15280), but with critics of two blocks of 128, which need a sixteenth of
# the multiplications of their 512.
SIMBA_V2 = {
    **EARLY,
    "rl_module.model_config": {"architecture": "simba_v2", "fcnet_hiddens": [128], "critic_hiddens": [128, 128]},
    "training.initial_alpha": 0.01,
    "training.lr": 1e-4,
}
CONTINUOUS = (
    Row("Corral SAC", "corral", "SAC", EARLY),
    Row("Corral TQC", "corral", "TQC", EARLY),
    Row("Corral CrossQ", "corral", "CrossQ", EARLY),
    Row("Corral SAC, SimbaV2", "corral", "SAC", SIMBA_V2),
    Row("SB3 SAC", "sb3", "SAC"),
    Row("SB3 contrib TQC", "sb3", "TQC"),
    Row("SB3 contrib CrossQ", "sb3", "CrossQ"),
)
# DQN without its parts, and with one of them; returns of atoms are within the discounted sums that the env has.
PLAIN_DQN = {"training.n_step": 1, "training.double_q": False}


def dqn_rows(v_min: float, v_max: float) -> tuple[Row, ...]:
    """Return rows of DQN without its parts, and with each of them alone."""
    atoms = {"training.num_atoms": 51, "training.v_min": v_min, "training.v_max": v_max}
    parts = {
        "no part": {},
        "double": {"training.double_q": True},
        "dueling": {"training.dueling": True},
        "prioritised": {"training.replay_buffer_config": {"type": "prioritized"}},
        "3 steps": {"training.n_step": 3},
        "noisy": {"training.noisy": True},
        "51 atoms": atoms,
    }
    return tuple(Row(f"Corral DQN, {name}", "corral", "DQN", {**PLAIN_DQN, **part}) for name, part in parts.items())


# A point in a cube, whose goal random actions reach in one of a hundred episodes.
REACH = {"rl_module.model_config": {"fcnet_hiddens": [64, 64]}, "training.lr": 1e-3, "training.gamma": 0.95}
HINDSIGHT = {**REACH, "training.replay_buffer_config": {"type": "hindsight"}}

ROWS: dict[str, tuple[Row, ...]] = {
    "CartPole-v1": (
        Row("Corral PPO", "corral", "PPO"),
        Row("Corral DQN", "corral", "DQN"),
        Row("SB3 PPO", "sb3", "PPO"),
        Row("SB3 DQN", "sb3", "DQN"),
        *dqn_rows(0.0, 100.0),
    ),
    "Acrobot-v1": dqn_rows(-100.0, 0.0),
    "Pendulum-v1": CONTINUOUS,
    "InvertedDoublePendulum-v5": CONTINUOUS,
    "corral.testing:ReachEnv": (
        Row("Corral SAC, hindsight", "corral", "SAC", HINDSIGHT),
        Row("Corral TQC, hindsight", "corral", "TQC", HINDSIGHT),
        Row("Corral SAC, uniform replay", "corral", "SAC", REACH),
        Row("Corral TQC, uniform replay", "corral", "TQC", REACH),
    ),
    # A robot's arm, whose hand must reach a point.
    "gymnasium_robotics:FetchReach-v4": (
        Row("Corral SAC, hindsight", "corral", "SAC", HINDSIGHT),
        Row("Corral TQC, hindsight", "corral", "TQC", HINDSIGHT),
        Row("Corral SAC, uniform replay", "corral", "SAC", REACH),
    ),
    "Hopper-v5": CONTINUOUS,
    "HalfCheetah-v5": CONTINUOUS,
}
