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
    "MountainCar-v0": Task(threshold=-110.0, num_steps=60_000, every=5_000),
    "LunarLander-v3": Task(threshold=200.0, num_steps=100_000, every=10_000),
    "Pendulum-v1": Task(threshold=-200.0, num_steps=8_000, every=500),
    "InvertedDoublePendulum-v5": Task(threshold=9_000.0, num_steps=15_000, every=1_000),
    "corral.testing:ReachEnv": Task(threshold=95.0, num_steps=5_000, every=1_000, has_goals=True),
    "gymnasium_robotics:FetchReach-v4": Task(threshold=95.0, num_steps=10_000, every=1_000, has_goals=True),
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
# CrossQ's critics of 2048 take a quarter of an hour for 8,000 env steps.
NARROW_CROSSQ = {**EARLY, "rl_module.model_config": {"critic_hiddens": [512, 512]}}
CONTINUOUS = (
    Row("Corral SAC", "corral", "SAC", EARLY),
    Row("Corral TQC", "corral", "TQC", EARLY),
    Row("SB3 SAC", "sb3", "SAC"),
)
# The defaults that DQN had, and the defaults of now without one of their parts. They were chosen with seeds 100 to 104,
# and the table has seeds 0 to 4.
DQN, PQN = Row("Corral DQN", "corral", "DQN"), Row("Corral PQN", "corral", "PQN")
COPIED = {"training.tau": 1.0, "training.target_network_update_freq": 500}
PLAIN = {"rl_module.model_config": {"fcnet_hiddens": [64, 64], "use_layernorm": False}}
EARLIER_DQN = Row(
    "Corral DQN, earlier defaults",
    "corral",
    "DQN",
    {
        **COPIED,
        **PLAIN,
        "training.lr": 1e-3,
        "training.train_batch_size_per_learner": 64,
    },
)
PARTS_OF_DQN = (
    Row("Corral DQN, no layer normalisation", "corral", "DQN", {"rl_module.model_config": {"use_layernorm": False}}),
    Row("Corral DQN, constant rate", "corral", "DQN", {"training.lr": 5e-4}),
    Row("Corral DQN, copied targets", "corral", "DQN", COPIED),
)

# A point in a cube, whose goal random actions reach in one of a hundred episodes.
REACH = {"rl_module.model_config": {"fcnet_hiddens": [64, 64]}, "training.lr": 1e-3, "training.gamma": 0.95}
HINDSIGHT = {**REACH, "training.replay_buffer_config": {"type": "hindsight"}}

ROWS: dict[str, tuple[Row, ...]] = {
    "CartPole-v1": (
        Row("Corral PPO", "corral", "PPO"),
        Row("SB3 PPO", "sb3", "PPO"),
        *(PQN, DQN, EARLIER_DQN, *PARTS_OF_DQN, Row("SB3 DQN", "sb3", "DQN")),
    ),
    "Acrobot-v1": (PQN, DQN, EARLIER_DQN, *PARTS_OF_DQN, Row("SB3 DQN", "sb3", "DQN")),
    "MountainCar-v0": (PQN, DQN, EARLIER_DQN),
    "LunarLander-v3": (PQN, DQN, EARLIER_DQN),
    "Pendulum-v1": (
        *CONTINUOUS,
        Row("Corral CrossQ, critics of 512", "corral", "CrossQ", NARROW_CROSSQ),
        Row("Corral SAC, SimbaV2", "corral", "SAC", SIMBA_V2),
        Row("SB3 contrib TQC", "sb3", "TQC"),
        Row(
            "SB3 contrib CrossQ, critics of 512",
            "sb3",
            "CrossQ",
            {"policy_kwargs": {"net_arch": {"pi": [256, 256], "qf": [512, 512]}}},
        ),
    ),
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
}
