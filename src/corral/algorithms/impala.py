"""Importance-weighted actor-learner architecture (IMPALA; Espeholt et al. 2018, arXiv:1802.01561), in this file.

Runners sample all the time, with weights that are some updates old; the learners take one gradient step on each batch
of fragments that has arrived. V-trace corrects the value targets and the policy gradient for the age of the weights.
`docs/algorithms/impala.md` lists the metrics and the implementation details by number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corral.algorithms.algorithm import Algorithm
from corral.algorithms.config.config import AlgorithmConfig
from corral.algorithms.ppo import explained_variance, ppo_batch
from corral.core.returns import FloatColumn, vtrace
from corral.core.schedules import Schedule, schedule_value
from corral.core.sequences import find_sequence_starts
from corral.core.settings import Need, NonNegativeFloat, NonNegativeSchedule, PositiveFloat, PositiveInt, Probability
from corral.core.tree import map_tree
from corral.data.episodes.rollout import Rollout
from corral.errors import ConfigError, CorralError
from corral.learners.losses import Batch
from corral.learners.settings import UpdateSettings
from corral.modules.distributions import ActionDistribution
from corral.modules.memory import module_inputs
from corral.modules.module import Module

if TYPE_CHECKING:
    from corral.algorithms.config.setter_types import IMPALATrainingArgs
    from corral.learners.learner_group import PendingUpdate
    from corral.modules.spec import ModuleSpec


USES_CIRCULAR_BUFFER = Need("use_circular_buffer=True", attrgetter("use_circular_buffer"))
USES_QUEUE = Need(
    "sample_async=True and no circular buffer", lambda config: config.sample_async and not config.use_circular_buffer
)
# One runner in this process samples a batch when none is left.
HAS_RUNNERS = Need("env runners of the engine (num_env_runners)", attrgetter("num_env_runners"), is_refused=False)


@dataclass(kw_only=True)
class IMPALAConfig(AlgorithmConfig):
    """Settings of IMPALA; the settings below belong to `.training(...)`.

    Two runners sample asynchronously, see `sample_async`. The paper's optimizer is `optimizer="rmsprop"` with
    `optimizer_config={"alpha": 0.99, "eps": 0.1}`.

    Attributes:
        lambda_: Lambda of V-trace: 1 is the paper's n-step target, 0 looks one step ahead.
        vtrace_clip_rho_threshold: The largest importance weight of a temporal difference of the values. It decides of
            which policy the values are learned: with a large one of the present policy, with a small one of the policy
            that acted.
        vtrace_clip_c_threshold: The largest importance weight with which later differences are passed on to a step.
        vtrace_clip_pg_rho_threshold: The largest importance weight in the policy gradient.
        vf_loss_coeff: Weight of the value loss, half the mean squared error.
        entropy_coeff: Weight of the entropy bonus, or a schedule over env steps.
        broadcast_interval: Updates from one broadcast of the weights to the runners to the next; there is one more at
            the end of each iteration.
        learner_queue_size: Batches that wait for the learners at most; the runners pause while there are more.
        use_circular_buffer: Whether batches wait in a circular buffer instead (Luo et al. 2020, arXiv:1912.00167): a
            batch is learned from several times, in random order, and in a full buffer a new batch replaces the oldest
            one. The runners never pause.
        circular_buffer_num_batches: Batches in the circular buffer.
        circular_buffer_iterations_per_batch: Updates from each batch of the circular buffer at most.
    """

    DEFAULT_NUM_ENVS: ClassVar[int] = 5  # of which two runners sample one batch in fragments of 50 steps
    TAKES_CENTRAL_CRITIC: ClassVar[bool] = True
    LEARNS_SEQUENCES: ClassVar[bool] = True

    num_env_runners: int = 2
    rollout_fragment_length: int | Literal["auto"] = 50
    sample_async: bool = True
    min_sample_timesteps_per_iteration: int = 5000
    lr: Schedule = 5e-4
    train_batch_size_per_learner: int = 500
    grad_clip: float | dict[str, float] | None = 40.0
    lambda_: Probability = 1.0
    vtrace_clip_rho_threshold: PositiveFloat = 1.0
    vtrace_clip_c_threshold: PositiveFloat = 1.0
    vtrace_clip_pg_rho_threshold: PositiveFloat = 1.0
    vf_loss_coeff: NonNegativeFloat = 0.5
    entropy_coeff: NonNegativeSchedule = 0.01
    broadcast_interval: PositiveInt = 1
    learner_queue_size: Annotated[PositiveInt, USES_QUEUE, HAS_RUNNERS] = 3
    use_circular_buffer: bool = False
    circular_buffer_num_batches: Annotated[PositiveInt, USES_CIRCULAR_BUFFER, HAS_RUNNERS] = 8
    circular_buffer_iterations_per_batch: Annotated[PositiveInt, USES_CIRCULAR_BUFFER] = 2

    def training(self, **settings: Unpack[IMPALATrainingArgs]) -> Self:
        """Set how to learn, and return the config; see `TrainingSettings` and the settings above."""
        return super().training(**settings)

    @property
    def algo_class(self) -> type[Algorithm]:
        """`IMPALA`."""
        return IMPALA

    def check_settings(self) -> None:
        """Refuse contradictions of these settings; see `AlgorithmConfig.validate`."""
        if self.sample_async and self.max_lag is not None and self.max_lag < self.broadcast_interval - 1:
            raise ConfigError(
                f"max_lag={self.max_lag} drops all fragments, because broadcast_interval={self.broadcast_interval} "
                f"leaves the runners with weights that are up to {self.broadcast_interval - 1} updates old: give a "
                "larger max_lag or a smaller broadcast_interval."
            )

    @property
    def num_updates_per_batch(self) -> int:
        """Updates from each batch."""
        return self.circular_buffer_iterations_per_batch if self.use_circular_buffer else 1


@dataclass
class WaitingBatch:
    """Fragments that wait for the learners.

    Attributes:
        received: The fragments, as they were received.
        rollouts: The fragments of each module, as the module saw them.
        num_updates_left: Updates that may still be made from them.
        is_new: Whether no update was made from them.
    """

    received: Sequence[Rollout]
    rollouts: dict[str, list[Rollout]]
    num_updates_left: int
    is_new: bool = True


class IMPALA(Algorithm):
    """Importance-weighted actor-learner architecture."""

    METRICS: ClassVar[tuple[str, ...]] = (
        *("policy_loss", "vf_loss", "entropy", "mean_kl", "mean_ratio", "vf_explained_var", "curr_entropy_coeff"),
    )
    STATE: ClassVar[tuple[str, ...]] = (*Algorithm.STATE, "_draw_rng")

    config: IMPALAConfig

    def setup(self) -> None:
        """Begin with no batch, and no update under way."""
        assert self.config.seed is not None
        self._waiting: list[WaitingBatch] = []
        self._pending: tuple[PendingUpdate, Mapping[str, Batch]] | None = None
        self._draw_rng = np.random.default_rng([self.config.seed, 2])  # of its own, so that no other part draws alike
        self._num_updates_unsent = 0  # since the weights were sent to the runners

    def make_loss(self, config: Any) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
        """Return the loss with a config's constants."""
        return partial(impala_loss, vf_loss_coeff=config.vf_loss_coeff)

    # The training step: one update.

    def training_step(self) -> dict[str, dict[str, Any]]:
        """Receive the batches that have arrived, begin an update from one, and return the metrics.

        Learners of an engine learn while this process receives and prepares the next batch; the update before is then
        received here.
        """
        self._receive_batches()
        return self._update_once()

    def _receive_batches(self) -> None:
        """Let the batches wait that have arrived and that there is room for; wait for one only if there is none."""
        config, size = self.config, self.config.total_train_batch_size
        if config.sample_async:
            room = config.learner_queue_size - len(self._waiting)
            # Fast runners could fill the circular buffer forever, so it is filled once at most before the next update.
            for _ in range(config.circular_buffer_num_batches if config.use_circular_buffer else room):
                rollouts = self.sample_ahead(size, wait=False)
                if not rollouts:
                    break
                self._add_batch(rollouts)
        if not self._waiting:
            self.log_learner_results(self._receive_update())  # first, so that the runners get its weights
            self._add_batch(self.sample_ahead(size) if config.sample_async else self.sample(size))

    def _add_batch(self, received: Sequence[Rollout]) -> None:
        with self.timers.time("returns"):
            grouped = self.group_trained(received)
            seen = {module_id: [part.transformed() for part in parts] for module_id, parts in grouped.items()}
        if not seen:
            return
        config = self.config
        while config.use_circular_buffer and len(self._waiting) >= config.circular_buffer_num_batches:
            self._count_unused(self._waiting.pop(0))
        self._waiting.append(WaitingBatch(received, seen, config.num_updates_per_batch))

    def _count_unused(self, batch: WaitingBatch) -> None:
        """Count the steps of a batch that is dropped, if nothing was learned from it."""
        if batch.is_new:
            self.sampler.count_dropped(sum(rollout.num_env_steps for rollout in batch.received))

    def _draw_batch(self) -> dict[str, list[Rollout]]:
        """Return the fragments for the next update: of the oldest batch, or of one of the circular buffer.

        Batches that have become too old are dropped; if none is left, nothing is returned.
        """
        sampler, num_updates = self.sampler.ahead, self.learner_group.weights_version + (self._pending is not None)
        while self._waiting:
            index = int(self._draw_rng.integers(len(self._waiting))) if self.config.use_circular_buffer else 0
            drawn = self._waiting[index]
            if sampler is not None:
                if any(sampler.is_too_old(rollout, num_updates) for rollout in drawn.received):
                    self._count_unused(self._waiting.pop(index))  # it has become too old while it waited
                    continue
                sampler.note_lag(drawn.received, num_updates)
            drawn.num_updates_left -= 1
            drawn.is_new = False
            if not drawn.num_updates_left:
                del self._waiting[index]
            return drawn.rollouts
        return {}

    def _update_once(self) -> dict[str, dict[str, Any]]:
        """Begin an update, and return the results of the one before, or of this one if the learner answers at once."""
        batches: dict[str, Batch] = {}
        if self._waiting:
            with self.timers.time("returns"):
                drawn = self._draw_batch()
                batches = {module_id: self.make_batch(module_id, parts) for module_id, parts in drawn.items()}
        with self.timers.time("learning"):
            results = self._receive_update()
            if not batches:
                return results
            settings = {module_id: self.update_settings(module_id) for module_id in batches}
            self._pending = self.learner_group.update_async(batches, settings), batches
            if not results and self._pending[0].done():
                results = self._receive_update()
        return results

    def _receive_update(self) -> dict[str, dict[str, Any]]:
        """Wait for the update that is under way, send the weights if that is due, and return the results."""
        if self._pending is None:
            return {}
        (update, batches), self._pending = self._pending, None
        results = update.result()
        for module_id, metrics in results.items():
            batch = batches[module_id]
            metrics["vf_explained_var"] = explained_variance(batch["values"], batch["value_targets"])
            self.after_update(module_id, metrics)
        self._num_updates_unsent += 1
        if self._num_updates_unsent >= self.config.broadcast_interval:
            self._broadcast()
        return results

    def _broadcast(self) -> None:
        self._num_updates_unsent = 0
        self.sync_weights()

    def _repeat_training_step(self, start: float) -> None:
        """Train, and end the iteration without batches that wait, an update under way, or weights to send.

        So a checkpoint holds all that the next iteration begins with, except what runners of an engine have sampled.
        """
        super()._repeat_training_step(start)
        while self._waiting or self._pending:
            self.log_learner_results(self._update_once())
        if self._num_updates_unsent:
            self._broadcast()

    def get_state(self) -> dict[str, Any]:
        """Return a copy of the state; see `Algorithm.get_state`. An update that is under way is received first."""
        self._end_update()
        return super().get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; see `Algorithm.set_state`. Batches that an interrupted iteration left are dropped."""
        self._end_update()
        super().set_state(state)
        self._waiting.clear()
        self._num_updates_unsent = 0

    def _use_modules(self, config: AlgorithmConfig, specs: Mapping[str, ModuleSpec]) -> None:
        """Use other modules; see `Algorithm._use_modules`.

        An update under way is received first; those that learn keep their batches of an interrupted iteration.
        """
        self._end_update()
        super()._use_modules(config, specs)
        for batch in self._waiting:
            learning = [name for name in batch.rollouts if name in self.modules and self.modules.trains(name)]
            batch.rollouts = {name: batch.rollouts[name] for name in learning}

    def load_module_weights(self, path: str | Path, module_id: str, from_module_id: str | None = None) -> None:
        """Load the weights of one module; see `Algorithm.load_module_weights`.

        An update under way is received first.
        """
        self._end_update()
        super().load_module_weights(path, module_id, from_module_id)

    def _end_update(self) -> None:
        """Receive the update that is under way, if the learners are still there."""
        with suppress(CorralError):  # it was raised in training, or will be
            self.log_learner_results(self._receive_update())

    # Pieces of an update.

    def make_batch(self, module_id: str, rollouts: Sequence[Rollout]) -> Batch:
        """Return the batch of a module, with the advantages of V-trace by the weights of now; see `ppo_batch`."""
        if self.config.critic_sees is not None:
            self.learner_group.add_critic_states(module_id, rollouts)
        return ppo_batch(
            rollouts,
            partial(self.learner_group.values, module_id),
            partial(self.advantages, module_id),
            normalize_advantages=False,
            max_seq_len=self.learner_group.get_module(module_id).max_seq_len,
            for_user_code=self.modules[module_id].shows_batches,
        )

    def advantages(
        self, module_id: str, rollout: Rollout, values: FloatColumn, next_values: FloatColumn
    ) -> tuple[FloatColumn, FloatColumn]:
        """Return the advantages and the value targets of a rollout, float32 `[T, N]` each; see `vtrace`.

        Args:
            module_id: Id of the module.
            rollout: Columns `[T, N, ...]` of the module.
            values: Values of the observations, float32 `[T, N]`.
            next_values: Values of the observations that the steps led to, float32 `[T, N]`.
        """
        config, module = self.module_config(module_id), self.learner_group.get_module(module_id)
        return vtrace(
            action_ratios(module.distribution, self.target_outputs(module_id, rollout), rollout),
            rollout.rewards,
            values,
            next_values,
            rollout.terminated,
            rollout.truncated,
            rollout.valid,
            gamma=config.gamma,
            lambda_=config.lambda_,
            clip_rho=config.vtrace_clip_rho_threshold,
            clip_c=config.vtrace_clip_c_threshold,
            clip_pg_rho=config.vtrace_clip_pg_rho_threshold,
        )

    def target_outputs(self, module_id: str, rollout: Rollout) -> NDArray[np.float32]:
        """Return the outputs `[T, N, D]` of the policy for whose returns V-trace estimates the values."""
        max_seq_len = self.learner_group.get_module(module_id).max_seq_len
        return policy_outputs(rollout, partial(self.learner_group.dist_inputs, module_id), max_seq_len)

    def coefficients(self, module_id: str) -> dict[str, float]:
        """Return the numbers that the loss of a module is given."""
        config = self.module_config(module_id)
        return {"entropy_coeff": schedule_value(config.entropy_coeff, self.num_env_steps_sampled_lifetime)}

    def update_settings(self, module_id: str) -> UpdateSettings:
        """Return how a module learns from its next batch."""
        config, steps = self.module_config(module_id), self.num_env_steps_sampled_lifetime
        return UpdateSettings.from_config(
            config, lr=schedule_value(config.lr, steps), coefficients=self.coefficients(module_id), timestep=steps
        )

    def after_update(self, module_id: str, metrics: dict[str, Any]) -> None:
        """Add to the results of a module after each update."""
        metrics |= {f"curr_{name}": value for name, value in self.coefficients(module_id).items()}


def policy_outputs(
    rollout: Rollout, outputs_fn: Callable[[Batch], NDArray[np.float32]], max_seq_len: int
) -> NDArray[np.float32]:
    """Return what a policy outputs for the observations of a rollout, float32 `[T, N, D]`, zeros where not valid.

    Args:
        rollout: Columns `[T, N, ...]`, as the module saw them.
        outputs_fn: Maps a batch to outputs `[B, D]`. It has the columns `obs`, and for a module with memory `states`,
            `sequence_starts` and `unit_starts`, and `critic_obs` if it has a central critic.
        max_seq_len: Longest sequence of a module with memory, in steps.
    """
    columns: dict[str, Any] = {"obs": map_tree(lambda column: column[:-1], rollout.obs)}
    if has_memory := "states" in rollout:
        seen = {name: rollout[name] for name in ("states", "critic_obs") if name in rollout}
        columns |= map_tree(lambda column: column[:-1], seen)
        starts = find_sequence_starts(rollout.valid, rollout.done, max_seq_len)
        columns |= {"sequence_starts": starts, "unit_starts": starts}
    outputs = outputs_fn(rollout.valid_rows(columns, by_lane=has_memory))
    column = np.zeros((*rollout.valid.shape, outputs.shape[-1]), np.float32)
    if has_memory:
        column.swapaxes(0, 1)[rollout.valid.T] = outputs
    else:
        column[rollout.valid] = outputs
    return column


def action_ratios(
    distribution: ActionDistribution, dist_inputs: NDArray[np.float32], rollout: Rollout
) -> NDArray[np.float32]:
    """Return how many times likelier a policy takes the actions of a rollout than the policy that took them.

    Args:
        distribution: Action distribution of the module.
        dist_inputs: Outputs of the policy, float32 `[T, N, D]`.
        rollout: Columns `[T, N, ...]`.

    Returns:
        Ratios of probabilities, float32 `[T, N]`, 1 where not valid.
    """
    ratios, valid = np.ones(rollout.valid.shape, np.float32), rollout.valid
    actions = torch.from_numpy(rollout.actions[valid])
    logp = distribution.logp(torch.from_numpy(dist_inputs[valid]), actions).numpy()
    ratios[valid] = np.exp(logp - rollout.logp[valid])
    return ratios


def impala_loss(
    module: Module,
    batch: Batch,
    coefficients: Mapping[str, float],
    *,
    vf_loss_coeff: float,
    outputs: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a minibatch; a pure function of weights and columns.

    - Policy gradient: section 4.2 of the paper; the advantages hold the clipped importance weights.
    - Value loss: half the squared error to the targets of V-trace, as in the paper's code.
    - Entropy bonus: section 5 of the paper.

    Args:
        module: Module with a policy and values.
        batch: Columns `[B, ...]` as `ppo_batch` returns them, as tensors.
        coefficients: `entropy_coeff`.
        vf_loss_coeff: Weight of the value loss.
        outputs: Receives `dist_inputs`, `[B, D]`, and `values` and `logp`, `[B]`.

    Returns:
        The scalar to minimise, and scalars to report. `mean_kl` estimates the divergence from the policy that acted, as
        the loss of PPO does; `mean_ratio` is the mean importance weight.
    """
    distribution = module.distribution
    dist_inputs, values = module.policy_and_value(*module_inputs(batch))
    logp = distribution.logp(dist_inputs, batch["actions"])
    if outputs is not None:
        outputs |= {"dist_inputs": dist_inputs, "values": values, "logp": logp}
    policy_loss = -(logp * batch["advantages"]).mean()
    vf_loss = 0.5 * (values - batch["value_targets"]).square().mean()
    loss, entropy_coeff = policy_loss + vf_loss_coeff * vf_loss, coefficients["entropy_coeff"]
    entropy = distribution.entropy(dist_inputs if entropy_coeff else dist_inputs.detach()).mean()
    if entropy_coeff:
        loss = loss - entropy_coeff * entropy
    with torch.no_grad():
        log_ratio = logp - batch["logp"]
        ratio = log_ratio.exp()
    scalars = {
        "policy_loss": policy_loss,
        "vf_loss": vf_loss,
        "entropy": entropy,
        "mean_kl": (ratio - 1 - log_ratio).mean(),
        "mean_ratio": ratio.mean(),
    }
    return loss, {name: value.detach() for name, value in scalars.items()}
