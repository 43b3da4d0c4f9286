"""The base class of explorations: they choose actions while sampling, and may add to the rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.tree import Tree
from corral.modules.distributions import ActionDistribution, FloatArray

if TYPE_CHECKING:
    from corral.config.config import AlgorithmConfig
    from corral.episodes.rollout import Rollout
    from corral.modules.inference import Inference
    from corral.modules.module import Module

# Action noise is drawn for this many rows at once; the stream of draws does not depend on how samples are cut.
NOISE_ROWS = 64

Choice = tuple[NDArray[Any], NDArray[np.float32] | None]
"""Module actions `[N, ...]` and their log-likelihood `[N]`, or `None` for the likelihood under the policy."""


class RowDistribution:
    """The policy's action distribution for one row: N sub-envs at once.

    One object serves all rows, so keep its numbers and not the object.

    Attributes:
        inputs: The policy's outputs, float32 `[N, D]`: logits, Q-values, or means and log standard deviations.
        obs: Observations that the inputs were computed from, a tree of `[N, ...]`.
        distribution: Distribution whose parameters the inputs are.
        rng: Generator for everything that is drawn here.
    """

    __slots__ = ("_noise", "_row", "distribution", "inputs", "obs", "rng")

    def __init__(self, distribution: ActionDistribution, rng: np.random.Generator) -> None:
        """Take the distribution of the action space; inputs and observations are set for each row."""
        self.distribution = distribution
        self.rng = rng
        self.inputs: FloatArray = np.zeros((0, distribution.num_inputs), np.float32)
        self.obs: Tree = None
        self._noise: FloatArray | None = None
        self._row = 0

    def sample(self, inputs: FloatArray | None = None) -> NDArray[Any]:
        """Draw actions `[N, ...]` from the distribution, or from the one that other inputs `[N, D]` give."""
        inputs = self.inputs if inputs is None else inputs
        if self._noise is None or self._row == NOISE_ROWS or self._noise.shape[1] != len(inputs):
            self._noise = self.distribution.noise(self.rng, (NOISE_ROWS, len(inputs)))
            self._row = 0
        self._row += 1
        return self.distribution.sample(inputs, self._noise[self._row - 1])

    def mode(self) -> NDArray[Any]:
        """Return the most likely actions `[N, ...]`; of Q-values, the best ones."""
        return self.distribution.mode(self.inputs)

    deterministic_sample = mode

    def random(self) -> NDArray[Any]:
        """Draw actions `[N, ...]` evenly from the action space."""
        return self.distribution.random(self.rng, len(self.inputs))

    def logp(self, actions: NDArray[Any]) -> NDArray[np.float32]:
        """Return the log-likelihood of actions `[N, ...]`, float32 `[N]`."""
        with torch.inference_mode():
            logp: NDArray[np.float32] = self.distribution.logp(
                torch.from_numpy(np.ascontiguousarray(self.inputs)), torch.from_numpy(np.ascontiguousarray(actions))
            ).numpy()
        return logp

    def random_logp(self, actions: NDArray[Any]) -> NDArray[np.float32]:
        """Return the log-likelihood `[N]` of actions that `random` drew."""
        return self.distribution.random_logp(actions)


class Exploration:
    """How actions are chosen while sampling. Subclasses define `get_exploration_action`.

    Every runner has one for its sub-envs, and the algorithm has one for `compute_actions` and for learning from all
    rollouts. The keyword arguments of a subclass's own `__init__` are the settings that `exploration_config` takes;
    it passes the others on in `**kwargs`.

    Attributes:
        action_space: Action space of one sub-env.
        config: Config of the algorithm.
        model: Module whose outputs the actions are chosen from.
        inference: Inference that computes the outputs, or `None` where no actions are chosen.
        num_workers: Runners besides the embedded one.
        worker_index: 0 for the embedded runner and in the algorithm, 1 and up for others.
        num_envs: N.
        rng: Generator for everything that is drawn here.
        on_policy: Whether an algorithm that learns from its own policy's actions only can use it: the actions are drawn
            from the policy's distribution, or come with their log-likelihood.
        action_spaces: Types of action spaces that it supports.
        paper: Source of the method.
    """

    on_policy: ClassVar[bool] = True
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
        policy_config: AlgorithmConfig,
        model: Module,
        inference: Inference | None = None,
        num_workers: int = 0,
        worker_index: int = 0,
        num_envs: int = 1,
        rng: np.random.Generator | None = None,
        framework: str = "torch",
    ) -> None:
        """Keep the arguments of the runner; subclasses receive them in `**kwargs`."""
        self.action_space = action_space
        self.config = policy_config
        self.model = model
        self.inference = inference
        self.num_workers, self.worker_index, self.num_envs = num_workers, worker_index, num_envs
        self.rng = rng or np.random.default_rng()
        self.framework = framework

    def get_exploration_action(
        self, *, action_distribution: RowDistribution, timestep: int, explore: bool = True
    ) -> tuple[Any, Any]:
        """Choose the actions of one row.

        Args:
            action_distribution: Action distribution of the N sub-envs.
            timestep: Env steps sampled so far by all runners over the lifetime of the run.
            explore: False asks for the deterministic choice.

        Returns:
            Module actions `[N, ...]` and their log-likelihood `[N]`, each an array or a tensor; `None` means the
            log-likelihood under the policy's distribution.
        """
        raise TypeError(f"{type(self).__name__} has no method get_exploration_action.")

    def begin_episodes(self, begins: NDArray[np.bool_], *, timestep: int, explore: bool) -> None:
        """Prepare a row in which episodes begin in the sub-envs where `begins`, bool `[N]`, is True."""

    def end_sample(self, rollout: Rollout, *, timestep: int, explore: bool) -> None:
        """Look at a rollout that is complete, in the runner that sampled it."""

    def learn(self, rollouts: Sequence[Rollout], *, timestep: int) -> dict[str, float]:
        """Learn from what all runners sampled, in the algorithm's process, before anything else does.

        Rewards may be changed here: `rollout.rewards = ...` replaces them. Arrays from another process are read-only.

        Returns:
            Numbers to report under `exploration/` in the result.
        """
        return {}

    def get_metrics(self, timestep: int) -> dict[str, float]:
        """Return numbers to report under `env_runners/`, such as `epsilon`; the same names every time."""
        return {}

    def get_weights(self) -> dict[str, NDArray[Any]]:
        """Return arrays that `learn` changes and runners need to act; they travel with the module's weights."""
        return {}

    def set_weights(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Receive the arrays that `get_weights` of the algorithm's exploration returned."""

    def get_state(self) -> dict[str, Any]:
        """Return the state from which exploring continues, without the timestep: plain data and arrays."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where the exploration of this state was."""


class Delegating(Exploration):
    """Delegates the choice of actions, and everything that belongs to it, to another exploration.

    Attributes:
        sub: The other exploration, which a subclass's `__init__` makes.
    """

    sub: Exploration

    def get_exploration_action(
        self, *, action_distribution: RowDistribution, timestep: int, explore: bool = True
    ) -> tuple[Any, Any]:
        """Choose as `sub` does."""
        return self.sub.get_exploration_action(
            action_distribution=action_distribution, timestep=timestep, explore=explore
        )

    def begin_episodes(self, begins: NDArray[np.bool_], *, timestep: int, explore: bool) -> None:
        """Let `sub` prepare; runners call this only if it has something to prepare."""
        self.sub.begin_episodes(begins, timestep=timestep, explore=explore)

    def end_sample(self, rollout: Rollout, *, timestep: int, explore: bool) -> None:
        """Let `sub` look at the rollout."""
        self.sub.end_sample(rollout, timestep=timestep, explore=explore)

    def learn(self, rollouts: Sequence[Rollout], *, timestep: int) -> dict[str, float]:
        """Let `sub` learn."""
        return self.sub.learn(rollouts, timestep=timestep)

    def get_metrics(self, timestep: int) -> dict[str, float]:
        """Return the metrics of `sub`."""
        return self.sub.get_metrics(timestep)

    def get_weights(self) -> dict[str, NDArray[Any]]:
        """Return the weights of `sub`."""
        return self.sub.get_weights()

    def set_weights(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Pass the weights on to `sub`."""
        self.sub.set_weights(weights)

    def get_state(self) -> dict[str, Any]:
        """Return the state of `sub` under that name, if it has any."""
        state = self.sub.get_state()
        return {"sub": state} if state else {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Let `sub` continue from its state."""
        if "sub" in state:
            self.sub.set_state(state["sub"])


def overrides_method(exploration: Exploration, method: str) -> bool:
    """Return whether an exploration overrides a method, itself or by an exploration that it delegates to."""
    own = getattr(type(exploration), method)
    if isinstance(exploration, Delegating) and own is getattr(Delegating, method):
        return overrides_method(exploration.sub, method)
    return own is not getattr(Exploration, method)
