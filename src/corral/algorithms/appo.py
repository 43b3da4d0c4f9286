"""Asynchronous proximal policy optimisation (APPO), which is IMPACT (Luo et al. 2020, arXiv:1912.00167).

IMPALA with PPO's clipped surrogate: the ratio is taken against a target policy that changes rarely, and several updates
are made from each batch of a circular buffer. `docs/algorithms/appo.md` lists the metrics and the implementation
details by number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corral.algorithms.algorithm import Algorithm
from corral.algorithms.impala import IMPALA, USES_CIRCULAR_BUFFER, IMPALAConfig, policy_outputs
from corral.algorithms.ppo import adapted_kl_coeff
from corral.core.settings import Need, NonNegativeFloat, PositiveFloat, Probability
from corral.data.episodes.rollout import Rollout
from corral.learners.learner import evaluate_in_chunks, policy_of_rows
from corral.learners.losses import Batch
from corral.modules.memory import module_inputs
from corral.modules.module import Module

if TYPE_CHECKING:
    from corral.algorithms.config.setter_types import APPOTrainingArgs

# How far the divergence may be from `kl_target` before the coefficient changes, and by what it is multiplied, as in
# RLlib.
KL_BAND = 2.0
KL_FACTORS = (1.5, 0.5)


USES_KL_LOSS = Need("use_kl_loss=True", attrgetter("use_kl_loss"))


@dataclass(kw_only=True)
class APPOConfig(IMPALAConfig):
    """Settings of APPO; the settings below and in `IMPALAConfig` belong to `.training(...)`.

    Attributes:
        clip_param: Epsilon of the clipped surrogate: how far the probability ratio to the target policy may move from
            1.
        target_worker_clipping: The largest ratio of the probability of an action in the policy that acted to that in
            the target policy, which weighs the surrogate.
        use_kl_loss: Whether the loss has a penalty on the divergence from the target policy.
        kl_coeff: Weight of this penalty at first.
        kl_target: Divergence in nats to which the weight adapts after each update.
        target_network_update_freq: How often the target policy becomes the policy, in traversals of the circular
            buffer: one is `circular_buffer_num_batches` times `circular_buffer_iterations_per_batch` updates. It may be
            a fraction, such as 0.125.
        tau: How far the target policy then moves towards the policy; 1 copies it.
    """

    use_circular_buffer: bool = True
    circular_buffer_num_batches: Annotated[int, USES_CIRCULAR_BUFFER] = (
        8  # without runners too: see `num_updates_per_target`
    )
    clip_param: PositiveFloat = 0.4
    target_worker_clipping: PositiveFloat = 2.0
    use_kl_loss: bool = False
    kl_coeff: Annotated[NonNegativeFloat, USES_KL_LOSS] = 1.0
    kl_target: Annotated[PositiveFloat, USES_KL_LOSS] = 0.01
    target_network_update_freq: PositiveFloat = 2.0
    tau: Probability = 1.0

    def training(self, **settings: Unpack[APPOTrainingArgs]) -> Self:
        """Set how to learn, and return the config; see `TrainingSettings` and the settings above."""
        return self._set("training", settings)

    @property
    def algo_class(self) -> type[Algorithm]:
        """`APPO`."""
        return APPO

    @property
    def num_updates_per_target(self) -> int:
        """Updates from one change of the target policy to the next."""
        num_batches = self.circular_buffer_num_batches if self.use_circular_buffer else 1
        return max(1, round(self.target_network_update_freq * num_batches * self.num_updates_per_batch))


class APPO(IMPALA):
    """Asynchronous proximal policy optimisation."""

    METRICS = (*IMPALA.METRICS, "curr_kl_coeff", "clip_fraction")
    STATE = (*IMPALA.STATE, "_kl_coeff", "_updates_since_target", "target_weights")
    ADAPTED: ClassVar[Mapping[str, str]] = {"kl_coeff": "_kl_coeff"}

    config: APPOConfig

    def setup(self) -> None:
        """Begin with target policies that are the policies."""
        super().setup()
        self._kl_coeff: dict[str, float] = {}
        self._updates_since_target: dict[str, int] = {}
        self._targets: dict[str, Module] = {}
        self.setup_modules()

    def setup_modules(self) -> None:
        """Make the target policies of new modules, and forget what is kept of removed modules."""
        learning = self.learner_group.learning_ids
        self._targets = {module_id: self._targets.get(module_id) or self._copy_of(module_id) for module_id in learning}
        for kept in (self._kl_coeff, self._updates_since_target):
            for module_id in kept.keys() - set(learning):
                kept.pop(module_id)

    def _copy_of(self, module_id: str) -> Module:
        return copy.deepcopy(self.learner_group.get_module(module_id)).requires_grad_(False)

    def load_module_weights(self, path: str | Path, module_id: str, from_module_id: str | None = None) -> None:
        """Load the weights of one module, also into its target policy; see `Algorithm.load_module_weights`."""
        super().load_module_weights(path, module_id, from_module_id)
        self._targets.pop(self.modules.resolve_id(module_id), None)
        self.setup_modules()

    @property
    def target_weights(self) -> dict[str, dict[str, NDArray[Any]]]:
        """The weights of the target policies, by module id and parameter name."""
        return {
            module_id: {name: value.cpu().numpy() for name, value in target.state_dict().items()}
            for module_id, target in self._targets.items()
        }

    @target_weights.setter
    def target_weights(self, weights: Mapping[str, Mapping[str, NDArray[Any]]]) -> None:
        for module_id, target in self._targets.items():
            if module_id in weights:
                for name, value in target.state_dict().items():
                    value.copy_(torch.from_numpy(weights[module_id][name]))

    def make_loss(self, config: Any) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
        """Return the loss with a config's constants."""
        return partial(
            appo_loss,
            clip_param=config.clip_param,
            vf_loss_coeff=config.vf_loss_coeff,
            target_worker_clipping=config.target_worker_clipping,
        )

    def make_batch(self, module_id: str, rollouts: Sequence[Rollout]) -> Batch:
        """Return the batch of a module, with the outputs of the target policy as `target_dist_inputs`."""
        target = self._targets[module_id]

        def outputs_of_target(rows: Batch) -> Any:
            return evaluate_in_chunks(target, policy_of_rows, rows, None)  # training has set the threads

        for rollout in rollouts:
            rollout.columns["target_dist_inputs"] = policy_outputs(rollout, outputs_of_target, target.max_seq_len)
        return super().make_batch(module_id, rollouts)

    def target_outputs(self, module_id: str, rollout: Rollout) -> NDArray[np.float32]:
        """Return the outputs of the target policy, for whose returns V-trace estimates the values."""
        outputs: NDArray[np.float32] = rollout.columns["target_dist_inputs"]
        return outputs

    def coefficients(self, module_id: str) -> dict[str, float]:
        """Return the numbers that the loss of a module is given."""
        config = self.module_config(module_id)
        kl_coeff = self._kl_coeff.get(module_id, config.kl_coeff) if config.use_kl_loss else 0.0
        return {**super().coefficients(module_id), "kl_coeff": kl_coeff}

    def after_update(self, module_id: str, metrics: dict[str, Any]) -> None:
        """Adapt the weight of the penalty, and move the target policy if that is due."""
        super().after_update(module_id, metrics)
        config = self.module_config(module_id)
        if config.use_kl_loss and "mean_kl_loss" in metrics:  # it is not measured while the weight is 0
            before = self._kl_coeff.get(module_id, config.kl_coeff)
            kl = metrics["mean_kl_loss"]
            self._kl_coeff[module_id] = adapted_kl_coeff(before, kl, config.kl_target, KL_BAND, KL_FACTORS)
        num_updates = self._updates_since_target.get(module_id, 0) + 1
        if num_updates >= config.num_updates_per_target:
            num_updates = 0
            now = self.learner_group.get_module(module_id).state_dict()
            move_weights(self._targets[module_id].state_dict(), now, config.tau)
        self._updates_since_target[module_id] = num_updates


def move_weights(weights: Mapping[str, Tensor], towards: Mapping[str, Tensor], tau: float) -> None:
    """Move weights in place by a fraction `tau` towards others; numbers that are no floats are copied."""
    with torch.no_grad():
        for name, value in weights.items():
            if value.is_floating_point():
                value.lerp_(towards[name], tau)
            else:
                value.copy_(towards[name])


def appo_loss(
    module: Module,
    batch: Batch,
    coefficients: Mapping[str, float],
    *,
    clip_param: float,
    vf_loss_coeff: float,
    target_worker_clipping: float = 2.0,
    outputs: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a minibatch; a pure function of weights and columns.

    - Surrogate: eq. 5 of the paper. With the policies pi, target t and acting m, the ratio is min(m / t, c) times
      pi / m, that is pi / t where the action was not much likelier when it was taken, and it is clipped around 1.
    - Value loss: half the squared error to the targets of V-trace, which are values of the target policy.
    - Entropy bonus, and a penalty on the divergence KL(t || pi).

    Args:
        module: Module with a policy and values.
        batch: Columns `[B, ...]` as `ppo_batch` returns them, and `target_dist_inputs`, as tensors.
        coefficients: `entropy_coeff` and `kl_coeff`.
        clip_param: Epsilon of the surrogate.
        vf_loss_coeff: Weight of the value loss.
        target_worker_clipping: The largest m / t, above called c.
        outputs: Receives `dist_inputs`, `[B, D]`, and `values`, `ratio` and `logp`, `[B]`.

    Returns:
        The scalar to minimise, and scalars to report; see `impala_loss`. `mean_ratio` is the mean of m / t, clipped.
    """
    distribution = module.distribution
    dist_inputs, values = module.policy_and_value(*module_inputs(batch))
    logp = distribution.logp(dist_inputs, batch["actions"])
    log_ratio = logp - batch["logp"]
    with torch.no_grad():
        target_logp = distribution.logp(batch["target_dist_inputs"], batch["actions"])
        weight = (batch["logp"] - target_logp).exp().clamp(max=target_worker_clipping)
    ratio = weight * log_ratio.exp()
    if outputs is not None:
        outputs |= {"dist_inputs": dist_inputs, "values": values, "logp": logp, "ratio": ratio}
    advantages = batch["advantages"]
    clipped_ratio = ratio.clamp(1 - clip_param, 1 + clip_param)
    policy_loss = -torch.min(ratio * advantages, clipped_ratio * advantages).mean()
    vf_loss = 0.5 * (values - batch["value_targets"]).square().mean()
    loss = policy_loss + vf_loss_coeff * vf_loss
    entropy_coeff, kl_coeff = coefficients["entropy_coeff"], coefficients["kl_coeff"]
    entropy = distribution.entropy(dist_inputs if entropy_coeff else dist_inputs.detach()).mean()
    if entropy_coeff:
        loss = loss - entropy_coeff * entropy
    scalars = {"policy_loss": policy_loss, "vf_loss": vf_loss, "entropy": entropy}
    if kl_coeff:
        scalars["mean_kl_loss"] = kl = distribution.kl(batch["target_dist_inputs"], dist_inputs).mean()
        loss = loss + kl_coeff * kl
    with torch.no_grad():
        scalars["mean_kl"] = (log_ratio.exp() - 1 - log_ratio).mean()
        scalars["mean_ratio"] = weight.mean()
        scalars["clip_fraction"] = (clipped_ratio != ratio).float().mean()
    return loss, {name: value.detach() for name, value in scalars.items()}
