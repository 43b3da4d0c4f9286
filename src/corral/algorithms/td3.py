"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv:1802.09477), on off_policy.py.

A round samples an env step into the replay buffer, and takes a gradient step of the critics on a batch drawn from it.
Every second update also moves the actor, which seeks value, and all targets. DDPG (Lillicrap et al. 2016,
arXiv:1509.02971) is the same algorithm with other settings. `docs/algorithms/td3.md` lists the metrics and the
implementation details by number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, Unpack

import numpy as np
import torch
from torch import Tensor

from corral.algorithms.actor_critic_settings import CriticAtomSettings
from corral.algorithms.algorithm import Algorithm
from corral.algorithms.off_policy import OffPolicyAlgorithm, OffPolicyConfig, off_policy_metrics
from corral.core.settings import Need, NonNegativeFloat, NonNegativeSchedule, PositiveInt
from corral.learners.losses import Batch, Loss
from corral.modules.module import Module
from corral.modules.td3_module import TD3Module

if TYPE_CHECKING:
    from corral.algorithms.config.setter_types import DDPGTrainingArgs, TD3TrainingArgs


@dataclass(kw_only=True, repr=False)
class TD3Settings(CriticAtomSettings):
    """Settings of TD3 and DDPG.

    Attributes:
        policy_delay: Number of updates of the critics for each update of the actor and of the targets.
        target_noise: Standard deviation of the noise on the target actor's actions, in units of [-1, 1]; 0 adds none.
        target_noise_clip: Largest absolute value of this noise.
    """

    lr: NonNegativeSchedule = 1e-3
    policy_delay: PositiveInt = 2
    target_noise: NonNegativeFloat = 0.2
    target_noise_clip: Annotated[NonNegativeFloat, Need("target_noise above 0", attrgetter("target_noise"))] = 0.5

    @property
    def default_module_class(self) -> type[Module]:
        """`TD3Module`, or `CategoricalTD3Module` with atoms."""
        if self.num_critic_atoms > 1:
            from corral.modules.categorical_critics import CategoricalTD3Module

            return CategoricalTD3Module
        return TD3Module

    @property
    def module_settings(self) -> dict[str, Any]:
        """Settings of the module in addition to its layers."""
        return {"twin_q": self.twin_q, **self.atom_settings}


@dataclass(kw_only=True)
class TD3Config(TD3Settings, OffPolicyConfig):
    """Settings of TD3; the settings of its bases belong to `.training(...)`.

    Until learning starts, actions are drawn uniformly from the action space; after that, Gaussian noise is added to the
    actor's actions. `exploration_config` changes both.
    """

    def training(self, **settings: Unpack[TD3TrainingArgs]) -> Self:
        """Set how to learn, and return the config; see `TrainingSettings` and the settings above."""
        return super().training(**settings)

    @property
    def algo_class(self) -> type[Algorithm]:
        """`TD3`."""
        return TD3

    @property
    def default_exploration(self) -> dict[str, Any]:
        """Gaussian noise with a standard deviation of 0.1; before learning starts, uniform actions."""
        return {
            "type": "GaussianNoise",
            "stddev": 0.1,
            "final_scale": 1.0,
            "random_timesteps": self.num_random_steps,
        }


@dataclass(kw_only=True)
class DDPGConfig(TD3Settings, OffPolicyConfig):
    """Settings of DDPG: TD3 with one critic, no delay, no noise on targets, and Ornstein-Uhlenbeck noise."""

    twin_q: bool = False
    policy_delay: int = 1
    target_noise: float = 0.0

    def training(self, **settings: Unpack[DDPGTrainingArgs]) -> Self:
        """Set how to learn, and return the config; see `TrainingSettings` and `TD3Config`."""
        return super().training(**settings)

    @property
    def algo_class(self) -> type[Algorithm]:
        """`DDPG`."""
        return DDPG

    @property
    def default_exploration(self) -> dict[str, Any]:
        """Ornstein-Uhlenbeck noise of the paper on actions in [-1, 1]; before learning starts, uniform actions."""
        return {
            "type": "OrnsteinUhlenbeckNoise",
            "ou_base_scale": 0.5,
            "final_scale": 1.0,
            "random_timesteps": self.num_random_steps,
        }


class TD3(OffPolicyAlgorithm):
    """Twin delayed deep deterministic policy gradient."""

    STATE = (*OffPolicyAlgorithm.STATE, "_noise_rng", "_num_updates")
    OF_MODULES = (*OffPolicyAlgorithm.OF_MODULES, "_num_updates")
    FIXED_SETTINGS = OffPolicyAlgorithm.FIXED_SETTINGS | {"twin_q", "num_atoms", "v_min", "v_max"}
    VALIDATION_COEFFICIENTS: ClassVar[Mapping[str, float]] = {"actor_coeff": 1.0}
    METRICS = (
        *("critic_loss", "actor_loss", "qf_mean", "qf_min", "qf_max"),
        *off_policy_metrics("actor", "critic"),
    )

    LEARNS_TENSORS = True
    DELAYS_ACTOR = True

    def make_loss(self, config: Any) -> Loss:
        """Return the loss with a config's constants."""
        return partial(td3_loss, target_noise=config.target_noise, target_noise_clip=config.target_noise_clip)

    def prepare_batch(self, module_id: str, batch: Batch) -> Batch:
        """Return the batch with `next_noise`, float32 `[B, d]`: standard normal noise for the targets' actions."""
        module: Any = self.modules[module_id].module
        shape = (len(batch["rewards"]), module.num_action_dims)
        return {**batch, "next_noise": self._noise_rng.standard_normal(shape, dtype=np.float32)}


class DDPG(TD3):
    """Deep deterministic policy gradient: TD3 with the settings of `DDPGConfig`."""


def td3_loss(
    module: TD3Module,
    batch: Batch,
    coefficients: Mapping[str, float],
    *,
    target_noise: float,
    target_noise_clip: float,
    outputs: dict[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the losses of a minibatch by group of parameters; a pure function of weights and columns.

    The equations refer to arXiv:1802.09477.

    - Critics, eqs. 10 and 14: the mean squared error of each critic. The target is the discounted sum of the rewards
      and, where the episode did not terminate, the discounted lower value of the target actor's action with clipped
      noise. Critics over atoms have targets and losses of their own: `corral.modules.critics`.
    - Actor, algorithm 1: minus the first critic's value of the actor's action.

    Args:
        module: Module with a policy, values, and targets of both.
        batch: Columns `[B, ...]` of a replay buffer, and `next_noise`, as tensors.
        coefficients: `actor_coeff`; with 0 the loss of the actor is not computed.
        target_noise: Standard deviation of the noise on the target actor's actions.
        target_noise_clip: Largest absolute value of this noise.
        outputs: Receives `predicted`, what the critics give for the actions taken, its means `q_taken`, `[C, B]`,
            `targets`, and the actor's `actions`, `[B, d]`, if its loss is computed.

    Returns:
        The scalars to minimise by group, `critic` and, if it is computed, `actor`; and what to report: scalars, and the
        column `td_error`, float32 `[B]`, the absolute errors averaged over the critics.
    """
    critics, head = getattr(module, module.head.METHOD), module.head
    with torch.no_grad():
        noise = (target_noise * batch["next_noise"]).clamp(-target_noise_clip, target_noise_clip)
        next_actions = (module.target_policy(batch["next_obs"]) + noise).clamp(-1, 1)
        targets = head.targets(batch, critics(batch["next_obs"], next_actions, target=True))
    predicted = critics(batch["obs"], batch["actions"].reshape(len(targets), -1))
    critic_loss, q_taken, td_error = head.learn(predicted, targets, batch["weights"])
    losses = {"critic": critic_loss}
    outputs = {} if outputs is None else outputs
    outputs |= {"q_taken": q_taken, "targets": targets}
    if head.METHOD != "q_values":
        outputs[head.METHOD] = predicted
    if coefficients["actor_coeff"]:
        outputs["actions"] = module.policy(batch["obs"])
        losses["actor"] = -head.means(module.q[0](batch["obs"], outputs["actions"])).mean()
    q_taken = q_taken.detach()
    smallest, largest = q_taken.aminmax()
    reported = {f"{name}_loss": loss.detach() for name, loss in losses.items()} | {
        "qf_mean": q_taken.mean(),
        "qf_min": smallest,
        "qf_max": largest,
        "td_error": td_error,
    }
    return losses, reported
