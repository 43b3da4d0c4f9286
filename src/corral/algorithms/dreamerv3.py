"""DreamerV3 (Hafner et al. 2023, arXiv:2301.04104): a policy that learns in the imagination of a world model.

A round samples env steps into the replay buffer. An update draws sequences, from which the world model learns; from
each of their states it imagines some steps with the actions of the policy, from which actor and critic learn.
`docs/algorithms/dreamerv3.md` lists the metrics and the implementation details by number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, Unpack

import torch
from torch import Tensor
from torch.nn import functional

from corral.algorithms.actor_critic_settings import refuse_env_units
from corral.algorithms.algorithm import Algorithm
from corral.algorithms.off_policy import OffPolicyAlgorithm, OffPolicyConfig, off_policy_metrics
from corral.core.settings import NonNegativeFloat, NonNegativeSchedule, PositiveFloat, PositiveInt, Probability
from corral.errors import ConfigError, LossError
from corral.learners.losses import Batch
from corral.learners.settings import UpdateSettings
from corral.modules.distributions import categorical_kl
from corral.modules.dreamerv3_module import DreamerV3Module
from corral.modules.memory import module_inputs
from corral.modules.module import Module
from corral.modules.two_hot import drawn

if TYPE_CHECKING:
    from corral.algorithms.config.setter_types import DreamerV3TrainingArgs

GROUPS = ("world_model", "actor", "critic")
FREE_NATS = 1.0
"""KL divergence, in nats, below which neither prior nor posterior learns from it (eq. 5)."""
DYNAMICS_SCALE, REPRESENTATION_SCALE = 0.5, 0.1
PERCENTILES = 0.05, 0.95
"""Percentiles of the imagined returns, between which is the range that advantages are divided by (eq. 12)."""


@dataclass(kw_only=True)
class DreamerV3Config(OffPolicyConfig):
    """Settings of DreamerV3; the settings below and in `OffPolicyConfig` belong to `.training(...)`.

    A batch has `train_batch_size_per_learner / max_seq_len` sequences, rounded down, and at least one; `max_seq_len` is
    a key of `model_config`, by default 64.

    Attributes:
        model_size: Size of all networks: `"XS"`, `"S"`, `"M"`, `"L"` and `"XL"` of the paper, or the smaller `"nano"`,
            `"micro"`, `"mini"` and `"XXS"` of RLlib.
        horizon: Number of imagined steps.
        lambda_: Lambda of the lambda returns in imagination.
        entropy_coeff: Weight of the entropy of the policy.
        return_decay: Decay of the moving averages of the percentiles of returns, per update.
        world_model_lr: Learning rate of the world model, or a schedule over env steps; `None` is `lr`.
        actor_lr: Learning rate of the actor, or a schedule over env steps; `None` is `lr`.
        critic_lr: Learning rate of the critic, or a schedule over env steps; `None` is `lr`.
    """

    DEFAULT_CAPACITY: ClassVar[int] = 1_000_000
    LR_GROUPS: ClassVar[tuple[str, ...]] = GROUPS
    LEARNS_SEQUENCES: ClassVar[bool] = True

    lr: NonNegativeSchedule = 1e-4
    gamma: Probability = 0.997
    train_batch_size_per_learner: PositiveInt = 1024
    grad_clip: PositiveFloat | dict[str, PositiveFloat] | None = field(
        default_factory=lambda: {"world_model": 1000.0, "actor": 100.0, "critic": 100.0}
    )
    rollout_fragment_length: int | Literal["auto"] = 1
    min_sample_timesteps_per_iteration: int = 100  # each with an update
    training_intensity: PositiveFloat | Literal["auto"] | None = 1024.0
    target_network_update_freq: int = 0
    tau: float | Literal["auto"] = 0.02
    model_size: Literal["nano", "micro", "mini", "XXS", "XS", "S", "M", "L", "XL"] = "XS"
    horizon: PositiveInt = 15
    lambda_: Probability = 0.95
    entropy_coeff: NonNegativeFloat = 3e-4
    return_decay: Probability = 0.99
    world_model_lr: NonNegativeSchedule | None = None
    actor_lr: NonNegativeSchedule | None = 3e-5
    critic_lr: NonNegativeSchedule | None = 3e-5

    def training(self, **settings: Unpack[DreamerV3TrainingArgs]) -> Self:
        """Set how to learn, and return the config; see `TrainingSettings` and the settings above."""
        return super().training(**settings)

    @property
    def algo_class(self) -> type[Algorithm]:
        """`DreamerV3`."""
        return DreamerV3

    @property
    def default_module_class(self) -> type[Module]:
        """`DreamerV3Module`."""
        return DreamerV3Module

    @property
    def module_settings(self) -> dict[str, Any]:
        """Settings of the module."""
        return {"model_size": self.model_size}

    @property
    def default_exploration(self) -> dict[str, Any]:
        """Actions sampled from the policy; before learning starts, uniform actions."""
        return {"type": "StochasticSampling", "random_timesteps": self.num_random_steps}

    def check_settings(self) -> None:
        """Refuse settings of other algorithms, which have no effect here."""
        refuse_env_units(self)
        if self.n_step != 1:
            raise ConfigError(
                f"n_step={self.n_step} has no effect on DreamerV3, whose returns are imagined: leave it out, and set "
                "horizon and lambda_."
            )
        if self.burn_in_len:
            raise ConfigError(
                f"burn_in_len={self.burn_in_len}: DreamerV3 learns from all steps of a sequence: leave it out, and "
                "raise max_seq_len in model_config for longer sequences."
            )


class DreamerV3(OffPolicyAlgorithm):
    """DreamerV3."""

    STATE = (*OffPolicyAlgorithm.STATE, "_noise_rng", "_return_ranges")
    OF_MODULES = (*OffPolicyAlgorithm.OF_MODULES, "_return_ranges")
    FIXED_SETTINGS = OffPolicyAlgorithm.FIXED_SETTINGS | {"model_size"}
    CROSSES_EPISODES = True
    METRICS = (
        *("world_model_loss", "observation_loss", "reward_loss", "continue_loss", "dynamics_loss"),
        *("representation_loss", "actor_loss", "critic_loss", "entropy", "vf_mean", "return_mean"),
        *("return_low", "return_high", *off_policy_metrics(*GROUPS)),
    )

    config: DreamerV3Config

    def setup(self) -> None:
        """Make the replay buffers."""
        self._return_ranges: dict[str, list[float]] = {}  # the moving averages of both percentiles
        super().setup()

    def make_loss(self, config: DreamerV3Config) -> Callable[..., tuple[Any, dict[str, Tensor]]]:
        """Return the loss with a config's constants."""
        return partial(
            dreamerv3_loss,
            gamma=config.gamma,
            lambda_=config.lambda_,
            entropy_coeff=config.entropy_coeff,
        )

    def prepare_batch(self, module_id: str, batch: Batch) -> Batch:
        """Return the batch with noise for each row, float32: of the states that were seen, and of imagined steps.

        `noise` is `[B, variables]`, `imagined_noise` is `[B, horizon, variables]`, both uniform, and `action_noise` is
        `[B, horizon, d]`.
        """
        record, rng = self.modules[module_id], self._noise_rng
        module: Any = record.module
        rows, num = (len(batch["rewards"]), record.config.horizon), module.world_model.size.variables
        return {
            **batch,
            "noise": rng.random((rows[0], num), "float32"),
            "imagined_noise": rng.random((*rows, num), "float32"),
            "action_noise": module.distribution.noise(rng, rows),
        }

    def update_module(self, module_id: str, batch: Batch, settings: UpdateSettings) -> dict[str, Any]:
        """Take one update of a module, and keep the moving averages of the percentiles of its returns.

        The first update begins them, with a decay of 0.

        Raises:
            LossError: The loss did not report them.
        """
        low, high = self._return_ranges.get(module_id, (0.0, 0.0))
        decay = self.modules[module_id].config.return_decay if module_id in self._return_ranges else 0.0
        known = {"return_low": low, "return_high": high, "return_decay": decay}
        settings = replace(settings, coefficients={**settings.coefficients, **known})
        result = super().update_module(module_id, batch, settings)
        if missing := [name for name in ("return_low", "return_high") if name not in result]:
            raise LossError(
                f"learners/{module_id}: the loss did not report {missing}, with which the next update divides the "
                "advantages: return (loss, {**reported, ...}) with what default_loss reports."
            )
        self._return_ranges[module_id] = [float(result["return_low"]), float(result["return_high"])]
        return result


class Seen(NamedTuple):
    """What the world model makes of the rows of a batch.

    Attributes:
        h: Recurrent part of the states, `[B, cell]`.
        z: Variables as vectors, `[B, variables * classes]`.
        posterior: Their log-probabilities with the observations, `[B, variables, classes]`.
        prior: Their log-probabilities without them.
    """

    h: Tensor
    z: Tensor
    posterior: Tensor
    prior: Tensor

    @property
    def features(self) -> Tensor:
        """The states as the heads read them, `[B, F]`."""
        return torch.cat([self.h, self.z], -1)


class Imagined(NamedTuple):
    """Imagined steps, without gradients.

    Attributes:
        features: States, `[B, horizon + 1, F]`.
        actions: Module actions, `[B, horizon, ...]`.
        rewards: Rewards with which the states after the first one were reached, `[B, horizon]`.
        continues: Probabilities that the episode continues in these states, `[B, horizon]`.
    """

    features: Tensor
    actions: Tensor
    rewards: Tensor
    continues: Tensor


def dreamerv3_loss(
    module: DreamerV3Module,
    batch: Batch,
    coefficients: Mapping[str, float],
    *,
    gamma: float,
    lambda_: float,
    entropy_coeff: float,
    outputs: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a minibatch; a pure function of weights and columns.

    The loss is the sum of three losses. Each has gradients in the parameters of its own group only, so one backward
    pass computes all of them. The equations refer to arXiv:2301.04104v1.

    Args:
        module: Module with a world model, an actor and a critic.
        batch: Columns `[B, ...]` of sequences of a replay buffer, and the noise of `prepare_batch`, as tensors.
        coefficients: `return_low`, `return_high` and `return_decay`.
        gamma: Discount per step.
        lambda_: Lambda of the lambda returns.
        entropy_coeff: Weight of the entropy of the policy.
        outputs: Receives `features`, the states, `[B, F]`; `imagined_features`, `[B, horizon + 1, F]`; `rewards`,
            `continues` and `returns`, `[B, horizon]`; `values`, `[B, horizon + 1]`.

    Returns:
        The scalar to minimise, and what to report: scalars, and the column `td_error`, float32 `[B]`, how far the value
        of each state is from its lambda return.
    """
    seen = observe_batch(module, batch)
    before, continues = arrivals(batch)
    world_model_loss, reported = model_loss(module, batch, seen, before, continues)
    # Actor and critic learn from each state that was seen, and the world model learns nothing from them.
    dreams = imagine(module, seen.h.detach(), seen.z.detach(), batch["imagined_noise"], batch["action_noise"])
    logits = module.critic(dreams.features)
    bins = module.world_model.bins
    values = bins.mean(logits.detach())
    with torch.no_grad():
        slow_values = bins.mean(module.target_critic(dreams.features[:, :-1]))
        returns = imagined_returns(dreams.rewards, dreams.continues, values, gamma=gamma, lambda_=lambda_)
        low, high = moved_range(returns, coefficients)
        # The probability that the episode still continues, discounted: later steps of a dream may never happen.
        weights = torch.cat([continues.unsqueeze(1), gamma * dreams.continues[:, :-1]], 1).cumprod(1)
    # Actor, eq. 11: the score-function estimator, with advantages in units of the range of returns.
    dist_inputs = module.policy_of(dreams.features[:, :-1]).flatten(0, 1)
    logp = module.distribution.logp(dist_inputs, dreams.actions.flatten(0, 1)).view_as(weights)
    entropy = module.distribution.entropy(dist_inputs).view_as(weights)
    advantages = (returns - values[:, :-1]) / (high - low).clamp(min=1.0)
    actor_loss = -per_step(batch, (weights * (advantages * logp + entropy_coeff * entropy)).mean(1))
    # Critic: towards the returns, and towards its own target, which keeps it from moving too fast.
    errors = bins.cross_entropy(logits[:, :-1], returns, slow_values)
    critic_loss = per_step(batch, (weights * errors).mean(1))
    if outputs is not None:
        outputs |= {"features": seen.features, "imagined_features": dreams.features, "rewards": dreams.rewards}
        outputs |= {"continues": dreams.continues, "returns": returns, "values": values}
    reported |= {
        "actor_loss": actor_loss.detach(),
        "critic_loss": critic_loss.detach(),
        "entropy": entropy.detach().mean(),
        "vf_mean": values.mean(),
        "return_mean": returns.mean(),
        "return_low": low,
        "return_high": high,
        "td_error": (returns - values[:, :-1])[:, 0].abs(),
    }
    return world_model_loss + actor_loss + critic_loss, reported


def per_step(batch: Batch, losses: Tensor) -> Tensor:
    """Return the sum of losses `[B]`, one per row, per step of the batch.

    Rows of the observations after the last steps of sequences have losses too, but learners count steps: divided by
    them, the losses of the parts of a batch, weighted by their steps, are the loss of the batch.
    """
    num_steps: Tensor = batch["learns"].sum()
    return losses.sum() / num_steps


def observe_batch(module: DreamerV3Module, batch: Batch) -> Seen:
    """Return what the world model makes of the rows of a batch of sequences."""
    model, starts = module.world_model, batch["sequence_starts"]
    # The action before an observation is in the row before; before a sequence it is in the stored state.
    actions = module.action_inputs(batch["actions"]).roll(1, 0).masked_fill(starts.unsqueeze(-1), 0.0)
    columns = {"embedded": model.encode(batch["obs"]), "actions": actions, "noise": batch["noise"]}
    padded, state, mask = module_inputs({**batch, "obs": columns})
    h, z, action = module.begin(state)
    first = torch.zeros_like(padded["actions"])
    first[:, 0] = action
    h, z, posterior = (
        part[mask] for part in model.observe(h, z, padded["actions"] + first, padded["embedded"], padded["noise"])
    )
    return Seen(h, z, posterior, model.prior(h))


def arrivals(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return for each row the row of the step that led there, and whether the episode continues, float32 `[B]`.

    The first row of a sequence has no such step: it is given as its own, and the episode continues.
    """
    rows = torch.arange(len(batch["rewards"]), device=batch["rewards"].device)
    before = torch.where(batch["sequence_starts"], rows, rows - 1)
    return before, 1.0 - (batch["terminated"][before] & (before != rows)).float()


def model_loss(
    module: DreamerV3Module, batch: Batch, seen: Seen, before: Tensor, continues: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of the world model, eqs. 4 and 5, and its parts.

    Args:
        module: The module.
        batch: Columns `[B, ...]`.
        seen: The states of the rows.
        before: Row of the step that led to each row, int64 `[B]`.
        continues: Whether the episode continues there, float32 `[B]`.
    """
    model, features = module.world_model, seen.features
    has_reward = ~batch["sequence_starts"]
    errors = model.bins.cross_entropy(model.reward_head(features), batch["rewards"][before])
    # The divergence trains the prior more than the posterior, which would otherwise follow a bad prior.
    dynamics, representation = (
        categorical_kl(posterior.flatten(0, 1), prior.flatten(0, 1)).view(posterior.shape[:2]).sum(1)
        for posterior, prior in ((seen.posterior.detach(), seen.prior), (seen.posterior, seen.prior.detach()))
    )
    of_continues = functional.binary_cross_entropy_with_logits(model.continues(features), continues, reduction="none")
    by_row = {
        "observation_loss": model.observation_loss(features, batch["obs"]),
        "reward_loss": errors * has_reward,
        "continue_loss": of_continues,
        "dynamics_loss": dynamics.clamp(min=FREE_NATS),
        "representation_loss": representation.clamp(min=FREE_NATS),
    }
    parts = {name: per_step(batch, losses) for name, losses in by_row.items()}
    predictions = parts["observation_loss"] + parts["reward_loss"] + parts["continue_loss"]
    divergence = DYNAMICS_SCALE * parts["dynamics_loss"] + REPRESENTATION_SCALE * parts["representation_loss"]
    loss = predictions + divergence
    return loss, {"world_model_loss": loss.detach(), **{name: part.detach() for name, part in parts.items()}}


@torch.no_grad()
def imagine(module: DreamerV3Module, h: Tensor, z: Tensor, uniform: Tensor, noise: Tensor) -> Imagined:
    """Return imagined steps with the actions of the policy.

    Args:
        module: The module.
        h: Recurrent part of the first states, `[B, cell]`.
        z: Their variables as vectors.
        uniform: Uniform numbers that draw the variables, `[B, horizon, variables]`.
        noise: Noise that draws the actions, `[B, horizon, d]`.
    """
    model, features, actions = module.world_model, [torch.cat([h, z], -1)], []
    for of_state, of_action in zip(uniform.unbind(1), noise.unbind(1), strict=True):
        actions.append(module.distribution.sample(module.policy_of(features[-1]), of_action))
        h = model.advance(h, z, module.action_inputs(actions[-1]))
        z = model.vectors(drawn(model.prior(h), of_state))
        features.append(torch.cat([h, z], -1))
    states = torch.stack(features, 1)
    after = states[:, 1:]
    return Imagined(states, torch.stack(actions, 1), model.rewards(after), model.continues(after).sigmoid())


def imagined_returns(rewards: Tensor, continues: Tensor, values: Tensor, *, gamma: float, lambda_: float) -> Tensor:
    """Return the lambda returns of imagined states, `[B, horizon]` (eq. 7).

    The return of step t is `r_t+1 + gamma * c_t+1 * ((1 - lambda) * v_t+1 + lambda * return_t+1)`, and the last value
    takes the place of the return after the horizon.

    Args:
        rewards: Rewards with which the states after the first one were reached, `[B, horizon]`.
        continues: Probabilities that the episode continues in these states, `[B, horizon]`.
        values: Values of all states, `[B, horizon + 1]`.
        gamma: Discount per step.
        lambda_: Lambda.
    """
    discounts = gamma * continues
    after, found = values[:, -1], []
    for t in reversed(range(rewards.shape[1])):
        after = rewards[:, t] + discounts[:, t] * torch.lerp(values[:, t + 1], after, lambda_)
        found.append(after)
    return torch.stack(found[::-1], 1)


def moved_range(returns: Tensor, coefficients: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """Return the moving averages of the percentiles of returns, with the percentiles of these returns (eq. 12)."""
    decay = coefficients["return_decay"]
    flat = returns.flatten().sort().values
    found = []
    for share, name in zip(PERCENTILES, ("return_low", "return_high"), strict=True):
        place = share * (len(flat) - 1)
        below = int(place)
        above = min(below + 1, len(flat) - 1)
        percentile = torch.lerp(flat[below], flat[above], place - below)
        found.append(decay * coefficients[name] + (1 - decay) * percentile)
    return found[0], found[1]
