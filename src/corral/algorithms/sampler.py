"""What an algorithm exchanges with its runners: requests, rollouts and weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from corral.algorithms.config.validation import num_env_steps_per_round
from corral.data.episodes.lane_rollout import count_agent_steps
from corral.data.episodes.rollout import Rollout
from corral.errors import SampleError
from corral.exploration.base import overrides_method
from corral.runners.requests import SampleRequest

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm
    from corral.data.offline.recorder import Recorder
    from corral.runners.async_sampling import AsyncSampler
    from corral.runners.runner_group import EnvRunnerGroup


class Sampler:
    """Samples rollouts for training, in env steps, agent steps or episodes.

    Attributes:
        num_env_steps_per_round: Env steps that all runners sample in one round; `None` if the whole batch is one round.
        takes_tensors: Whether rollouts are of tensors.
        samples_now: Whether the latest training step sampled; False while an algorithm learns from recorded data alone.
        ahead: Sampler of runners that sample while the learners learn, with `sample_async=True`; otherwise `None`.
        recorder: Recorder of what is sampled; `None` if nothing is recorded.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        """Store the runners of an algorithm; nothing is asked for yet."""
        config = algorithm.config
        self._algorithm, self._group = algorithm, algorithm.env_runner_group
        self._reads_infos = algorithm.READS_INFOS or config.output_infos
        self._counts_agents = config.count_steps_by == "agent_steps" and config.is_multi_agent
        self.takes_tensors = self._group.gives_tensors and algorithm.can_take_tensors()
        self.samples_now = config.samples
        self.recorder: Recorder | None = None
        self._receivers: list[Callable[[Sequence[Rollout]], None]] = []  # what learns from all rollouts
        self.ahead: AsyncSampler | None = None
        if config.sample_async:
            from corral.runners.async_sampling import AsyncSampler

            self.count_dropped(0)
            self.ahead = AsyncSampler(self._group, config, self._count_in)
        self.plan_rounds()

    def plan_rounds(self) -> None:
        """Note how much one round samples by the config of now."""
        self.num_env_steps_per_round = num_env_steps_per_round(self._algorithm.config, self._group.num_envs)

    def resolve(self) -> None:
        """Note what learns from all rollouts, with the modules of now, in the order in which it sees them."""
        modules = self._algorithm.modules
        self._receivers = []
        if self.recorder is not None:
            self._receivers.append(self._record)  # before explorations change rewards
        if modules.get_transform_states():
            self._receivers.append(modules.merge_statistics)
        if modules.learning_explorations:
            self._receivers.append(modules.let_explorations_learn)

    def _record(self, rollouts: Sequence[Rollout]) -> None:
        assert self.recorder is not None
        with self._algorithm.timers.time("storage"):
            self.recorder.add(rollouts)

    # Asking.

    def sample(self, num_timesteps: int | None, num_episodes: int | None) -> list[Rollout]:
        """Return rollouts of so many steps or episodes; see `Algorithm.sample`."""
        algorithm = self._algorithm
        if self.ahead is not None:
            if num_timesteps is None or num_episodes is not None:
                raise SampleError("sample(num_episodes=...) asks all runners at once: leave out sample_async=True.")
            rollouts = algorithm.sample_ahead(num_timesteps)
            self.ahead.note_lag(rollouts, algorithm.learner_group.weights_version)
            return rollouts
        rollouts = []
        left, by_episode = num_timesteps, num_timesteps is None
        if left is None or num_episodes is not None:
            left = SampleRequest(num_timesteps=num_timesteps, num_episodes=num_episodes).num_wanted  # one of the two
        while left > 0:
            # A round at a time. A batch in agent steps may take several rounds, as the agents per env step are known
            # only afterwards.
            num_asked = self.num_env_steps_per_round or (
                self._env_steps_for(left, rollouts) if self._counts_agents else left
            )
            request = SampleRequest(
                num_timesteps=None if by_episode else num_asked,
                num_episodes=left if by_episode else None,
                timestep=algorithm.num_env_steps_sampled_lifetime,
                with_infos=self._reads_infos,
                takes_tensors=self.takes_tensors,
                training_iteration=algorithm.training_iteration,
            )
            arrived = self._group.sample(request, algorithm.timers)
            num_sampled = sum(rollout.num_env_steps for rollout in arrived)
            algorithm.num_env_steps_sampled_lifetime += num_sampled  # also if an exception ends the next round
            if by_episode:
                left -= sum(map(request.num_in, arrived))
            else:
                left -= count_agent_steps(arrived) if self._counts_agents else num_sampled
            rollouts += arrived
        for learn in self._receivers:
            learn(rollouts)
        return rollouts

    def sample_ahead(self, num_timesteps: int, *, wait: bool) -> list[Rollout]:
        """Return the fragments that arrived first, while runners sample the next ones; see `Algorithm.sample_ahead`."""
        if self.ahead is None:
            raise SampleError("sample_ahead: runners sample ahead only with env_runners(sample_async=True).")
        algorithm = self._algorithm
        num_env_steps = self._env_steps_for(num_timesteps, []) if self._counts_agents else num_timesteps
        num_runners = max(1, algorithm.config.num_env_runners)
        request = SampleRequest(
            num_timesteps=-(-(self.num_env_steps_per_round or num_env_steps) // num_runners),
            with_infos=self._reads_infos,
            training_iteration=algorithm.training_iteration,
        )
        num_updates = algorithm.learner_group.weights_version
        received = self.ahead.sample(num_timesteps, request, num_updates, timers=algorithm.timers, wait=wait)
        self.count_dropped(received.num_env_steps_dropped)
        algorithm.num_env_steps_sampled_lifetime += received.num_env_steps_dropped
        algorithm.receive(received.rollouts)
        return received.rollouts

    def _env_steps_for(self, num_agent_steps: int, rollouts: Sequence[Rollout]) -> int:
        """Return the env steps that take about so many agent steps, but not more, judging by rollouts so far."""
        agents_per_step = float(self._group.num_agents)  # before the first rollout: as if all of them act
        if steps := count_agent_steps(rollouts):
            agents_per_step = steps / sum(rollout.num_env_steps for rollout in rollouts)
        return max(1, int(num_agent_steps / agents_per_step))

    # Receiving and counting.

    def receive(self, rollouts: Sequence[Rollout]) -> None:
        """Count the env steps of rollouts, and let transforms and explorations learn from them."""
        self._algorithm.num_env_steps_sampled_lifetime += sum(rollout.num_env_steps for rollout in rollouts)
        for learn in self._receivers:
            learn(rollouts)

    def _count_in(self, rollout: Rollout) -> int:
        """Return how many of the wanted steps a rollout holds."""
        return count_agent_steps([rollout]) if self._counts_agents else rollout.num_env_steps

    def count_dropped(self, num_env_steps: int) -> None:
        """Count env steps that were sampled, and that nothing will be learned from."""
        metrics = self._algorithm.metrics
        metrics.log_reserved({("env_runners", "num_env_steps_dropped"): [num_env_steps]}, "sum")
        metrics.log_reserved({("env_runners", "num_env_steps_dropped_lifetime"): [num_env_steps]}, "lifetime_sum")


class Weights:
    """Gives runners the parts of the weights that they need to act, whenever their version changed.

    Attributes:
        providers: Functions that return the parts, by name; runners have a receiver for each part in
            `EnvRunner.weight_receivers`.
        num_exploration_versions: Times that explorations or transforms changed what runners need, although the learners
            took no step.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        """Provide the weights of the modules that learn, and of those that do not."""
        self._algorithm, self.num_exploration_versions = algorithm, 0
        self.providers: dict[str, Callable[[], Mapping[str, Any]]] = {
            "modules": algorithm.learner_group.learner_here.get_acting_weights
        }

    def resolve(self) -> None:
        """Note which further parts the modules of now have."""
        modules = self._algorithm.modules
        if any(overrides_method(each, "get_weights") for each in modules.explorations.values()):
            self.providers["exploration"] = modules.exploration_weights
        if modules.get_transform_states():
            self.providers["transforms"] = modules.transform_parts

    def sync(self, group: EnvRunnerGroup | None = None) -> int:
        """Give runners the parts from every provider, if the version or the set of parts changed; return the version.

        Args:
            group: The runners; `None` are those that train.
        """
        start, algorithm = time.perf_counter(), self._algorithm
        parts = {name: arrays for name, provide in self.providers.items() if (arrays := provide())}
        num_updates = algorithm.learner_group.weights_version
        version = num_updates + self.num_exploration_versions
        (group or algorithm.env_runner_group).sync_weights(parts, version)
        if group is None and algorithm.sampler.ahead is not None:
            algorithm.sampler.ahead.note_weights(version, num_updates)
        algorithm.timers.seconds["syncing"] += time.perf_counter() - start
        return version

    def send_anyway(self) -> None:
        """Send the weights in a new version, though the learners took no step."""
        self.num_exploration_versions += 1
        self._algorithm.sync_weights()

    # Weights that were changed by hand in the modules of `get_module`. Nothing is compared before somebody has asked
    # for a module.

    def take_changed(self) -> None:
        """Give all learners and runners the weights that were changed by hand."""
        if self._algorithm.learner_group.take_changes():
            self._algorithm.sync_weights()

    @contextmanager
    def taking_changes(self) -> Iterator[None]:
        """Take weights that were changed by hand before the block, in which updates change them."""
        self.take_changed()
        learners = self._algorithm.learner_group
        learners.forget_weights()
        try:
            yield
        finally:
            learners.note_weights()
