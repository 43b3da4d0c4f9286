"""Models of Stable-Baselines3 in use: a policy that acts, and a config that trains further."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from corral.algorithms.config.config import AlgorithmConfig
from corral.algorithms.registry import config_from_dict
from corral.compat.sb3.files import read_sb3
from corral.errors import CheckpointError
from corral.runs.policies.policy import Policy

log = logging.getLogger("corral")


@dataclass(frozen=True)
class SB3Model:
    """A model that Stable-Baselines3 trained, as `from_sb3` returns it.

    Attributes:
        policy: Chooses actions, as `model.predict(obs, deterministic=True)` does.
        config: Config without an env, of the algorithm in Corral that has this network. What it builds begins with the
            weights of the model, its target networks and the temperature of SAC included. It has the `gamma` of the
            model, and explores as a policy that has learned; other settings are the defaults of Corral.
    """

    policy: Policy
    config: AlgorithmConfig


def from_sb3(
    path: str | Path,
    *,
    observation_space: spaces.Space[Any] | None = None,
    action_space: spaces.Space[Any] | None = None,
    seed: int | None = 0,
) -> SB3Model:
    """Return a model that Stable-Baselines3 saved with `model.save(path)`: its policy, and a config to train further.

    It reads the default `MlpPolicy` of PPO, A2C, DQN, SAC, TD3 and DDPG. Nothing is unpickled, and Stable-Baselines3
    need not be installed. PPO's config is for models of A2C too, whose networks are the same.

    Args:
        path: The zip file; the ending `.zip` may be left out.
        observation_space: Space of one observation, for a file that does not say in plain text what it is.
        action_space: Space of one action, for such a file.
        seed: Seed of the actions that the policy draws with `explore=True`; `None` draws others in each process.

    Raises:
        CheckpointError: There is no such file, it is damaged, or a part of it is not plain; the message names the part.
            Or a space of discrete values has a `start`, which Stable-Baselines3 leaves out.
    """
    file = read_sb3(path)
    observation_space = file.space("observation_space") if observation_space is None else observation_space
    action_space = file.space("action_space") if action_space is None else action_space
    for name, space in (("observation_space", observation_space), ("action_space", action_space)):
        _refuse_start(space, name, file.path)
    settings = {**file.settings, "rl_module": {**file.settings["rl_module"], "load_from": str(file.path)}}
    try:
        config = config_from_dict(settings)
        module = config.module_spec(observation_space, action_space).build()
        module.load_state_dict({name: torch.from_numpy(array) for name, array in file.weights.items()})
    except (ValueError, RuntimeError) as error:  # the latter names each weight that differs
        raise CheckpointError(
            f"{file.path}: its weights do not fit observations {observation_space} and actions {action_space}: "
            f"{' '.join(str(error).split())} If these are not its spaces, give them: from_sb3(path, "
            "observation_space=env.observation_space, action_space=env.action_space)."
        ) from error
    if settings["algo"] == "PPO" and file.data.get("_last_original_obs") is not None:  # others always have some
        log.warning(
            "%s was trained with VecNormalize, whose statistics are in a file of their own: the policy takes "
            "observations that are normalised already.",
            file.path,
        )
    return SB3Model(Policy(module, seed=seed), config)


def _refuse_start(space: spaces.Space[Any], name: str, path: Path) -> None:
    """Refuse discrete values that do not begin at 0: in Stable-Baselines3 they do, whatever `start` says.

    Raises:
        CheckpointError: `start` of the space is another number.
    """
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)) and np.any(space.start):
        plain = (
            f"Discrete({space.n})" if isinstance(space, spaces.Discrete) else f"MultiDiscrete({space.nvec.tolist()})"
        )
        raise CheckpointError(
            f"{path}: {name} is {space}, and Stable-Baselines3 leaves start out: its values begin at 0. "
            f"Give from_sb3(path, {name}=gymnasium.spaces.{plain}), and convert the values for the env."
        )
