"""Soft actor-critic (Haarnoja et al. 2018, arXiv:1801.01290 and arXiv:1812.05905), on off_policy.py.

A round samples an env step into the replay buffer, and takes a gradient step on a batch drawn from it: of the critics,
of the actor, which seeks value and entropy, and of the temperature that weighs the two. Discrete actions follow
Christodoulou 2019 (arXiv:1910.07207). `docs/algorithms/sac.md` lists the metrics and the implementation details by
number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Unpack, cast

import torch
from torch import Tensor

from corral.algorithms.actor_critic_settings import CriticAtomSettings
from corral.algorithms.algorithm import Algorithm
from corral.algorithms.off_policy import OffPolicyAlgorithm, OffPolicyConfig, off_policy_metrics
from corral.core.settings import Need, NonNegativeSchedule, PositiveFloat
from corral.learners.losses import Batch
from corral.modules.distributions import categorical_logp
from corral.modules.memory import at_rows
from corral.modules.module import Module
from corral.modules.recurrent_sac_module import RecurrentSACModule
from corral.modules.sac_module import SACModule

if TYPE_CHECKING:
    from corral.algorithms.config.setter_types import SACTrainingArgs

Terms = tuple[Tensor, Tensor, Tensor, Tensor]
"""Terms of a batch: what the critics give for the actions taken, such as values `[C, B]`; targets, such as `[B]`; loss
of the actor; log-likelihood of the policy's own actions, `[B]`, detached."""


HAS_NO_ATOMS = Need("num_atoms=1 (the architecture simba_v2 sets 101)", lambda config: config.num_critic_atoms == 1)


@dataclass(kw_only=True, repr=False)
class SACSettings(CriticAtomSettings):
    """Settings of SAC and of the algorithms that are made of its parts.

    Attributes:
        initial_alpha: Initial temperature: the reward that one nat of entropy is worth.
        target_entropy: Entropy in nats that the temperature is adapted to; `"auto"` is minus the number of dimensions
            of a Box, or half the largest entropy of Discrete actions.
        td_error_loss_fn: Loss of the critics' TD error: `"mse"`, half its square, or `"huber"`, the same up to an error
            of 1 and linear above.
        alpha_lr: Learning rate of the temperature, or a schedule over env steps; `None` is `lr`, and 0 keeps the
            temperature at `initial_alpha`.
    """

    LR_GROUPS: ClassVar[tuple[str, ...]] = ("actor", "critic", "alpha")
    LEARNS_SEQUENCES: ClassVar[bool] = True

    initial_alpha: PositiveFloat = 1.0
    target_entropy: Annotated[
        float | Literal["auto"], Need("alpha_lr above 0", lambda config: config.alpha_lr != 0)
    ] = "auto"
    td_error_loss_fn: Annotated[Literal["huber", "mse"], HAS_NO_ATOMS] = "mse"
    alpha_lr: NonNegativeSchedule | None = None

    @property
    def module_settings(self) -> dict[str, Any]:
        """Settings of the module in addition to its layers."""
        return {"twin_q": self.twin_q, "initial_alpha": self.initial_alpha, **self.atom_settings}

    @property
    def default_exploration(self: Any) -> dict[str, Any]:
        """Actions sampled from the policy; before learning starts, uniform actions."""
        return {"type": "StochasticSampling", "random_timesteps": self.num_random_steps}


@dataclass(kw_only=True)
class SACConfig(SACSettings, OffPolicyConfig):
    """Settings of SAC; the settings of its bases belong to `.training(...)`.

    Until learning starts, actions are drawn uniformly from the action space; `exploration_config` changes that.
    """

    def training(self, **settings: Unpack[SACTrainingArgs]) -> Self:
        """Set how to learn, and return the config; see `TrainingSettings` and the settings above."""
        return super().training(**settings)

    @property
    def algo_class(self) -> type[Algorithm]:
        """`SAC`."""
        return SAC

    @property
    def default_module_class(self) -> type[Module]:
        """`SACModule`, `CategoricalSACModule` with atoms, or `RecurrentSACModule` with `use_lstm` or `use_gru`."""
        if self.asks_for_memory:
            return RecurrentSACModule
        if self.num_critic_atoms > 1:
            from corral.modules.categorical_critics import CategoricalSACModule

            return CategoricalSACModule
        return SACModule


class SAC(OffPolicyAlgorithm):
    """Soft actor-critic."""

    STATE = (*OffPolicyAlgorithm.STATE, "_noise_rng")
    FIXED_SETTINGS = OffPolicyAlgorithm.FIXED_SETTINGS | {"twin_q", "initial_alpha", "num_atoms", "v_min", "v_max"}
    FIRST_SETTINGS = OffPolicyAlgorithm.FIRST_SETTINGS | {"initial_alpha"}
    METRICS = (
        *("critic_loss", "actor_loss", "alpha_loss", "alpha", "entropy", "qf_mean", "qf_min", "qf_max"),
        *off_policy_metrics("actor", "critic", "alpha"),
    )

    LEARNS_TENSORS = True

    def make_loss(self, config: Any) -> Callable[..., tuple[Any, dict[str, Tensor]]]:
        """Return the loss with a config's constants."""
        given = config.target_entropy
        target_entropy = None if given == "auto" else given
        return partial(sac_loss, target_entropy=target_entropy, huber=config.td_error_loss_fn == "huber")

    def prepare_batch(self, module_id: str, batch: Batch) -> Batch:
        """Return the batch with `noise` and `next_noise`, float32 `[B, d]`, which pick the policy's actions."""
        distribution = self.modules[module_id].module.distribution
        noise = distribution.noise(self._noise_rng, (2, len(batch["rewards"])))
        return {**batch, "noise": noise[0], "next_noise": noise[1]}


def sac_loss(
    module: SACModule,
    batch: Batch,
    coefficients: Mapping[str, float],
    *,
    target_entropy: float | None,
    huber: bool = False,
    entropy_in_targets: bool = True,
    outputs: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a minibatch; a pure function of weights and columns.

    The loss is the sum of three losses. Each has gradients in the parameters of its own group only, so one backward
    pass computes all of them. The equations refer to arXiv:1812.05905.

    - Critics, eq. 5: half the mean squared error of each critic, or its Huber loss. The target is the discounted sum of
      the rewards and, where the episode did not terminate, the discounted soft value of the next observation. Critics
      of quantiles (TQC) or atoms have targets and losses of their own: `corral.modules.critics`.
    - Actor, eq. 9: the temperature times the log-likelihood of the policy's actions, minus their value.
    - Temperature, eq. 18, with log alpha in place of alpha, as in the authors' code.

    Args:
        module: Module with a policy, critics with a head, and a temperature.
        batch: Columns `[B, ...]` of a replay buffer, and for Box actions `noise` and `next_noise`, as tensors.
        coefficients: Not used.
        target_entropy: Target of the entropy in nats; `None` is the module's `auto_target_entropy`.
        huber: Whether the loss of critics of the mean return is linear for errors above 1.
        entropy_in_targets: Whether the value of the next observation includes the entropy there.
        outputs: Receives `predicted`, what the critics give for the actions taken, its means `q_taken`, `[C, B]`, and
            `targets`; for Box actions the policy's `actions`, `[B, d]`, and their `logp`, `[B]`; for Discrete actions
            `q_values`, `[C, B, n]`, and the `logp` of all actions, `[B, n]`; and `actor_loss`, `[]`.

    Returns:
        The scalar to minimise, and what to report: scalars, and the column `td_error`, float32 `[B]`, the absolute
        errors averaged over the critics.
    """
    outputs = {} if outputs is None else outputs
    # With memory, the steps to learn from are some of the rows, and their observations are features.
    steps = cast(RecurrentSACModule, module).at_steps(batch) if "learns" in batch else batch
    alpha, head = module.log_alpha.detach().exp(), module.head
    target_alpha = alpha if entropy_in_targets else torch.zeros_like(alpha)
    terms = discrete_terms if module.is_discrete else continuous_terms
    predicted, targets, actor_loss, logp = terms(module, steps, alpha, target_alpha, outputs)
    critic_loss, q_taken, td_error = head.learn(predicted, targets, steps["weights"], huber=huber)
    aim = module.auto_target_entropy(steps["obs"]) if target_entropy is None else target_entropy
    alpha_loss = module.log_alpha * (-logp.mean() - aim)
    outputs |= {"q_taken": q_taken, "targets": targets, "actor_loss": actor_loss}
    if head.METHOD != "q_values":
        outputs[head.METHOD] = predicted
    losses = {"critic": critic_loss, "actor": actor_loss, "alpha": alpha_loss}
    td_error = td_error if steps is batch else at_rows(batch, td_error)
    return critic_loss + actor_loss + alpha_loss, reported_values(losses, alpha, q_taken.detach(), td_error, logp)


def continuous_terms(
    module: SACModule, batch: Batch, alpha: Tensor, target_alpha: Tensor, outputs: dict[str, Tensor]
) -> Terms:
    """Return the terms for Box actions, with expectations over actions estimated from one action of the policy.

    The columns hold actions before the tanh.
    """
    critics, head = getattr(module, module.head.METHOD), module.head
    with torch.no_grad():
        next_actions, next_logp = module.sample(batch["next_obs"], batch["next_noise"])
        next_outputs = critics(batch["next_obs"], next_actions, target=True)
        targets = head.targets(batch, next_outputs, target_alpha * next_logp)
    predicted = critics(batch["obs"], batch["actions"].reshape(len(next_logp), -1).tanh())
    actions, logp = module.sample(batch["obs"], batch["noise"])
    outputs |= {"actions": actions, "logp": logp}
    return predicted, targets, (alpha * logp - module.sought(batch["obs"], actions)).mean(), logp.detach()


def discrete_terms(
    module: SACModule, batch: Batch, alpha: Tensor, target_alpha: Tensor, outputs: dict[str, Tensor]
) -> Terms:
    """Return the terms for Discrete actions, with exact expectations (Christodoulou 2019, eqs. 10 to 12)."""
    with torch.no_grad():
        next_logp = categorical_logp(module.policy(batch["next_obs"]))
        next_q = module.q_values(batch["next_obs"], target=True)
        expected = (next_logp.exp() * (next_q.amin(0) - target_alpha * next_logp)).sum(-1)
        targets = module.head.targets(batch, expected[None])
    logp = categorical_logp(module.policy(batch["obs"]))
    probs = logp.exp()
    q_values = module.q_values(batch["obs"])
    q_taken = q_values[:, torch.arange(q_values.shape[1], device=q_values.device), batch["actions"]]
    outputs |= {"q_values": q_values, "logp": logp}
    actor_loss = (probs * (alpha * logp - q_values.detach().amin(0))).sum(-1).mean()
    return q_taken, targets, actor_loss, (probs * logp).sum(-1).detach()


def reported_values(
    losses: Mapping[str, Tensor], alpha: Tensor, q_taken: Tensor, td_error: Tensor, logp: Tensor
) -> dict[str, Tensor]:
    """Return what to report: losses by group, values of the actions taken, `[C, B]`, their errors and the policy's."""
    smallest, largest = q_taken.aminmax()
    return {f"{name}_loss": loss.detach() for name, loss in losses.items()} | {
        "alpha": alpha,
        "entropy": -logp.mean(),
        "qf_mean": q_taken.mean(),
        "qf_min": smallest,
        "qf_max": largest,
        "td_error": td_error,
    }
