"""Monotonic advantage re-weighted imitation learning (Wang et al. 2018, https://papers.nips.cc/paper/7866).

The policy imitates recorded actions the more, the better their returns were than the value of their states.
`docs/algorithms/marwil.md` lists the metrics and the implementation details by number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

import torch
from torch import Tensor

from corral.algorithms.algorithm import Algorithm
from corral.algorithms.offline import OfflineAlgorithm, OfflineConfig
from corral.algorithms.recorded_episodes import evaluate_loss
from corral.core.schedules import Schedule
from corral.core.settings import NonNegativeFloat, PositiveFloat, Probability
from corral.data.episodes.rollout import Rollout
from corral.data.offline.data import returns_to_go
from corral.data.replay import ReplayBuffer
from corral.learners.losses import Batch, Loss, learner_metrics
from corral.modules.module import Module

if TYPE_CHECKING:
    from corral.algorithms.config.setter_types import MARWILTrainingArgs


@dataclass(kw_only=True)
class MARWILConfig(OfflineConfig):
    """Settings of MARWIL; the settings below and in `OfflineConfig` belong to `.training(...)`.

    Attributes:
        beta: Weight of the advantages in the exponent: how much more good actions are imitated than bad ones. With 0
            all actions count the same, as in behaviour cloning.
        vf_coeff: Weight of the value loss.
        max_advantage_weight: Largest weight of an action.
        moving_average_sqd_adv_norm_start: Initial value of the mean squared advantage, by whose root advantages are
            divided; `None` is the mean of the first batch.
        moving_average_sqd_adv_norm_update_rate: Fraction by which each batch moves this mean towards its own.
    """

    lr: Schedule = 1e-3
    beta: NonNegativeFloat = 1.0
    vf_coeff: NonNegativeFloat = 1.0
    max_advantage_weight: PositiveFloat = 20.0
    moving_average_sqd_adv_norm_start: PositiveFloat | None = None
    moving_average_sqd_adv_norm_update_rate: Probability = 0.01

    def training(self, **settings: Unpack[MARWILTrainingArgs]) -> Self:
        """Set how to learn, and return the config; see `TrainingSettings` and the settings above."""
        return super().training(**settings)

    @property
    def algo_class(self) -> type[Algorithm]:
        """`MARWIL`."""
        return MARWIL


class MARWIL(OfflineAlgorithm):
    """Monotonic advantage re-weighted imitation learning."""

    METRICS: ClassVar[tuple[str, ...]] = (
        *("policy_loss", "vf_loss", "entropy", "vf_explained_var", "mean_advantage_weight", "sqd_adv_norm"),
        *learner_metrics("default"),
    )
    STATE: ClassVar[tuple[str, ...]] = (*OfflineAlgorithm.STATE, "_mean_squares")
    OF_MODULES = ("_mean_squares",)
    # Returns are summed once, when the data is read, and the average begins once.
    FIXED_SETTINGS = OfflineAlgorithm.FIXED_SETTINGS | {"gamma", "moving_average_sqd_adv_norm_start"}
    FIRST_SETTINGS = OfflineAlgorithm.FIRST_SETTINGS | {"moving_average_sqd_adv_norm_start"}

    config: MARWILConfig

    def setup(self) -> None:
        """Begin without a mean squared advantage, and read the data."""
        self._mean_squares: dict[str, float] = {}  # mean squared advantage by module id
        self._latest_norms: dict[str, float] = {}  # what the loss of the latest update was given
        super().setup()

    def add_columns(self, config: OfflineConfig, rollout: Rollout) -> Mapping[str, Any]:
        """Return what followed each step; see `returns_to_go`."""
        return returns_to_go(rollout, config.gamma)

    def prepare_batch(self, module_id: str, batch: Batch, buffer: ReplayBuffer) -> Batch:
        """Return the batch with the column `final_obs`: final observations, from which truncated episodes bootstrap.

        Without `moving_average_sqd_adv_norm_start`, the mean squared advantage begins with the mean of the first batch.
        It is computed here, where the batch is whole: learners see a part of it each.
        """
        record = self.modules[module_id]
        config, pipeline = record.config, record.policy.pipeline
        final_obs = buffer.obs_after(batch["indices"], batch["steps_to_end"])
        batch = {**batch, "final_obs": final_obs if pipeline is None else pipeline.from_stored(final_obs)}
        if config.moving_average_sqd_adv_norm_start is None and module_id not in self._mean_squares:
            _, found = evaluate_loss(self, module_id, self.make_loss(config), batch, {"sqd_adv_norm": 1.0})
            self._mean_squares[module_id] = found["sqd_adv"].item()
        return batch

    def make_loss(self, config: MARWILConfig) -> Loss:
        """Return the loss with a config's constants."""
        return partial(marwil_loss, beta=config.beta, vf_coeff=config.vf_coeff, max_weight=config.max_advantage_weight)

    def coefficients(self, module_id: str) -> dict[str, float]:
        """Return the mean squared advantage so far."""
        start = self.modules[module_id].config.moving_average_sqd_adv_norm_start
        norm = self._mean_squares.get(module_id, start)
        if norm is None:  # validation, after an update whose loss did not report it
            norm = self._latest_norms[module_id]
        self._latest_norms[module_id] = norm
        return {"sqd_adv_norm": norm}

    def note_results(self, module_id: str, results: dict[str, Any]) -> None:
        """Move the mean squared advantage towards the one of the update."""
        rate = self.modules[module_id].config.moving_average_sqd_adv_norm_update_rate
        found, before = results.pop("sqd_adv", None), results.get("sqd_adv_norm")
        if found is not None and before is not None:
            self._mean_squares[module_id] = before + rate * (found - before)
        else:  # a user's loss may not report them, and takes the mean of each batch
            self._mean_squares.pop(module_id, None)


def marwil_loss(
    module: Module,
    batch: Batch,
    coefficients: Mapping[str, float],
    *,
    beta: float,
    vf_coeff: float,
    max_weight: float,
    outputs: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a minibatch; a pure function of weights and columns.

    - Value loss: half the mean squared difference between the discounted return to the end of the episode and the
      value. Where the episode was truncated, the return includes the value of its final observation.
    - Policy loss, eq. 2 and algorithm 1 of the paper: the negative log-likelihood of the recorded actions, each
      weighted by exp(beta * advantage / c), where c is the root of the mean squared advantage.

    Args:
        module: Module with a policy and values.
        batch: Columns `[B, ...]`: `obs`, `actions`, `final_obs`, and the columns of `returns_to_go`.
        coefficients: `sqd_adv_norm`, the mean squared advantage so far.
        beta: Weight of the advantages.
        vf_coeff: Weight of the value loss.
        max_weight: Largest weight of an action.
        outputs: Receives `dist_inputs`, `[B, D]`, and `values`, `value_targets`, `logp` and `weights`, `[B]`.

    Returns:
        The scalar to minimise, and scalars to report.
    """
    dist_inputs, values = module.policy_and_value(batch["obs"])
    with torch.no_grad():
        targets = batch["returns"]
        if bool((batch["bootstrap_discounts"] != 0).any()):
            targets = targets + batch["bootstrap_discounts"] * module.value(batch["final_obs"])
        advantages = targets - values
        squares = advantages.square().mean()
        norm = squares.new_tensor(coefficients["sqd_adv_norm"])
        weights = (beta * advantages / (norm.sqrt() + 1e-8)).exp().clamp(max=max_weight)
        variance = targets.var(correction=0)
        explained = 1 - (targets - values).var(correction=0) / variance.where(variance > 0, math.nan)
    logp = module.distribution.logp(dist_inputs, module.distribution.inside_bounds(batch["actions"]))
    if outputs is not None:
        outputs |= {"dist_inputs": dist_inputs, "values": values, "value_targets": targets}
        outputs |= {"logp": logp, "weights": weights}
    policy_loss = -(weights * logp).mean()
    vf_loss = 0.5 * (values - targets).square().mean()
    entropy = module.distribution.entropy(dist_inputs.detach()).mean()
    return policy_loss + vf_coeff * vf_loss, {
        "policy_loss": policy_loss.detach(),
        "vf_loss": vf_loss.detach(),
        "entropy": entropy,
        "vf_explained_var": explained,
        "mean_advantage_weight": weights.mean(),
        "sqd_adv_norm": norm,
        "sqd_adv": squares,
    }
