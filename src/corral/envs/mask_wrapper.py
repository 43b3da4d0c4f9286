"""The wrapper that puts masks of legal actions, which an env gives in another place, into its observations."""

from __future__ import annotations

from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.action_masks import MASK_KEY, OBS_KEY, num_choices
from corral.envs.multi_agent_env import ALL, MultiAgentEnv, agent_space, possible_agents
from corral.errors import EnvError

MaskSource = Literal["infos", "method"]


class ActionMasks(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper that makes observations `{"action_mask": mask, "observations": observation}`.

    The mask is int8 `[n]`, with 1 for each legal value of a Discrete action; for MultiDiscrete actions it has the
    values of all entries, one entry after another. With several agents each one has a mask.

    Args:
        env: An env with Discrete or MultiDiscrete actions, or a `MultiAgentEnv`; agents with other actions stay as they
            are.
        source: Where the env gives masks: `"infos"`, in the info of `reset` and `step` under `"action_mask"`, or
            `"method"`, from `action_masks()`, as sb3-contrib's MaskablePPO asks for it; with several agents from
            `action_masks(agent_id)`.

    Raises:
        EnvError: The env, or each of its agents, has other actions, or there is no such method. `reset` and `step`
            raise it if there is no mask, or if the mask has another length or dtype.
    """

    def __init__(self, env: gym.Env[Any, Any], source: MaskSource) -> None:
        """Find the agents and their spaces."""
        super().__init__(env)
        self._source = source
        self._is_multi_agent = isinstance(env.unwrapped, MultiAgentEnv)
        self._lengths: dict[Any, int] = {}
        if source == "method" and not env.has_wrapper_attr("action_masks"):
            raise EnvError("action_masks='method' needs a method action_masks() of the env, and there is none")
        actions: Any = env.action_space
        if not self._is_multi_agent:
            self.observation_space = self._masked_space(None, env.observation_space, actions)
        else:
            self.possible_agents = possible_agents(env)
            kinds = ("observation", "action")
            found = {agent: [agent_space(env, kind, agent) for kind in kinds] for agent in self.possible_agents}
            self.observation_spaces = {agent: self._masked_space(agent, *pair) for agent, pair in found.items()}
            self.action_spaces = actions = {agent: pair[1] for agent, pair in found.items()}
        if not self._lengths:
            raise EnvError(f"action masks need Discrete or MultiDiscrete actions, and the env has {actions}")

    def _masked_space(self, agent: Any, space: spaces.Space[Any], action_space: spaces.Space[Any]) -> spaces.Space[Any]:
        if (sizes := num_choices(action_space)) is None:
            return space
        self._lengths[agent] = length = sum(sizes)
        return spaces.Dict({MASK_KEY: spaces.Box(0, 1, (length,), np.int8), OBS_KEY: space})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the env, and return observation and info; see the class."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._add_masks(obs, info, None), info

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the env, and return what it gives; after an episode, a missing mask allows everything."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._add_masks(obs, info, terminated), reward, terminated, truncated, info

    def _add_masks(self, obs: Any, info: Any, terminated: Any) -> Any:
        if not self._is_multi_agent:
            return {MASK_KEY: self._mask(None, info, bool(terminated)), OBS_KEY: obs}
        all_ended = bool(terminated and terminated.get(ALL))
        masked = dict(obs)
        for agent in obs.keys() & self._lengths.keys():
            has_ended = all_ended or bool(terminated and terminated.get(agent))
            masked[agent] = {MASK_KEY: self._mask(agent, info.get(agent, {}), has_ended), OBS_KEY: obs[agent]}
        return masked

    def _mask(self, agent: Any, info: dict[str, Any], has_ended: bool) -> NDArray[np.int8]:
        """Return the checked mask of an agent, or of the only one, `None`."""
        length = self._lengths[agent]
        if self._source == "infos":
            place, mask = f"infos[{MASK_KEY!r}]", info.get(MASK_KEY)
        else:
            place, arguments = "action_masks()", () if agent is None else (agent,)
            mask = None if has_ended else self.get_wrapper_attr("action_masks")(*arguments)
        if mask is None and has_ended:
            return np.ones(length, np.int8)
        found = np.asarray(mask)
        if found.dtype.kind not in "biu" or found.size != length:
            whose = "" if agent is None else f" of agent {agent!r}"
            given = "nothing" if mask is None else f"{found.dtype} of shape {found.shape}"
            raise EnvError(
                f"{place}{whose} must be {length} bools or integers, 1 for each legal value of the action, got {given}"
            )
        checked: NDArray[np.int8] = (found.reshape(-1) != 0).astype(np.int8)
        return checked
