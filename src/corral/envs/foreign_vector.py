"""What a factory returns, as a vector env of Gymnasium: vector envs of other libraries get an adapter."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv

from corral.envs.adapted_vector import AdaptedVectorEnv, adapt_pool


def adapt_vector_env(made: Any) -> Any:
    """Return what a factory returned, as a vector env of Gymnasium if it is one of another library.

    An object is a vector env if it has `num_envs`, and the spaces of one sub-env or of all; its data are tensors if it
    has a `device`. Other objects are returned unchanged.

    Raises:
        EnvError: A pool of EnvPool has another API or is asynchronous, or a vector env has no spaces.
    """
    if any(base.__module__.startswith("envpool.") for base in type(made).__mro__):
        return adapt_pool(made)
    has_num_envs = isinstance(getattr(made, "num_envs", None), (int, np.integer))
    if has_num_envs and getattr(made, "device", None) is not None and hasattr(made, "step"):
        return _adapt_tensors(made)
    is_vector = has_num_envs and not isinstance(made, VectorEnv)
    is_single = isinstance(made, gym.Env) and not hasattr(made, "single_observation_space")
    if is_single or not is_vector or not hasattr(made, "step"):
        return made
    return AdaptedVectorEnv(made)


def _adapt_tensors(made: Any) -> AdaptedVectorEnv:
    if getattr(made, "possible_agents", ()):
        from corral.envs.tensor_agents import TensorAgentsAdapter

        return TensorAgentsAdapter(made)
    from corral.envs.tensor_env import TensorEnvAdapter

    return TensorEnvAdapter(made)
