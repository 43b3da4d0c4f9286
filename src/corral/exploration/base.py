"""The base class of explorations, which choose actions while sampling and may add to the rewards; and the default.

The default draws actions from the policy's distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.seeding import check_rng, get_rng, set_rng
from corral.core.tree import Tree
from corral.errors import ConfigError
from corral.modules.distributions import ActionDistribution, FloatArray, uniform_logits

if TYPE_CHECKING:
    from corral.core.config import ExplorationConfig
    from corral.data.episodes.rollout import Rollout
    from corral.modules.inference import Inference
    from corral.modules.module import Module

# Action noise is drawn for this many rows at once; the drawn numbers do not depend on the lengths of the samples.
NOISE_ROWS = 64

Choice = tuple[NDArray[Any], NDArray[np.float32] | None]
"""Module actions `[N, ...]` and their log-likelihood `[N]`, or `None` for the likelihood under the policy."""


class RowDistribution:
    """The policy's action distribution for one row: N sub-envs at once.

    The same object is used for all rows: keep copies of its arrays, not the object.

    Attributes:
        inputs: The policy's outputs, float32 `[N, D]`: logits, Q-values, or means and log standard deviations.
        obs: Observations from which the inputs were computed, a tree of `[N, ...]`.
        acts: Which rows act now, bool `[N]`, because with several agents some may wait; `None` is all of them.
        legal: Which actions are legal, bool `[N, n]`, or `None` if observations hold no mask. The inputs of illegal
            actions are a large negative number.
        distribution: Distribution that has the inputs as its parameters.
        rng: Generator for all random numbers of the exploration.
        model: Module that computed the inputs, or `None` where it is not known.
    """

    __slots__ = ("_noise", "_row", "_sampled", "acts", "distribution", "inputs", "legal", "model", "obs", "rng")

    def __init__(self, distribution: ActionDistribution, rng: np.random.Generator, model: Module | None = None) -> None:
        """Keep the distribution of the action space; the runner sets inputs and observations for each row."""
        self.distribution = distribution
        self.rng = rng
        self.model = model
        self._sampled: Any = None
        self.inputs: FloatArray = np.zeros((0, distribution.num_inputs), np.float32)
        self.obs: Tree = None
        self.acts: NDArray[np.bool_] | None = None
        self.legal: NDArray[np.bool_] | None = None
        self._noise: FloatArray | None = None
        self._row = 0

    def get_state(self) -> dict[str, Any]:
        """Return the state of the generator, and the noise that was drawn and not used yet."""
        left = None if self._noise is None or self._row == NOISE_ROWS else self._noise[self._row :].copy()
        return {"rng": get_rng(self.rng), "noise": left}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check a state, without changing anything; raise what the damaged part raises."""
        check_rng(self.rng, state["rng"])
        if (left := state["noise"]) is not None and not (0 < len(left) <= NOISE_ROWS and left.dtype.kind == "f"):
            raise ValueError(f"the noise for actions is {left.dtype}{left.shape}")

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `get_state` returned; the generator stays the same object."""
        self.check_state(state)
        set_rng(self.rng, state["rng"])
        self._noise, self._row, left = None, 0, state["noise"]
        if left is not None:
            self._noise, self._row = np.resize(left[:1], (NOISE_ROWS, *left.shape[1:])), NOISE_ROWS - len(left)
            self._noise[self._row :] = left

    def sample(self, inputs: FloatArray | None = None) -> NDArray[Any]:
        """Return actions `[N, ...]` drawn from the distribution; `inputs`, `[N, D]`, replace the policy's outputs."""
        inputs = self.inputs if inputs is None else inputs
        if self._noise is None or self._row == NOISE_ROWS or self._noise.shape[1] != len(inputs):
            self._noise = self.distribution.noise(self.rng, (NOISE_ROWS, len(inputs)))
            self._row = 0
        self._row += 1
        self._sampled = self.distribution.sample(inputs, self._noise[self._row - 1])
        return self._sampled  # type: ignore[no-any-return]

    def next_noise(self, num_rows: int) -> FloatArray:
        """Return the noise `[num_rows, K]` that `sample` would use now, for actions that are drawn on a device."""
        if self._noise is None or self._row == NOISE_ROWS or self._noise.shape[1] != num_rows:
            self._noise, self._row = self.distribution.noise(self.rng, (NOISE_ROWS, num_rows)), 0
        self._row += 1
        found: FloatArray = self._noise[self._row - 1]
        return found

    def mode(self) -> NDArray[Any]:
        """Return the most likely actions `[N, ...]`; with Q-values as inputs, the best actions."""
        self._sampled = self.distribution.mode(self.inputs)
        return self._sampled  # type: ignore[no-any-return]

    deterministic_sample = mode

    def random(self) -> NDArray[Any]:
        """Return actions `[N, ...]` drawn uniformly from the action space, or from the legal actions."""
        if self.legal is None:
            return self.distribution.random(self.rng, len(self.inputs))
        noise = self.distribution.noise(self.rng, (len(self.legal),))
        actions: NDArray[Any] = self.distribution.sample(uniform_logits(self.legal), noise)
        return actions

    def logp(self, actions: NDArray[Any]) -> NDArray[np.float32]:
        """Return the log-likelihood of actions `[N, ...]`, float32 `[N]`."""
        return self._logp(self.inputs, actions)

    def sampled_action_logp(self) -> NDArray[np.float32]:
        """Return the log-likelihood `[N]`, float32, of the actions that `sample` or `mode` returned last.

        Raises:
            ConfigError: Neither was called yet.
        """
        if self._sampled is None:
            raise ConfigError("sampled_action_logp: call sample() or mode() of the action distribution first.")
        return self.logp(self._sampled)

    def entropy(self) -> NDArray[np.float32]:
        """Return the entropy of the policy's distribution, float32 `[N]`, in nats."""
        with torch.inference_mode():
            found: NDArray[np.float32] = self.distribution.entropy(_to_tensor(self.inputs)).numpy()
        return found

    def kl(self, other: RowDistribution) -> NDArray[np.float32]:
        """Return the divergence from this distribution to the one of another row, float32 `[N]`, in nats."""
        with torch.inference_mode():
            divergence = self.distribution.kl(_to_tensor(self.inputs), _to_tensor(other.inputs))
        found: NDArray[np.float32] = divergence.numpy()
        return found

    def _logp(self, inputs: FloatArray, actions: NDArray[Any]) -> NDArray[np.float32]:
        with torch.inference_mode():
            logp: NDArray[np.float32] = self.distribution.logp(_to_tensor(inputs), _to_tensor(actions)).numpy()
        return logp

    def random_logp(self, actions: NDArray[Any]) -> NDArray[np.float32]:
        """Return the log-likelihood `[N]` of actions that were drawn by `random`."""
        if self.legal is None:
            return self.distribution.random_logp(actions)
        return self._logp(uniform_logits(self.legal), actions)


def _to_tensor(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


class Exploration:
    """Chooses actions while sampling. Subclasses define `get_exploration_action`.

    Each runner has an exploration for its sub-envs. The algorithm has one more, for `compute_actions` and for learning
    from all rollouts. The keyword arguments of a subclass's `__init__` are the settings in `exploration_config`; the
    subclass passes all other arguments to the base class in `**kwargs`, or takes and passes some of them by name. It
    raises a `ConfigError` for a setting whose value is not allowed, which ends the build.

    Attributes:
        action_space: Action space of one sub-env.
        config: Config of the algorithm.
        policy_config: The same, or the config of another library that it was made from.
        model: Module whose outputs determine the actions.
        inference: Inference that computes the outputs, or `None` if no actions are chosen.
        num_workers: Number of runners in addition to the embedded one.
        worker_index: Index of the runner: 0 for the embedded runner and in the algorithm, 1 and up for others.
        num_envs: Number of sub-envs N.
        rng: Generator for all random numbers of the exploration.
        on_policy: Whether algorithms that learn only from actions of their own policy can use the exploration. They can
            if the actions are drawn from the policy's distribution, or are returned with their log-likelihood.
        acts_by_module: Whether the actions without exploration are the most likely actions of the module. Other actions
            cannot be chosen by a policy that was loaded without the exploration.
        with_memory: Whether modules with memory are supported.
        action_spaces: Types of supported action spaces.
        schedules: Settings that are schedules, by name, with the settings that each of them replaces: the first value,
            the last one, and durations.
        for_actions: Settings that only some action spaces need, by name, with the types of these spaces.
        by_actor: Whether each actor, which is a sub-env of a runner, has a constant of its own instead of schedules, if
            there are several.
        begins_without_state: Whether `get_state` is empty at first. Then `set_state({})` begins again.
        paper: Source of the method.
    """

    on_policy: ClassVar[bool] = True
    acts_by_module: ClassVar[bool] = True
    with_memory: ClassVar[bool] = True
    schedules: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    for_actions: ClassVar[Mapping[str, tuple[type[spaces.Space[Any]], ...]]] = {}
    by_actor: ClassVar[bool] = False
    begins_without_state: ClassVar[bool] = False
    action_spaces: ClassVar[tuple[type[spaces.Space[Any]], ...]] = (
        spaces.Discrete,
        spaces.MultiDiscrete,
        spaces.MultiBinary,
        spaces.Box,
    )
    paper: ClassVar[str] = ""

    def __init__(
        self,
        action_space: spaces.Space[Any],
        *,
        policy_config: ExplorationConfig,
        model: Module,
        inference: Inference | None = None,
        num_workers: int = 0,
        worker_index: int = 0,
        num_envs: int | None = None,
        rng: np.random.Generator | None = None,
        framework: str = "torch",
    ) -> None:
        """Keep the arguments of the runner; subclasses receive them in `**kwargs`."""
        self.action_space = action_space
        self.model = model
        self.num_workers, self.worker_index, self.framework = num_workers, worker_index, framework
        given = vars(self)  # what the constructor of the subclass does not take, see `make_exploration`
        self.policy_config: Any = policy_config
        self.config = given.get("config", policy_config)
        self.inference = given.get("inference") if inference is None else inference
        self.num_envs = given.get("num_envs", 1) if num_envs is None else num_envs
        self.rng = rng or given.get("rng") or np.random.default_rng()

    def get_exploration_action(
        self, *, action_distribution: RowDistribution, timestep: int, explore: bool = True
    ) -> tuple[Any, Any]:
        """Return the actions of one row.

        Args:
            action_distribution: Action distribution of the N sub-envs.
            timestep: Number of env steps sampled so far by all runners, over the lifetime of the run.
            explore: Whether to explore; with False, return the deterministic actions.

        Returns:
            Module actions `[N, ...]` and their log-likelihood `[N]`, each an array or a tensor; `None` means the
            log-likelihood under the policy's distribution.
        """
        raise TypeError(f"{type(self).__name__} has no method get_exploration_action.")

    def begin_episodes(self, begins: NDArray[np.bool_], *, timestep: int, explore: bool) -> None:
        """Prepare a row. Episodes begin in the sub-envs for which `begins`, bool `[N]`, is True."""

    def end_sample(self, rollout: Rollout, *, timestep: int, explore: bool) -> None:
        """Receive a complete rollout, in the runner that sampled it."""

    def learn(self, rollouts: Sequence[Rollout], *, timestep: int) -> dict[str, float]:
        """Learn from the rollouts of all runners, in the algorithm's process, before the learners do; return numbers.

        This method may add to the rewards: `rollout.rewards = rollout.rewards + bonus`. Transforms of rewards change
        the rewards of the env, and what was added is added after them. Arrays from another process are read-only.

        Returns:
            Numbers to report under `exploration/` in the result.
        """
        return {}

    def get_metrics(self, timestep: int) -> dict[str, float]:
        """Return numbers to report under `env_runners/`, such as `epsilon`; the names must always be the same."""
        return {}

    def get_weights(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that `learn` changes and runners need to act; they are sent with the module's weights."""
        return {}

    def set_weights(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Receive the arrays that `get_weights` of the algorithm's exploration returned."""

    def get_state(self) -> dict[str, Any]:
        """Return the state from which exploration continues, as plain data and arrays, without the timestep."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `get_state` returned."""


class Delegating(Exploration):
    """Delegates the choice of actions, and all other methods, to another exploration.

    Attributes:
        sub: The other exploration; the `__init__` of a subclass makes it.
    """

    sub: Exploration

    def get_exploration_action(
        self, *, action_distribution: RowDistribution, timestep: int, explore: bool = True
    ) -> tuple[Any, Any]:
        return self.sub.get_exploration_action(
            action_distribution=action_distribution, timestep=timestep, explore=explore
        )

    def begin_episodes(self, begins: NDArray[np.bool_], *, timestep: int, explore: bool) -> None:
        """Let `sub` prepare a row; runners call this only if `sub` overrides the method."""
        self.sub.begin_episodes(begins, timestep=timestep, explore=explore)

    def end_sample(self, rollout: Rollout, *, timestep: int, explore: bool) -> None:
        """Pass the rollout to `sub`."""
        self.sub.end_sample(rollout, timestep=timestep, explore=explore)

    def learn(self, rollouts: Sequence[Rollout], *, timestep: int) -> dict[str, float]:
        """Let `sub` learn, and return its numbers."""
        return self.sub.learn(rollouts, timestep=timestep)

    def get_metrics(self, timestep: int) -> dict[str, float]:
        return self.sub.get_metrics(timestep)

    def get_weights(self) -> dict[str, NDArray[Any]]:
        return self.sub.get_weights()

    def set_weights(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Pass the weights to `sub`."""
        self.sub.set_weights(weights)

    def get_state(self) -> dict[str, Any]:
        """Return the state of `sub` under the key `sub`, or an empty dict if `sub` has no state."""
        state = self.sub.get_state()
        return {"sub": state} if state else {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        restore_exploration(self.sub, state.get("sub", {}))


def restore_exploration(exploration: Exploration, state: Mapping[str, Any]) -> None:
    """Let an exploration continue from a state; it keeps its own if the state is empty, unless it began without one."""
    if state or exploration.begins_without_state:
        exploration.set_state(state)


def acts_by_module(exploration: Exploration) -> bool:
    """Return `acts_by_module` of an exploration, or of the exploration to which it delegates."""
    return acts_by_module(exploration.sub) if isinstance(exploration, Delegating) else exploration.acts_by_module


def overrides_method(exploration: Exploration, method: str) -> bool:
    """Return whether an exploration, or the exploration to which it delegates, overrides a method."""
    own = getattr(type(exploration), method)
    if isinstance(exploration, Delegating) and own is getattr(Delegating, method):
        return overrides_method(exploration.sub, method)
    return own is not getattr(Exploration, method)


class StochasticSampling(Exploration):
    """Draws actions from the policy's distribution; without exploration, chooses the most likely action.

    Args:
        random_timesteps: Number of env steps at the beginning with actions drawn uniformly from the action space.
    """

    action_spaces = (*Exploration.action_spaces, spaces.Dict, spaces.Tuple)
    paper = "Williams 1992, doi:10.1007/BF00992696"

    def __init__(self, action_space: spaces.Space[Any], *, random_timesteps: int = 0, **kwargs: Any) -> None:
        super().__init__(action_space, **kwargs)
        self.random_timesteps = not_negative(self, "random_timesteps", random_timesteps)

    def get_exploration_action(
        self, *, action_distribution: RowDistribution, timestep: int, explore: bool = True
    ) -> Choice:
        """Return drawn actions and their log-likelihood; without exploration, the most likely actions."""
        if not explore:
            return action_distribution.mode(), None
        if timestep < self.random_timesteps:
            actions = action_distribution.random()
            return actions, action_distribution.random_logp(actions)
        return action_distribution.sample(), None


class Random(Exploration):
    """Draws actions uniformly from the action space; without exploration, chooses the policy's most likely action."""

    on_policy = False
    action_spaces = (*Exploration.action_spaces, spaces.Dict, spaces.Tuple)
    paper = "a baseline"

    def get_exploration_action(
        self, *, action_distribution: RowDistribution, timestep: int, explore: bool = True
    ) -> Choice:
        """Return drawn actions and their log-likelihood; without exploration, the most likely actions."""
        if not explore:
            return action_distribution.mode(), None
        actions = action_distribution.random()
        return actions, action_distribution.random_logp(actions)


def not_negative(exploration: Exploration, name: str, value: Any) -> Any:
    """Return the value if it is a finite number of at least 0.

    Raises:
        ConfigError: The value is not a number, is negative, or is not finite.
    """
    if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ConfigError(
            f"exploration_config of {type(exploration).__name__}: {name}={value!r} must be a number of at least 0."
        )
    return value
