"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347), complete in this file.

An iteration samples a batch with the current policy, estimates advantages, and takes several epochs of minibatch
steps on a clipped objective. `docs/algorithms/ppo.md` lists the metrics and the implementation details by number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from corral.algorithms.algorithm import Algorithm
from corral.algorithms.config.config import AlgorithmConfig
from corral.core.returns import FloatColumn, gae
from corral.core.schedules import Schedule, schedule_value
from corral.core.sequences import find_sequence_starts
from corral.core.settings import AtLeastOne, Need, NonNegativeFloat, NonNegativeSchedule, PositiveFloat, Probability
from corral.core.tree import concatenate, map_tree
from corral.data.episodes.rollout import Rollout, level_added_columns
from corral.errors import ConfigError, LossError
from corral.learners.losses import Batch
from corral.learners.settings import UpdateSettings
from corral.modules.memory import module_inputs
from corral.modules.module import Module
from corral.modules.value_scale import has_value_scale, update_value_scale

if TYPE_CHECKING:
    from corral.algorithms.config.setter_types import PPOTrainingArgs

# How far above `target_kl` the divergence ends the epochs of an iteration, as in Stable-Baselines3.
KL_STOP = 1.5


HAS_KL_TARGET = Need("kl_target", lambda config: config.kl_target is not None)
LEARNS_VALUES = Need("vf_loss_coeff above 0", attrgetter("vf_loss_coeff"))


@dataclass(kw_only=True)
class PPOConfig(AlgorithmConfig):
    """Settings of PPO; the settings below belong to `.training(...)`.

    Attributes:
        lambda_: Lambda of generalized advantage estimation (GAE).
        clip_param: Epsilon of the clipped surrogate objective: how far the probability ratio may move from 1, or a
            schedule over env steps.
        vf_clip_param: How far a value may move from its old value before its loss is clipped; `None` does not clip.
        vf_loss_clip: Largest squared error that a value contributes to the value loss; a value with a larger error gets
            no gradient. `None` has no limit.
        vf_loss_coeff: Weight of the value loss.
        entropy_coeff: Weight of the entropy bonus, or a schedule over env steps.
        kl_coeff: Weight of the KL penalty, or a schedule over env steps; 0 leaves the penalty out.
        kl_target: KL divergence in nats to which the coefficient adapts after each iteration, starting from `kl_coeff`.
            With `None` the coefficient follows its schedule.
        kl_band: How many times above or below `kl_target` the divergence may be before the coefficient changes.
        kl_factors: What the coefficient is multiplied by above and below this band.
        normalize_values: Whether the value function learns in units of the deviation of recent value targets (Pop-Art,
            van Hasselt et al. 2016, arXiv:1602.07714), as MAPPO does. The value loss, `vf_clip_param` and
            `vf_loss_clip` are then in these units.
        normalize_advantages: Whether the advantages of a batch are scaled to mean 0 and standard deviation 1.
        target_kl: Limit of the divergence in nats: no further epoch of an iteration starts once the mean divergence of
            an epoch exceeds 1.5 times this limit; `None` takes all `num_epochs`. It adapts no coefficient.
    """

    DEFAULT_NUM_ENVS: ClassVar[int] = 16
    TAKES_CENTRAL_CRITIC: ClassVar[bool] = True
    LEARNS_SEQUENCES: ClassVar[bool] = True

    lr: Schedule = 3e-4
    train_batch_size_per_learner: int = 2048
    minibatch_size: int | None = 64
    num_epochs: int = 10
    grad_clip: float | dict[str, float] | None = 0.5
    lambda_: Probability = 0.95
    clip_param: NonNegativeSchedule = 0.2
    vf_clip_param: Annotated[PositiveFloat | None, LEARNS_VALUES] = None
    vf_loss_clip: Annotated[PositiveFloat | None, LEARNS_VALUES] = None
    vf_loss_coeff: NonNegativeFloat = 0.5
    entropy_coeff: NonNegativeSchedule = 0.0
    kl_coeff: NonNegativeSchedule = 0.0
    kl_target: PositiveFloat | None = None
    kl_band: Annotated[AtLeastOne, HAS_KL_TARGET] = 1.5
    kl_factors: Annotated[tuple[PositiveFloat, PositiveFloat], HAS_KL_TARGET] = (2.0, 0.5)
    normalize_values: Annotated[bool, LEARNS_VALUES] = False
    normalize_advantages: bool = True
    target_kl: Annotated[PositiveFloat | None, Need("num_epochs above 1", lambda config: config.num_epochs > 1)] = None

    def training(self, **settings: Unpack[PPOTrainingArgs]) -> Self:
        """Set how to learn, and return the config; see `TrainingSettings` and the settings above."""
        return super().training(**settings)

    @property
    def algo_class(self) -> type[Algorithm]:
        """`PPO`."""
        return PPO

    @property
    def module_settings(self) -> dict[str, Any]:
        """The scale of values, if there is one."""
        return {**super().module_settings, **({"normalize_values": True} if self.normalize_values else {})}

    def check_settings(self) -> None:
        """Refuse contradictions of these settings; see `AlgorithmConfig.validate`."""
        if self.clip_param == 0 or (
            isinstance(self.clip_param, list) and not any(value for _, value in self.clip_param)
        ):
            raise ConfigError(
                f"clip_param={self.clip_param} keeps the policy from changing: give a positive number, such as 0.2."
            )
        if self.kl_target is not None and (not isinstance(self.kl_coeff, (int, float)) or self.kl_coeff == 0):
            raise ConfigError(
                f"kl_target={self.kl_target} adapts a coefficient that starts at kl_coeff={self.kl_coeff}: give "
                "kl_coeff one positive number, such as 0.2, or leave kl_target out."
            )


class PPO(Algorithm):
    """Proximal policy optimisation."""

    METRICS = (
        *("policy_loss", "vf_loss", "entropy", "mean_kl", "clip_fraction", "vf_explained_var"),
        *("curr_kl_coeff", "curr_entropy_coeff", "curr_clip_param"),
    )
    STATE = (*Algorithm.STATE, "_kl_coeff")
    OF_MODULES = ("_kl_coeff",)
    FIXED_SETTINGS = Algorithm.FIXED_SETTINGS | {"normalize_values"}
    ADAPTED: ClassVar[Mapping[str, str]] = {"kl_coeff": "_kl_coeff"}
    LEARNS_TENSORS = True

    config: PPOConfig

    def setup(self) -> None:
        """Start with no adaptive KL coefficient: each module starts at its initial value when it first learns."""
        self._kl_coeff: dict[str, float] = {}
        for module_id, record in self.modules.items():
            if record.config.normalize_values and record.has_weights and not has_value_scale(record.module):
                raise ConfigError(
                    f"normalize_values=True is for the default module, and module {module_id!r} is a "
                    f"{type(record.module).__name__} or has another architecture: leave it out."
                )
        shared = [path for path in self.config.shared_layers if path.split(".")[0] in ("value_head", "value_scale")]
        if shared and any(record.config.normalize_values for record in self.modules.values()):
            raise ConfigError(
                f"normalize_values=True gives each module a scale of its own: leave it out, or {shared[0]!r} out of "
                "shared_layers."
            )

    def make_loss(self, config: PPOConfig) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
        """Return the loss with a config's constants."""
        return partial(
            ppo_loss,
            vf_clip_param=config.vf_clip_param,
            vf_loss_clip=config.vf_loss_clip,
            vf_loss_coeff=config.vf_loss_coeff,
        )

    def training_step(self) -> dict[str, dict[str, float]]:
        """Sample a batch, estimate advantages, take the gradient steps, send the weights, and return the metrics."""
        # On-policy: the batch comes from the weights of now, and is thrown away after this iteration.
        rollouts = self.group_trained(self.sample(self.config.total_train_batch_size))
        # Values of the old weights: advantages and value targets stay the same in all epochs.
        with self.timers.time("returns"):
            batches = {module_id: self._batch(module_id, parts) for module_id, parts in rollouts.items()}
        for module_id, batch in batches.items():
            if self.module_config(module_id).normalize_values:
                targets = batch["value_targets"]
                targets = targets.double() if isinstance(targets, Tensor) else targets.astype(np.float64)
                moments = float(targets.mean()), float((targets * targets).mean())
                self.learner_group.foreach_module(module_id, update_value_scale, *moments)
        # Schedules are read once, so that all minibatches of an iteration have the same coefficients.
        coefficients = {module_id: self._coefficients(module_id) for module_id in batches}
        with self.timers.time("learning"):
            settings = {module_id: self._settings(module_id, numbers) for module_id, numbers in coefficients.items()}
            results = self.update_modules(batches, settings)
        self.sync_weights()
        # What is measured over the whole batch is computed here, because a loss sees one minibatch.
        for module_id, metrics in results.items():
            config, batch = self.module_config(module_id), batches[module_id]
            metrics["vf_explained_var"] = explained_variance(batch["values"], batch["value_targets"])
            metrics |= {f"curr_{name}": value for name, value in coefficients[module_id].items()}
            # The coefficient of the next iteration follows from how far the policy moved in this one.
            if config.kl_target is not None:
                metrics["final_kl"] = kl = self._divergence(module_id, batch)
                self._kl_coeff[module_id] = adapted_kl_coeff(
                    metrics["curr_kl_coeff"], kl, config.kl_target, config.kl_band, config.kl_factors
                )
        return results

    def _batch(self, module_id: str, rollouts: Sequence[Rollout]) -> Batch:
        config = self.module_config(module_id)
        if self.config.critic_sees is not None:
            self.learner_group.add_critic_states(module_id, rollouts)
        return ppo_batch(
            rollouts,
            partial(self.learner_group.values, module_id),
            partial(self.advantages, config=config),
            normalize_advantages=config.normalize_advantages,
            max_seq_len=self.modules[module_id].module.max_seq_len,
            for_user_code=self.modules[module_id].shows_batches,
        )

    def update_modules(
        self, batches: Mapping[str, Batch], settings: Mapping[str, UpdateSettings]
    ) -> dict[str, dict[str, Any]]:
        """Take the gradient steps of an iteration, by module id, and return the results; override it to add a phase."""
        return self.learner_group.update(batches, settings)

    def advantages(
        self, rollout: Rollout, values: FloatColumn, next_values: FloatColumn, *, config: PPOConfig | None = None
    ) -> tuple[FloatColumn, FloatColumn]:
        """Return the advantages and the value targets of a rollout, float32 `[T, N]` each; see `gae`.

        Override it to estimate them in another way.

        Args:
            rollout: Columns `[T, N, ...]` of one module.
            values: Values of the observations, float32 `[T, N]`.
            next_values: Values of the observations that the steps led to, float32 `[T, N]`.
            config: Config of the module; `None` is the algorithm's.
        """
        config = self.config if config is None else config
        ended = rollout.terminated, rollout.truncated
        return gae(
            rollout.rewards, values, next_values, *ended, rollout.valid, gamma=config.gamma, lambda_=config.lambda_
        )

    def _coefficients(self, module_id: str) -> dict[str, float]:
        config, steps = self.module_config(module_id), self.num_env_steps_sampled_lifetime
        kl_coeff = schedule_value(config.kl_coeff, steps)
        if config.kl_target is not None:
            kl_coeff = self._kl_coeff.get(module_id, kl_coeff)
        return {
            "kl_coeff": kl_coeff,
            "entropy_coeff": schedule_value(config.entropy_coeff, steps),
            "clip_param": schedule_value(config.clip_param, steps),
        }

    def _settings(self, module_id: str, coefficients: Mapping[str, float]) -> UpdateSettings:
        config = self.module_config(module_id)
        return UpdateSettings.from_config(
            config,
            lr=schedule_value(config.lr, self.num_env_steps_sampled_lifetime),
            coefficients=coefficients,
            timestep=self.num_env_steps_sampled_lifetime,
            stop=None if config.target_kl is None else KLStop(KL_STOP * config.target_kl),
        )

    def _divergence(self, module_id: str, batch: Batch) -> float:
        """Return the mean KL divergence from the policy that sampled a batch to the policy of now, in nats."""
        now = self.learner_group.dist_inputs(module_id, batch)
        distribution = self.learner_group.get_module(module_id).distribution
        before = torch.as_tensor(batch["dist_inputs"])
        return float(distribution.kl(before, torch.as_tensor(now).to(before.device)).mean())


@dataclass(frozen=True)
class KLStop:
    """Ends the epochs of an update once the policy has moved too far; see `UpdateSettings.stop`.

    Attributes:
        largest: The largest mean divergence of an epoch, in nats, after which another epoch starts.
    """

    largest: float

    def __call__(self, scalars: Mapping[str, float]) -> bool:
        """Return whether the epoch's mean divergence was larger.

        Raises:
            LossError: The loss did not report it.
        """
        if "mean_kl" not in scalars:
            raise LossError(
                "target_kl ends the epochs by 'mean_kl', which the loss did not report: return (loss, {**reported, "
                "...}) with what default_loss reports, or leave target_kl out."
            )
        return scalars["mean_kl"] > self.largest


def ppo_batch(
    rollouts: Sequence[Rollout],
    value_fn: Callable[..., NDArray[np.float32]],
    advantages_fn: Callable[[Rollout, FloatColumn, FloatColumn], tuple[FloatColumn, FloatColumn]],
    *,
    normalize_advantages: bool,
    max_seq_len: int = 1,
    for_user_code: bool = False,
) -> Batch:
    """Return one batch of the valid steps of rollouts.

    Args:
        rollouts: Columns `[T, N, ...]` from each runner.
        value_fn: Maps observations `[B, ...]`, and states `[B, ...]` if the module has memory, to values `[B]`.
        advantages_fn: Maps a rollout, its values and its next values to advantages and value targets, `[T, N]` each;
            see `PPO.advantages`.
        normalize_advantages: Whether advantages get mean 0 and deviation 1 over the batch.
        max_seq_len: Longest sequence of a module with memory, in steps.
        for_user_code: Whether the batch has the columns that only losses, learners and callbacks of users read.

    Returns:
        Columns `[B, ...]`: `obs`, `actions`, `logp`, `dist_inputs`, `values`, `advantages`, `value_targets`,
        `critic_obs` if there is a central critic, and the columns that user code added to a rollout; for user code also
        `rewards`, `terminated` and `truncated`. For a module with memory also `states`, and `sequence_starts` and
        `unit_starts`, bool: the rows of a sequence are adjacent, and stay together in minibatches.
    """
    parts = []
    # Callbacks may have added columns to some rollouts only; a batch needs the same columns from all.
    level_added_columns(rollouts)
    for rollout in (rollout.transformed() for rollout in rollouts):
        # Next values are of the observations that the steps led to, so a truncated step has the value of its final
        # observation and not the value of the next episode's first one.
        values, next_values = rollout.compute_values(value_fn)
        advantages, value_targets = advantages_fn(rollout, values, next_values)
        columns = rollout.with_added(
            {
                "obs": map_tree(lambda column: column[:-1], rollout.obs),
                "actions": rollout.actions,
                "logp": rollout.logp,
                "dist_inputs": rollout.dist_inputs,
                "values": values,
                "advantages": advantages,
                "value_targets": value_targets,
            }
        )
        if for_user_code:
            columns |= {name: rollout.columns[name] for name in ("rewards", "terminated", "truncated")}
        if "critic_obs" in rollout:
            columns["critic_obs"] = map_tree(lambda column: column[:-1], rollout["critic_obs"])
        # A module with memory is unrolled again from the state in which each sequence began.
        if has_memory := "states" in rollout:
            columns["states"] = map_tree(lambda column: column[:-1], rollout.states)
            starts = find_sequence_starts(rollout.valid, rollout.done, max_seq_len)
            columns |= {"sequence_starts": starts, "unit_starts": starts}
        # Rows that only reset a sub-env are left out. Rows of a lane stay together only where sequences need it.
        parts.append(rollout.valid_rows(columns, by_lane=has_memory))
    batch: Batch = parts[0] if len(parts) == 1 else map_tree(concatenate, *parts)
    # Over the batch and not over each minibatch: otherwise the sign of an advantage depends on the shuffling.
    if normalize_advantages:
        advantages = batch["advantages"]
        deviation = advantages.std(correction=0) if isinstance(advantages, Tensor) else advantages.std()
        batch["advantages"] = (advantages - advantages.mean()) / (deviation + 1e-8)
    return batch


def ppo_loss(
    module: Module,
    batch: Batch,
    coefficients: Mapping[str, float],
    *,
    vf_clip_param: float | None,
    vf_loss_coeff: float,
    vf_loss_clip: float | None = None,
    outputs: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a minibatch; a pure function of weights and columns.

    - Clipped surrogate: eq. 7 of the paper.
    - Value loss: the squared error to the value targets, without a factor of one half; with `vf_clip_param`, the larger
      of this error and the error of the value held within `vf_clip_param` of the old value (OpenAI Baselines' ppo2;
      studied in Engstrom et al. 2020, arXiv:2005.12729). With `vf_loss_clip` no value contributes more than this.
    - Entropy bonus: eq. 9 of the paper.
    - KL penalty: eq. 8 of the paper, exact, from the old policy's outputs. Without the penalty the reported divergence
      is the estimate E[(r - 1) - log r] (Schulman 2020, http://joschu.net/blog/kl-approx.html).

    Args:
        module: Module with a policy and values.
        batch: Columns `[B, ...]` as `ppo_batch` returns them, as tensors.
        coefficients: `kl_coeff`, `entropy_coeff`, and `clip_param`, the epsilon of the surrogate.
        vf_clip_param: Range of the value clipping, or `None`.
        vf_loss_coeff: Weight of the value loss.
        vf_loss_clip: Largest squared error of a value, or `None`.
        outputs: Receives `dist_inputs`, `[B, D]`, and `values`, `ratio` and `logp`, `[B]`.

    Returns:
        The scalar to minimise, and scalars to report.
    """
    # The ratio of the probabilities of the sampled actions, now and when they were sampled.
    distribution = module.distribution
    dist_inputs, values = module.policy_and_value(*module_inputs(batch))
    logp = distribution.logp(dist_inputs, batch["actions"])
    log_ratio = logp - batch["logp"]
    ratio = log_ratio.exp()
    if outputs is not None:
        outputs |= {"dist_inputs": dist_inputs, "values": values, "logp": logp, "ratio": ratio}
    # The smaller of both objectives: a ratio outside the range gains nothing, but may still lose.
    advantages, clip_param = batch["advantages"], coefficients["clip_param"]
    clipped_ratio = ratio.clamp(1 - clip_param, 1 + clip_param)
    policy_loss = -torch.min(ratio * advantages, clipped_ratio * advantages).mean()

    value_targets = batch["value_targets"]
    vf_errors = functional.mse_loss(values, value_targets, reduction="none")
    scale = getattr(module, "value_scale", None)  # values, errors and limits are in units of its deviation
    deviation = 1.0 if scale is None else scale.variance.sqrt().float()
    if vf_clip_param is not None:
        reach = vf_clip_param * deviation
        near = batch["values"] + (values - batch["values"]).clamp(-reach, reach)
        vf_errors = torch.max(vf_errors, (near - value_targets).square())
    if scale is not None:
        vf_errors = vf_errors / deviation**2
    vf_loss = (vf_errors if vf_loss_clip is None else vf_errors.clamp(max=vf_loss_clip)).mean()

    # A bonus or penalty with coefficient 0 is reported only, and costs no backward pass.
    loss = policy_loss + vf_loss_coeff * vf_loss
    entropy_coeff, kl_coeff = coefficients["entropy_coeff"], coefficients["kl_coeff"]
    entropy = distribution.entropy(dist_inputs if entropy_coeff else dist_inputs.detach()).mean()
    if entropy_coeff:
        loss = loss - entropy_coeff * entropy
    if kl_coeff:
        kl = distribution.kl(batch["dist_inputs"], dist_inputs).mean()
        loss = loss + kl_coeff * kl
    with torch.no_grad():
        if not kl_coeff:
            kl = (ratio - 1 - log_ratio).mean()
        clip_fraction = (clipped_ratio != ratio).float().mean()
    scalars = {
        "policy_loss": policy_loss,
        "vf_loss": vf_loss,
        "entropy": entropy,
        "mean_kl": kl,
        "clip_fraction": clip_fraction,
    }
    if vf_loss_clip is not None:
        scalars["vf_loss_unclipped"] = vf_errors.mean()
    return loss, {name: value.detach() for name, value in scalars.items()}


def adapted_kl_coeff(
    kl_coeff: float, kl: float, kl_target: float, band: float = 1.5, factors: tuple[float, float] = (2.0, 0.5)
) -> float:
    """Return the next KL coefficient (section 4 of the paper).

    Args:
        kl_coeff: The coefficient.
        kl: Measured divergence.
        kl_target: Divergence to reach.
        band: How many times above or below the target the divergence may be before the coefficient changes.
        factors: What the coefficient is multiplied by above and below this band.
    """
    if kl > kl_target * band:
        return kl_coeff * factors[0]
    if kl < kl_target / band:
        return kl_coeff * factors[1]
    return kl_coeff


def explained_variance(values: Any, value_targets: Any) -> float:
    """Return 1 - Var[targets - values] / Var[targets]: 1 is perfect, 0 is a constant, NaN is undefined."""
    if isinstance(values, Tensor):
        left, whole = torch.stack([value_targets - values, value_targets]).var(1, correction=0).tolist()
        return float("nan") if whole == 0 else 1 - left / whole
    variance = float(np.var(value_targets))
    return float("nan") if variance == 0 else 1 - float(np.var(value_targets - values)) / variance
