"""Conservative Q-learning (Kumar et al. 2020, arXiv:2006.04779), on the parts of SAC.

The critics learn from recorded transitions, and are pulled down at the actions of the policy and up at the recorded
ones, so that the policy does not seek actions about which the data says nothing. `docs/algorithms/cql.md` lists the
metrics and the implementation details by number.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, Unpack, cast

import torch
from torch import Tensor

from corral.algorithms.algorithm import Algorithm
from corral.algorithms.off_policy import OffPolicyConfig
from corral.algorithms.sac import SAC, SACSettings
from corral.core.schedules import Schedule
from corral.core.settings import Need, NonNegativeFloat, NonNegativeInt, NonNegativeSchedule, PositiveFloat, PositiveInt
from corral.core.tree import map_tree
from corral.errors import ConfigError
from corral.learners.losses import Batch
from corral.learners.settings import UpdateSettings
from corral.modules.cql_module import CQLModule
from corral.modules.distributions import SquashedGaussian
from corral.modules.module import Module
from corral.modules.sac_module import SACModule

if TYPE_CHECKING:
    from corral.algorithms.config.setter_types import CQLTrainingArgs

log = logging.getLogger("corral")


@dataclass(kw_only=True)
class CQLConfig(SACSettings, OffPolicyConfig):
    """Settings of CQL; those below and in its bases belong to `.training(...)`.

    By default nothing is sampled; with `num_offline_updates` the run continues in the env.

    Attributes:
        cql_weight: Weight of the conservative loss of each critic, next to half the squared error; it is half of the
            weight in the authors' code.
        num_sampled_actions: Number of actions of each kind (uniform, of the policy, of the policy at the next
            observation) with which the conservative loss is estimated; Discrete actions need none.
        cql_temperature: Temperature of the soft maximum over actions.
        lagrangian: Whether the weight is adapted so that the gap between the soft maximum and the value of the
            recorded action is `lagrangian_threshold`; `cql_weight` then multiplies the adapted weight, which begins at
            1 and has the learning rate of the temperature.
        lagrangian_threshold: The gap that the adapted weight aims at.
        deterministic_backup: Whether targets have no entropy.
        num_imitation_updates: Number of first updates in which the actor imitates the recorded actions, and does not
            seek value.
    """

    LEARNS_SEQUENCES: ClassVar[bool] = False
    LEARNS_ATOMS: ClassVar[bool] = False

    lr: Schedule = 3e-4
    actor_lr: NonNegativeSchedule | None = 1e-4
    num_offline_updates: NonNegativeInt | None = None
    cql_weight: NonNegativeFloat = 2.5
    num_sampled_actions: PositiveInt = 10
    cql_temperature: PositiveFloat = 1.0
    lagrangian: bool = False
    lagrangian_threshold: Annotated[float, Need("lagrangian", attrgetter("lagrangian"))] = 5.0
    deterministic_backup: bool = True
    num_imitation_updates: NonNegativeInt = 0

    def training(self, **settings: Unpack[CQLTrainingArgs]) -> Self:
        """Set how to learn, and return the config; see `TrainingSettings` and the settings above."""
        return self._set("training", settings)

    @property
    def algo_class(self) -> type[Algorithm]:
        """`CQL`."""
        return CQL

    @property
    def default_module_class(self) -> type[Module]:
        """`CQLModule`."""
        return CQLModule

    @property
    def module_settings(self) -> dict[str, Any]:
        """Settings of the module in addition to its layers."""
        return {**super().module_settings, "lagrangian": self.lagrangian}

    def check_settings(self) -> None:
        """Refuse contradictions of these settings; see `AlgorithmConfig.validate`."""
        if self.lagrangian and self.alpha_lr == 0:
            raise ConfigError(
                "lagrangian=True: alpha_lr is the learning rate of the weight, and it is 0: set it above 0."
            )


class CQL(SAC):
    """Conservative Q-learning."""

    METRICS = (*SAC.METRICS, "conservative_loss", "conservative_weight")
    STATE = (*SAC.STATE, "_num_imitated")
    OF_MODULES = (*SAC.OF_MODULES, "_num_imitated")
    FIXED_SETTINGS = SAC.FIXED_SETTINGS | {"lagrangian"}

    config: CQLConfig

    def setup(self) -> None:
        """Count the updates of imitation, and set up SAC.

        Raises:
            ConfigError: A custom module has no weight to adapt.
        """
        for module_id, record in self.modules.items():
            if record.config.lagrangian and getattr(record.module, "log_cql_weight", None) is None:
                raise ConfigError(
                    f"lagrangian=True: {type(record.module).__name__} of module {module_id!r} has no weight to adapt: "
                    "derive it from corral.modules.cql_module.CQLModule."
                )
            num_actions, is_discrete = record.config.num_sampled_actions, cast(SACModule, record.module).is_discrete
            if is_discrete and num_actions != CQLConfig.num_sampled_actions:
                log.warning(
                    "num_sampled_actions=%d has no effect: CQL sums over all Discrete actions. Leave it out.",
                    num_actions,
                )
        self._num_imitated: dict[str, int] = {}
        super().setup()

    def make_loss(self, config: Any) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
        """Return the loss with a config's constants."""
        return partial(
            cql_loss,
            base_loss=partial(super().make_loss(config), entropy_in_targets=not config.deterministic_backup),
            weight=config.cql_weight,
            temperature=config.cql_temperature,
            threshold=config.lagrangian_threshold if config.lagrangian else None,
        )

    def prepare_batch(self, module_id: str, batch: Batch) -> Batch:
        """Return the batch with the columns of SAC, and for Box actions the ones that `cql_loss` needs."""
        batch = super().prepare_batch(module_id, batch)
        record = self.modules[module_id]
        module, config = cast(SACModule, record.module), record.config
        if module.is_discrete:
            return batch
        shape = (len(batch["rewards"]), config.num_sampled_actions)
        noise = module.distribution.noise(self._noise_rng, (2, *shape))
        uniform = self._noise_rng.random((*shape, noise.shape[-1]), dtype="float32") * 2 - 1
        return {**batch, "uniform_actions": uniform, "action_noise": noise[0], "next_action_noise": noise[1]}

    def update_module(self, module_id: str, batch: Batch, settings: UpdateSettings) -> dict[str, Any]:
        """Take one update of a module, and return its metrics; in the first updates the actor imitates."""
        num_imitated = self._num_imitated.get(module_id, 0)
        imitates = num_imitated < self.modules[module_id].config.num_imitation_updates
        self._num_imitated[module_id] = num_imitated + imitates
        settings = replace(settings, coefficients={**settings.coefficients, "imitates": float(imitates)})
        return super().update_module(module_id, batch, settings)


def cql_loss(
    module: CQLModule,
    batch: Batch,
    coefficients: Mapping[str, float],
    *,
    base_loss: Callable[..., tuple[Tensor, dict[str, Tensor]]],
    weight: float,
    temperature: float,
    threshold: float | None,
    outputs: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a minibatch: the loss of SAC, and the conservative loss of each critic.

    The conservative loss is eq. 4 of the paper, CQL(H): the soft maximum of the values over actions, which is a
    log-sum-exp, minus the value of the recorded action. For Box actions the sum is estimated from uniform actions and
    actions of the policy, each divided by its density (appendix F). As in the authors' code, it is not divided by the
    number of these actions.

    Args:
        module: Module with a policy, values and a temperature.
        batch: Columns of `sac_loss`, and for Box actions `uniform_actions`, `action_noise` and `next_action_noise`,
            float32 `[B, N, d]`.
        coefficients: `imitates`: 1 if the actor imitates the recorded actions in place of seeking value.
        base_loss: `sac_loss` with its constants.
        weight: Weight of the conservative loss.
        temperature: Temperature of the soft maximum.
        threshold: The gap that the adapted weight aims at; `None` adapts no weight.
        outputs: Receives the outputs of `sac_loss`, and `soft_maxima`, `[C, B]`.

    Returns:
        The scalar to minimise, and what to report, as of `sac_loss`; `conservative_loss` is the mean gap, without
        weight, and `conservative_weight` is all that multiplies it.
    """
    outputs = {} if outputs is None else outputs
    total, reported = base_loss(module, batch, coefficients, outputs=outputs)
    if coefficients.get("imitates"):
        imitation = _imitation_loss(module, batch, outputs)
        total = total - outputs["actor_loss"] + imitation
        reported |= {"actor_loss": imitation.detach()}
    if module.is_discrete:
        soft_maxima = temperature * (_legal(module, batch, outputs["q_values"]) / temperature).logsumexp(-1)
    else:
        soft_maxima = _sampled_soft_maxima(module, batch, temperature)
    outputs["soft_maxima"] = soft_maxima
    gaps = (batch["weights"] * (soft_maxima - outputs["q_taken"])).mean(-1)
    multiplier = gaps.new_ones(())
    if threshold is not None:
        assert module.log_cql_weight is not None
        multiplier = module.log_cql_weight.exp().clamp(max=1e6)
        # The critics minimise the gap with this weight, and the weight maximises what it multiplies.
        total = total - weight * (multiplier * (gaps.detach() - threshold)).sum()
        multiplier = multiplier.detach()
    conservative = weight * (multiplier * gaps).sum()
    reported |= {"conservative_loss": gaps.detach().mean(), "conservative_weight": weight * multiplier}
    return total + conservative, reported


def _imitation_loss(module: CQLModule, batch: Batch, outputs: Mapping[str, Tensor]) -> Tensor:
    """Return the negative log-likelihood of the recorded actions, minus the entropy at SAC's temperature."""
    alpha, logp = module.log_alpha.detach().exp(), outputs["logp"]
    actions = module.distribution.inside_bounds(batch["actions"])
    recorded = module.distribution.logp(module.policy(batch["obs"]), actions)
    entropy = -(logp.exp() * logp).sum(-1) if module.is_discrete else -logp
    return (-alpha * entropy - recorded).mean()


def _legal(module: CQLModule, batch: Batch, q_values: Tensor) -> Tensor:
    """Return values `[C, B, n]` that are very low for actions that a mask forbids."""
    if not module.has_action_mask:
        return q_values
    return torch.stack([module.mask_outputs(batch["obs"], values) for values in q_values])


def _sampled_soft_maxima(module: CQLModule, batch: Batch, temperature: float) -> Tensor:
    """Return estimates of the soft maxima over Box actions, `[C, B]`; differentiable in the critics."""
    assert isinstance(module.distribution, SquashedGaussian)
    uniform = batch["uniform_actions"]
    size, num_actions, num_dims = uniform.shape
    flat = (size * num_actions, num_dims)
    actions, log_densities = [uniform.reshape(flat)], [uniform.new_full(flat[:1], -num_dims * math.log(2.0))]
    with torch.no_grad():
        for obs, noise in ((batch["obs"], batch["action_noise"]), (batch["next_obs"], batch["next_action_noise"])):
            outputs = module.policy(obs).repeat_interleave(num_actions, 0)  # all actions of a row need one pass
            sampled, logp = module.distribution.squashed_sample(outputs, noise.reshape(flat))
            actions.append(sampled)
            log_densities.append(logp)
    obs = map_tree(lambda leaf: leaf.repeat_interleave(num_actions, 0), batch["obs"])
    values = torch.stack([module.q_values(obs, each) for each in actions], 1) / temperature - torch.stack(log_densities)
    values = values.reshape(-1, 3, size, num_actions)
    return temperature * values.transpose(1, 2).flatten(2).logsumexp(-1)
