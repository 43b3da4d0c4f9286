"""Vector envs that do not reset by themselves: each sub-env is reset by a mask, with reset arguments of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from numpy.typing import NDArray

from corral.core.spaces import space_tree
from corral.core.tree import Tree, map_tree
from corral.envs.checks import mismatch
from corral.envs.episode_resets import EpisodeResets
from corral.envs.step_checks import check_infos, check_step_columns
from corral.errors import EnvError


def infos_by_env(infos: Mapping[str, Any], num_envs: int) -> dict[int, dict[str, Any]]:
    """Return infos by index of the sub-env.

    Args:
        infos: Infos as Gymnasium's vector envs give them: by key, values `[N, ...]` or nested such dicts, and under
            `_key` a mask bool `[N]` of the sub-envs that have one. A value that is no array applies to all sub-envs.
        num_envs: N.
    """
    by_env: dict[int, dict[str, Any]] = {i: {} for i in range(num_envs)}
    for key, value in infos.items():
        if isinstance(key, str) and key.startswith("_") and key[1:] in infos:
            continue
        mask = np.broadcast_to(infos.get(f"_{key}", True), num_envs)
        parts = infos_by_env(value, num_envs) if isinstance(value, Mapping) else value
        is_sized = isinstance(parts, (dict, list, tuple)) or (isinstance(parts, np.ndarray) and parts.ndim > 0)
        if not (is_sized and len(parts) == num_envs):
            parts = [value] * num_envs
        for i in np.flatnonzero(mask).tolist():
            by_env[i][key] = parts[i]
    return by_env


class MaskedResets(VectorWrapper):
    """Vector env around one with `AutoresetMode.DISABLED`, whose `reset` takes `options["reset_mask"]`, bool `[N]`.

    It resets a sub-env in the step that ends its episode, as same-step autoreset does, with the arguments of that
    episode. Infos are dicts by index of the sub-env.

    Args:
        env: The vector env.
        wrap: Function that gives the `EpisodeResets` of a lane and its index.

    Attributes:
        lanes: For each sub-env the `EpisodeResets` that chooses its reset arguments.

    Raises:
        EnvError: A reset by the mask changed other sub-envs too.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], wrap: Callable[[gym.Env[Any, Any], int], EpisodeResets]) -> None:
        """Make the lanes."""
        super().__init__(env)
        self.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self._inner = [_Lane(env, index) for index in range(env.num_envs)]
        self.lanes = [wrap(lane, index) for index, lane in enumerate(self._inner)]

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[Any, Any]]:
        """Reset all sub-envs, each with its own arguments where it has any; see `gymnasium.vector.VectorEnv.reset`."""
        seeds = seed if isinstance(seed, list) else [None if seed is None else seed + i for i in range(self.num_envs)]
        all_seeds: Any = seed
        obs, _ = self.env.reset(seed=all_seeds, options=options)  # a mask is allowed only after a first reset
        obs, infos = map_tree(np.copy, obs), {}
        for i, lane in enumerate(self.lanes):
            row, infos[i] = lane.reset(seed=seeds[i], options=options)
            map_tree(partial(_write, i), obs, row)
        return obs, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[Any, Any]]:
        """Step all sub-envs, and reset the ones whose episodes ended; see `gymnasium.vector.VectorEnv.step`."""
        obs, *columns, given = self.env.step(actions)
        rewards, terminated, truncated = map(np.copy, check_step_columns(self.num_envs, *columns))
        obs, infos = map_tree(np.copy, obs), infos_by_env(check_infos(given, "step"), self.num_envs)
        for i in np.flatnonzero(terminated | truncated).tolist():
            final = {"final_obs": map_tree(lambda leaf, i=i: leaf[i].copy(), obs), "final_info": infos[i]}
            row, info = self.lanes[i].reset()
            map_tree(partial(_check_others, terminated | truncated), obs, self._inner[i].batch)
            map_tree(partial(_write, i), obs, row)
            infos[i] = {**info, **final}
        return obs, rewards, terminated, truncated, infos


class _Lane(gym.Env[Any, Any]):
    """One sub-env of a vector env, which can be reset and has tasks, and is stepped with the others."""

    def __init__(self, vector_env: VectorEnv[Any, Any, Any], index: int) -> None:
        self.observation_space = vector_env.single_observation_space
        self.action_space = vector_env.single_action_space
        self.vector_env, self._index, self._tree = vector_env, index, space_tree(self.observation_space)
        self.batch: Tree = None  # observations `[N, ...]` of the latest reset

    def __getattr__(self, name: str) -> Any:
        sub_envs = getattr(self.vector_env.unwrapped, "envs", None) if name in ("get_task", "set_task") else None
        if sub_envs is None:
            raise AttributeError(name)
        return sub_envs[self._index].get_wrapper_attr(name)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        n, i = self.vector_env.num_envs, self._index
        seeds: Any = [seed if j == i else None for j in range(n)]
        obs, infos = self.vector_env.reset(seed=seeds, options={**(options or {}), "reset_mask": np.arange(n) == i})
        if problem := mismatch(self._tree, obs, "observation", values=False, batch=(n,)):
            raise EnvError(f"{problem} (from reset())")  # NumPy alone would broadcast it over the row, or cast it
        self.batch = obs = map_tree(lambda _, leaf: np.asarray(leaf), self._tree, obs)
        return map_tree(lambda leaf: np.copy(leaf[i]), obs), infos_by_env(check_infos(infos, "reset"), n)[i]


def _check_others(ended: NDArray[np.bool_], before: Tree, after: Tree) -> None:
    """Refuse a reset that changed the observations of sub-envs whose episodes continue."""
    old, new = before[~ended], after[~ended]
    if not ((old == new) | (old != old)).all():  # NaN is found later, with its place
        raise EnvError(
            "reset(options={'reset_mask': mask}) changed other sub-envs than the mask says, which a vector env with "
            "AutoresetMode.DISABLED must not do."
        )


def _write(index: int, column: Tree, row: Tree) -> None:
    column[index] = row
