"""The synchronous vector env: sub-envs are stepped one after another in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from corral.core.spaces import space_tree
from corral.core.tree import Tree, copy_nested, map_tree
from corral.envs.checks import check_obs
from corral.envs.replay import Start, note_of
from corral.envs.seats import SeatsSpace
from corral.envs.step_checks import FLAG_TYPES, NUMBER_TYPES, check_reset, check_step
from corral.envs.step_timeout import StepOverdue
from corral.envs.sub_envs import Restarts, problem_of, restart_env, restart_error
from corral.errors import CallbackError, SubEnvError


class SyncVectorEnv(gym.vector.SyncVectorEnv):  # generic only since Gymnasium 1.3
    """Gymnasium's synchronous vector env with a faster step, and errors that name the failed sub-env.

    Each step writes its observations to a new array, which the caller may keep; observations of seats are in the same
    arrays after each step. Infos are the info dicts of the
    sub-envs by index, exactly as the sub-envs gave them; Gymnasium puts the values of all sub-envs into one array.

    Args:
        env_fns: Functions that make the sub-envs.
        autoreset_mode: Autoreset mode: when sub-envs are reset.
        make: Function that makes sub-env i again; needed with `restarts`.
        restarts: Restarts of failed sub-envs; with `None`, a failure is raised.

    Attributes:
        num_steps_of_failed_call: Steps that sub-envs took in a call of `step` that raised.
    """

    num_steps_of_failed_call = 0

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env[Any, Any]]],
        *,
        autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP,
        make: Callable[[int], gym.Env[Any, Any]] | None = None,
        restarts: Restarts | None = None,
    ) -> None:
        """Make the sub-envs."""
        super().__init__(env_fns, autoreset_mode=autoreset_mode)
        self._make, self._restarts = make, restarts
        self._notes = [note_of(env) for env in self.envs]  # before each reset they note how an episode begins
        self._starts: list[Start | None] = [None] * self.num_envs
        make_obs: Tree = map_tree(
            lambda space: partial(np.empty, (self.num_envs, *space.shape), space.dtype),
            space_tree(self.single_observation_space),
        )
        self._empty_obs: Callable[[], Tree] = make_obs
        if not isinstance(make_obs, partial):
            self._empty_obs = lambda: map_tree(lambda make: make(), make_obs)
        self._seats: Tree = None  # what all seated envs write to
        if isinstance(self.single_observation_space, SeatsSpace):
            self._seats = seats = self._empty_obs()
            self._empty_obs = lambda: seats
            for i in range(self.num_envs):
                self._place(i)

    def _place(self, i: int) -> None:
        """Let a seated sub-env write its observations to its row of the batch."""
        if self._seats is not None:
            self.envs[i].get_wrapper_attr("write_to")(map_tree(lambda column: column[i], self._seats))

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all sub-envs; see `gymnasium.vector.SyncVectorEnv.reset`."""
        seeds: Sequence[int | None] = seed if isinstance(seed, list) else [None] * self.num_envs
        if isinstance(seed, int):
            seeds = [seed + i for i in range(self.num_envs)]
        self._autoreset_envs = np.zeros(self.num_envs, np.bool_)
        self._terminations, self._truncations = self._autoreset_envs.copy(), self._autoreset_envs.copy()
        obs, infos = self._empty_obs(), dict[Any, Any]()
        for i, env in enumerate(self.envs):
            try:
                self._starts[i] = {**self._notes[i](), "seed": seeds[i], "options": options}
                env_obs, info = check_reset(env.reset(seed=seeds[i], options=options))
                self._write(obs, i, env_obs)
            except (Exception, StepOverdue) as error:
                info = self._restart(i, "reset", error, obs)
            if info:
                infos[i] = info
        return obs, infos

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Step all sub-envs; see `gymnasium.vector.SyncVectorEnv.step`."""
        n = self.num_envs
        rewards, terminated, truncated = np.zeros(n), np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        obs, infos = self._empty_obs(), dict[Any, Any]()
        same_step = self.autoreset_mode == AutoresetMode.SAME_STEP
        pending = self._autoreset_envs.tolist()
        num_steps = 0
        if isinstance(actions, dict) and all(isinstance(column, np.ndarray) for column in actions.values()):
            actions = [dict(zip(actions, rows, strict=True)) for rows in zip(*actions.values(), strict=True)]
        elif isinstance(actions, (dict, tuple)):
            actions = [map_tree(lambda column, i=i: column[i], actions) for i in range(n)]
        try:
            for i, env in enumerate(self.envs):
                method = "reset" if pending[i] and not same_step else "step"
                final: dict[str, Any] = {}
                returned: Any
                try:
                    if method == "reset":
                        self._starts[i] = self._notes[i]()
                        returned = env.reset()
                        is_right = type(returned) is tuple and len(returned) == 2 and type(returned[1]) is dict
                        env_obs, info = returned if is_right else check_reset(returned)
                    else:
                        returned = env.step(actions[i])
                        num_steps += 1
                        is_right = (
                            type(returned) is tuple
                            and len(returned) == 5
                            and type(returned[1]) in NUMBER_TYPES
                            and type(returned[2]) in FLAG_TYPES
                            and type(returned[3]) in FLAG_TYPES
                            and type(returned[4]) is dict
                        )
                        env_obs, rewards[i], terminated[i], truncated[i], info = (
                            returned if is_right else check_step(returned)
                        )
                        if same_step and (terminated[i] or truncated[i]):
                            check_obs(self.single_observation_space, env_obs)
                            # Copies, because the reset may write into the same objects.
                            final = {"final_obs": copy_nested(env_obs), "final_info": copy_nested(info)}
                            method = "reset"
                            self._starts[i] = self._notes[i]()
                            returned = env.reset()
                            is_right = type(returned) is tuple and len(returned) == 2 and type(returned[1]) is dict
                            env_obs, info = returned if is_right else check_reset(returned)
                    self._write(obs, i, env_obs)
                except (Exception, StepOverdue) as error:
                    info = self._restart(i, method, error, obs)
                    if method == "step":  # a failed step does not count, even if it returned some values
                        rewards[i], terminated[i], truncated[i] = 0.0, False, False
                if info or final:
                    infos[i] = {**info, **final}
        except BaseException:
            self.num_steps_of_failed_call = num_steps
            raise
        self._autoreset_envs = terminated | truncated
        return obs, rewards, terminated, truncated, infos

    def starts(self) -> list[Start | None]:
        """Return how the current episode of each sub-env began."""
        return list(self._starts)

    def continue_from(self, starts: Sequence[Start | None], resets_next: NDArray[np.bool_]) -> None:
        """Continue where other sub-envs stood.

        Args:
            starts: How their episodes began.
            resets_next: Sub-envs that the next step only resets, bool `[N]`, as after a step that ended an episode.
        """
        self._starts, self._autoreset_envs = list(starts), resets_next.copy()

    def close_extras(self, **kwargs: Any) -> None:
        """Close all sub-envs, even if closing one of them raises an exception."""
        with ExitStack() as closing:
            for env in reversed(self.envs):
                closing.callback(env.close)

    def _restart(self, i: int, method: str, error: BaseException, obs: Tree) -> dict[str, Any]:
        """Replace a failed sub-env, write the first observation of the new one to the batch, and return its info.

        Raises:
            SubEnvError: Sub-envs are not restarted in this vector env, or the restart failed.
        """
        failure = SubEnvError(i, method, problem_of(error))
        failure.__cause__ = error
        restarts, make = self._restarts, self._make
        if restarts is None or make is None:
            raise failure

        def created(env: gym.Env[Any, Any]) -> None:
            self.envs[i] = env
            self._place(i)
            restarts.created(i, env)

        def begins(env: gym.Env[Any, Any], seed: int) -> None:
            self._notes[i] = note_of(env)
            self._starts[i] = {**self._notes[i](), "seed": seed}

        with restarts.paused():
            try:
                seed = restarts.next_seed()
                _, env_obs, info = restart_env(
                    self.envs[i],
                    partial(make, i),
                    seed=seed,
                    call=restarts.call,
                    created=created,
                    begins=begins,
                    known_task=restarts.known_task(i),
                )
            except CallbackError:
                raise
            except Exception as second:
                raise restart_error(failure, second) from failure.__cause__
        self._write(obs, i, env_obs)
        restarts.restarted(failure)
        return info

    def _write(self, columns: Tree, i: int, obs: Tree) -> None:
        """Write the observation of one sub-env to the batch; NumPy alone would broadcast a wrong shape."""
        if isinstance(columns, np.ndarray):
            if np.shape(obs) != columns.shape[1:]:
                raise ValueError(f"observation must have shape {columns.shape[1:]}, got {np.shape(obs)}")
            if type(obs) is not int and getattr(obs, "dtype", None) != columns.dtype:
                check_obs(self.single_observation_space, obs)
            columns[i] = obs
            return
        if self._seats is not None:  # the sub-env has written them
            return
        check_obs(self.single_observation_space, obs)  # which knows casts that lose nothing from their values
        map_tree(lambda column, leaf: np.copyto(column[i, ...], leaf, casting="unsafe"), columns, obs)
