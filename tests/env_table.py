"""The envs that users have: the arguments with which `corral train` trains each of them for a moment.

`tests/cli/test_env_table.py` runs each row as a user does. A new env with tuned settings, and a new file in
`examples/tuned/`, is a row by itself; the first env of another family is one more entry of `FAMILIES`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from corral.algorithms.tuned_settings import tuned_algorithms
from corral.tools.cli.experiment import read_experiment
from example_files import EXAMPLES

USER_FILE = '''
"""What a user writes next to the runs."""

import jax.numpy as jnp
from corral.envs.jax_env import JaxVectorEnv
from jax import random
from typing import Any, NamedTuple


class State(NamedTuple):
    obs: Any
    reward: Any
    done: Any
    place: Any
    info: dict


class Walk:
    """A point that its action pushes; an episode ends where the point is further than 1 from 0."""

    action_size = 1

    def reset(self, key):
        place = random.uniform(key, minval=-0.5, maxval=0.5)
        return State(place[None], jnp.zeros(()), jnp.zeros(()), place, {})

    def step(self, state, action):
        place = state.place + 0.4 * action[0]
        return State(place[None], -jnp.abs(place), (jnp.abs(place) > 1).astype(float), place, {})


def make_walk(env_config):
    return JaxVectorEnv(Walk(), env_config.num_envs, env_config.device, max_episode_steps=9)
'''
"""`my_envs.py`, which rows name."""

NETS = {"rl_module.model_config.fcnet_hiddens": [4]}
IMAGE_NETS = {"rl_module.model_config.conv_filters": [[4, 8, 8]], "rl_module.model_config.conv_features": 8}
SMALL_BATCHES = {
    "training.train_batch_size_per_learner": 64,
    "training.minibatch_size": 64,
    "training.num_epochs": 1,
    "env_runners.num_envs_per_env_runner": 2,
}
FROM_A_BUFFER = {
    "training.train_batch_size_per_learner": 8,
    "training.training_intensity": "null",
    "training.num_steps_sampled_before_learning_starts": 16,
    "training.replay_buffer_config.capacity": 500,
    "reporting.min_sample_timesteps_per_iteration": 32,
    "env_runners.rollout_fragment_length": 4,
}
SMALL: Mapping[str, dict[str, Any]] = {
    "PPO": SMALL_BATCHES,
    "APPO": SMALL_BATCHES,
    **dict.fromkeys(("DQN", "SAC", "TD3"), FROM_A_BUFFER),
}
"""Settings by algorithm with which an iteration takes an instant."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """An env, and how a user trains on it.

    Attributes:
        args: What `corral train` is given.
        settings: What `--set` makes small.
        short: Settings of the env that keep its episodes short.
        needs: Modules without which there is no such env.
        in_make_test: Whether `make test` runs the short form of it.
        pictures: Why it has no video, in the words of the error; with `""` it has one.
        single: `--env` and the single env that is played then.
        modules: Modules of its policy, each of which is exported.
        restarts: Whether its episodes begin again where a killed run continues; `None` says that they may.
    """

    args: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    short: Mapping[str, Any] = field(default_factory=lambda: {"max_episode_steps": 12})
    needs: tuple[str, ...] = ()
    in_make_test: bool = False
    single: tuple[str, ...] = ()
    pictures: str = ""
    modules: tuple[str, ...] = ("default_policy",)
    restarts: bool | None = False

    @property
    def train(self) -> list[str]:
        """The arguments of `corral train`, all but the run directory and the stop criteria."""
        env = {f"environment.env_config.{name}": value for name, value in self.short.items()}
        chosen = [
            f"{name}={value if isinstance(value, str) else json.dumps(value)}"
            for name, value in {**self.settings, **env}.items()
        ]
        return ["train", *self.args, *(part for each in chosen for part in ("--set", each))]


def _row(algo: str, env: str, /, settings: Mapping[str, Any] = NETS, **more: Any) -> Row:
    """Return a row that names algorithm and env."""
    return Row(args=("--algo", algo, "--env", env), settings={**SMALL[algo], **settings}, **more)


def _tuned() -> dict[str, Row]:
    """Return a row for each env with tuned settings, with the first algorithm that has some."""
    rows = {}
    for env, (algo, *_) in tuned_algorithms().items():
        package = "Box2D" if env.startswith(("LunarLander", "BipedalWalker")) else "gymnasium"
        needs = ("mujoco",) if env.endswith("-v5") else (package,)
        is_fast = env in ("CartPole-v1", "LunarLander-v3", "HalfCheetah-v5")
        settings = {**SMALL[algo], **NETS}
        restarts = None if env.startswith("BipedalWalker") else False  # its world lives over resets
        rows[env] = Row(args=("--tuned", env), settings=settings, needs=needs, in_make_test=is_fast, restarts=restarts)
    return rows


def _examples() -> dict[str, Row]:
    """Return a row for each file in `examples/tuned/`."""
    rows = {}
    for file in sorted((EXAMPLES / "tuned").glob("*.yaml")):
        experiment = read_experiment(file)
        env, algo = experiment["environment"]["env"], experiment["algo"]
        if env.startswith("mpe2."):
            more: dict[str, Any] = {"short": {"max_cycles": 12}, "needs": ("mpe2",), "modules": ("team",)}
            rows[file.stem] = Row(args=("--config", str(file)), settings={**SMALL[algo], **NETS}, **more)
            continue
        in_pool = env.startswith("envpool:")
        rows[file.stem] = Row(
            args=("--config", str(file)),
            settings={**SMALL[algo], **IMAGE_NETS},
            short={"max_episode_steps": 12} if in_pool else {"max_num_frames_per_episode": 60},
            needs=("envpool",) if in_pool else ("ale_py",),
            in_make_test=file.stem == "ppo_pong",
            pictures="is a vector env" if in_pool else "",
            restarts=in_pool or algo == "PPO",  # the vector env of ale-py has no state either
        )
    return rows


BOARD = {"environment.env_config.id": "classic/tictactoe_v3", "environment.env_config.env_type": "aec"}
HANDS = {"environment.env_config.id": "classic/rps-v2", "environment.env_config.env_type": "parallel"}
AGENTS = {"multi_agent.policies": ["main"], **NETS}
FAMILIES: Mapping[str, Row] = {
    "Box2D with pictures": _row("PPO", "CarRacing-v3", IMAGE_NETS, needs=("Box2D",)),
    "Atari": _row("DQN", "ALE/Pong-v5", IMAGE_NETS, needs=("ale_py",)),
    "Gymnasium-Robotics": _row(
        "SAC",
        "FetchReach-v4",
        {**NETS, "training.replay_buffer_config.type": "hindsight"},
        needs=("gymnasium_robotics", "mujoco"),
    ),
    "MiniGrid": _row(
        "PPO",
        "MiniGrid-Empty-5x5-v0",
        {**NETS, "environment.wrappers": ["minigrid.wrappers:ImgObsWrapper"]},
        needs=("minigrid",),
        in_make_test=True,
    ),
    "PettingZoo in turns": _row(
        "PPO",
        "pettingzoo:make",
        {**AGENTS, **BOARD},
        short={},
        needs=("pettingzoo",),
        in_make_test=True,
        modules=("main",),
    ),
    "PettingZoo in parallel": _row(
        "PPO",
        "pettingzoo:make",
        {**AGENTS, **HANDS},
        short={"max_cycles": 12},
        needs=("pettingzoo",),
        modules=("main",),
    ),
    "EnvPool": _row(
        "PPO",
        "envpool:CartPole-v1",
        needs=("envpool",),
        pictures="is a vector env",
        single=("--env", "CartPole-v1"),
        restarts=True,
    ),
    "VMAS": _row(
        "PPO",
        "corral.envs.vmas_env:VmasVectorEnv",
        {"multi_agent.policies": ["main"], **NETS},
        short={"scenario": "balance", "n_agents": 3, "max_steps": 12},
        needs=("vmas",),
        pictures="is a vector env",
        modules=("main",),
    ),
    "JAX": _row("PPO", "my_envs:make_walk", short={}, needs=("jax",), pictures="is a vector env"),
}
"""One env of each family that the pages name and that has no tuned settings."""

TABLE: Mapping[str, Row] = {**_tuned(), **_examples(), **FAMILIES}
