"""Deep Q-networks (Mnih et al. 2015, doi:10.1038/nature14236) and later additions, on off_policy.py.

A round samples a few env steps into the replay buffer, and takes gradient steps on batches drawn from it. Each addition
has its own setting; all of them together, with n_step=3, are Rainbow (Hessel et al. 2018, arXiv:1710.02298).
`docs/algorithms/dqn.md` lists the metrics and the implementation details by number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Unpack

import torch
from torch import Tensor
from torch.nn import functional

from corral.algorithms.algorithm import Algorithm
from corral.algorithms.off_policy import OffPolicyAlgorithm, OffPolicyConfig, off_policy_metrics
from corral.core.schedules import Schedule
from corral.core.settings import Need, NonNegativeFloat, PositiveFloat, PositiveInt
from corral.core.tree import map_tree
from corral.errors import ConfigError
from corral.learners.losses import Batch, Loss
from corral.modules.critics import projected
from corral.modules.memory import at_rows, burn_in, find_learned_steps, module_inputs
from corral.modules.module import Module
from corral.modules.q_module import QModule
from corral.modules.recurrent_q_module import RecurrentQModule

if TYPE_CHECKING:
    from corral.algorithms.config.setter_types import DQNTrainingArgs


HAS_ATOMS = Need("num_atoms above 1", lambda config: config.num_atoms > 1)


@dataclass(kw_only=True)
class DQNConfig(OffPolicyConfig):
    """Settings of DQN; the settings below and in `OffPolicyConfig` belong to `.training(...)`.

    Attributes:
        double_q: Whether the network chooses the next action that the target network values (van Hasselt et al. 2016,
            arXiv:1509.06461).
        dueling: Whether value and advantages have separate streams (Wang et al. 2016, arXiv:1511.06581).
        noisy: Whether layers have learned noise, instead of epsilon-greedy actions (Fortunato et al. 2018,
            arXiv:1706.10295).
        sigma0: Initial noise of noisy layers.
        num_atoms: Number of atoms of the distribution of returns, such as 51 (Bellemare et al. 2017, arXiv:1707.06887);
            1 learns the mean only.
        v_min: Smallest return of the distribution.
        v_max: Largest return of the distribution.
        td_error_loss_fn: Loss of the TD error: `"huber"` (quadratic up to an error of 1, then linear) or `"mse"`, for
            one atom.
    """

    LEARNS_SEQUENCES: ClassVar[bool] = True
    DEFAULT_EXPLORATION: ClassVar[dict[str, Any]] = {
        "type": "EpsilonGreedy",
        "initial_epsilon": 1.0,
        "final_epsilon": 0.02,
        "epsilon_timesteps": 10_000,
    }

    # A rate that falls keeps policies good that are good already, and with layer normalisation fewer env steps are
    # enough: see benchmarks/QUALITY.md.
    lr: Schedule = field(default_factory=lambda: [(0.0, 1e-3), (30_000.0, 2e-4), (60_000.0, 1e-4)])
    tau: float | Literal["auto"] = "auto"
    target_network_update_freq: int = 0
    train_batch_size_per_learner: int = 128
    grad_clip: float | dict[str, float] | None = 10.0
    rollout_fragment_length: int | Literal["auto"] = 4
    # One update for every `rollout_fragment_length` env steps, also with several sub-envs.
    training_intensity: PositiveFloat | Literal["auto"] | None = "auto"
    n_step: int | tuple[int, int] = 3
    double_q: bool = True
    dueling: bool = False
    noisy: bool = False
    sigma0: Annotated[NonNegativeFloat, Need("noisy=True", attrgetter("noisy"))] = 0.5
    num_atoms: PositiveInt = 1
    v_min: Annotated[float, HAS_ATOMS] = -10.0
    v_max: Annotated[float, HAS_ATOMS] = 10.0
    td_error_loss_fn: Annotated[Literal["huber", "mse"], Need("num_atoms=1", lambda config: config.num_atoms == 1)] = (
        "huber"
    )

    def training(self, **settings: Unpack[DQNTrainingArgs]) -> Self:
        """Set how to learn, and return the config; see `TrainingSettings` and the settings above."""
        return super().training(**settings)

    @property
    def algo_class(self) -> type[Algorithm]:
        """`DQN`."""
        return DQN

    @property
    def default_module_class(self) -> type[Module]:
        """`QModule`, or `RecurrentQModule` with `use_lstm` or `use_gru`."""
        return RecurrentQModule if self.asks_for_memory else QModule

    @property
    def module_settings(self) -> dict[str, Any]:
        """Settings of the Q-network; without memory, it has layer normalisation where `model_config` does not say."""
        form = {name: getattr(self, name) for name in ("dueling", "noisy", "sigma0", "num_atoms", "v_min", "v_max")}
        return {**form, "is_normalized": not (self.asks_for_memory or self.__dict__.get("_has_plain_networks"))}

    def keep_networks_of(self, policies: Mapping[str, Any]) -> None:
        """Leave out the layer normalisation if the networks of a checkpoint have none; earlier versions had none."""
        normalized = [each["model_config"].get("is_normalized") for each in policies.values()]
        self.__dict__["_has_plain_networks"] = not any(normalized)

    @property
    def default_exploration(self) -> dict[str, Any]:
        """Epsilon-greedy.

        With noisy layers, which explore themselves, epsilon is 0. After updates from recorded data it begins at its
        last value.
        """
        if self.noisy:
            return {**self.DEFAULT_EXPLORATION, "initial_epsilon": 0.0, "final_epsilon": 0.0}
        if self.num_offline_updates != 0:
            return {**self.DEFAULT_EXPLORATION, "initial_epsilon": self.DEFAULT_EXPLORATION["final_epsilon"]}
        return dict(self.DEFAULT_EXPLORATION)

    def check_settings(self) -> None:
        """Refuse contradictions of these settings; see `AlgorithmConfig.validate`."""
        if self.num_atoms > 1 and self.v_min >= self.v_max:
            raise ConfigError(f"v_min={self.v_min} must be below v_max={self.v_max}: the atoms are between them.")
        starts = [name for name in self.model_config if name.startswith("head_") and "_initializer" in name]
        if self.noisy and starts and self.origin is None:
            raise ConfigError(f"model_config: {starts[0]} has no effect on noisy layers: leave it out, or noisy=True.")


class DQN(OffPolicyAlgorithm):
    """Deep Q-networks."""

    FIXED_SETTINGS = OffPolicyAlgorithm.FIXED_SETTINGS | {"dueling", "noisy", "sigma0", "num_atoms", "v_min", "v_max"}
    FIRST_SETTINGS = OffPolicyAlgorithm.FIRST_SETTINGS | {"sigma0"}
    SEEKS_VALUES = False
    LEARNS_TENSORS = True
    METRICS = ("qf_mean", "qf_min", "qf_max", *off_policy_metrics("default"))

    config: DQNConfig

    def make_loss(self, config: DQNConfig) -> Loss:
        """Return the loss with a config's constants."""
        if config.num_atoms > 1:
            return partial(c51_loss, double_q=config.double_q)
        huber = config.td_error_loss_fn == "huber"
        return partial(dqn_loss, double_q=config.double_q, huber=huber)


def dqn_loss(
    module: QModule,
    batch: Batch,
    coefficients: Mapping[str, float],
    *,
    double_q: bool,
    huber: bool,
    outputs: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a minibatch; a pure function of weights and columns.

    The target is the discounted sum of the rewards and, where the episode did not terminate, the discounted value of
    the best next action. The target network gives this value. The target network also chooses the action (Mnih et al.
    2015), or with `double_q` the network does (van Hasselt et al. 2016, eq. 4).

    Args:
        module: Module with Q-values and target values.
        batch: Columns `[B, ...]` of a replay buffer, as tensors.
        coefficients: Not used.
        double_q: Whether the network chooses the next action.
        huber: Whether the loss is linear for errors above 1; otherwise it is quadratic for all errors.
        outputs: Receives `q_values`, `[B, n]`, and `q_taken` and `targets`, `[B]`.

    Returns:
        The scalar to minimise, and what to report: scalars, and the column `td_error`, float32 `[B]`.
    """
    module.draw_noise()
    steps, q_values, next_values, choosers = outputs_at_steps(module.q_values, module, batch, double_q=double_q)
    q_taken = q_values.gather(1, steps["actions"].unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        next_value = next_values.gather(1, choosers.argmax(1, keepdim=True)).squeeze(1)
        targets = steps["rewards"] + steps["discounts"] * (~steps["terminated"]) * next_value
    if outputs is not None:
        outputs |= {"q_values": q_values, "q_taken": q_taken, "targets": targets}
    if huber:
        losses = functional.smooth_l1_loss(q_taken, targets, reduction="none")
    else:
        losses = functional.mse_loss(q_taken, targets, reduction="none")
    loss = (steps["weights"] * losses).mean()
    return loss, _reported(batch, q_taken.detach(), q_taken.detach() - targets)


def c51_loss(
    module: QModule,
    batch: Batch,
    coefficients: Mapping[str, float],
    *,
    double_q: bool,
    outputs: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of distributional Q-learning: the cross-entropy to the projected target.

    This is algorithm 1 of Bellemare et al. 2017. Arguments and results are the same as for `dqn_loss`; the column
    `td_error` holds the cross-entropies, which serve as priorities (Hessel et al. 2018, "The Integrated Agent"), and
    `outputs` receives `logits`, `[B, n, atoms]`, and the probabilities `targets`, `[B, atoms]`.
    """
    module.draw_noise()
    steps, logits, next_logits, choosers = outputs_at_steps(module.logits, module, batch, double_q=double_q)
    rows = torch.arange(len(logits), device=logits.device)
    logp = logits[rows, steps["actions"]].log_softmax(-1)
    with torch.no_grad():
        means = module.mask_outputs(steps["next_obs"], choosers.softmax(-1) @ module.atoms)
        next_probs = next_logits[rows, means.argmax(1)].softmax(-1)
        discounts = steps["discounts"] * (~steps["terminated"])
        returns = steps["rewards"].unsqueeze(1) + discounts.unsqueeze(1) * module.atoms
        targets = projected(returns, next_probs, module.atoms)
    if outputs is not None:
        outputs |= {"logits": logits, "targets": targets}
    losses = -(targets * logp).sum(-1)
    loss = (steps["weights"] * losses).mean()
    return loss, _reported(batch, logp.detach().exp() @ module.atoms, losses.detach())


def outputs_at_steps(
    function: Callable[..., Tensor], module: QModule, batch: Batch, *, double_q: bool
) -> tuple[Batch, Tensor, Tensor, Tensor]:
    """Return the steps to learn from, and what the networks give for their observations and for the next observations.

    In a batch for a module with memory, the observation from which a step bootstraps is `num_steps` rows further in its
    sequence. The target network unrolls the sequences from the same stored states (Kapturowski et al. 2019).

    Args:
        function: `module.q_values` or `module.logits`.
        module: The module.
        batch: Columns of a replay buffer; with memory, the columns of `ReplayBuffer.sample_sequences`.
        double_q: Whether the network chooses the next action.

    Returns:
        The columns of the steps; the network's outputs for them, `[B, n, ...]`; the target network's outputs for the
        next observations; and the outputs that choose the next action, which are of the network or the target network.
    """
    if "sequence_starts" not in batch:
        outputs = function(batch["obs"])
        with torch.no_grad():
            next_outputs = function(batch["next_obs"], target=True)
            return batch, outputs, next_outputs, function(batch["next_obs"]) if double_q else next_outputs
    at = find_learned_steps(batch)
    outputs = function(*module_inputs(burn_in(module, batch)))
    with torch.no_grad():
        next_outputs = function(*module_inputs(burn_in(module, batch, target=True)), target=True)[at.next_places]
    steps: Batch = {name: batch[name][at.rows] for name in ("actions", "rewards", "discounts", "terminated", "weights")}
    steps["next_obs"] = map_tree(lambda leaf: leaf[at.next_rows], batch["obs"])
    return steps, outputs[at.places], next_outputs, outputs.detach()[at.next_places] if double_q else next_outputs


def _reported(batch: Batch, q_taken: Tensor, td_error: Tensor) -> dict[str, Tensor]:
    smallest, largest = q_taken.aminmax()
    td_error = at_rows(batch, td_error) if "learns" in batch else td_error
    return {"qf_mean": q_taken.mean(), "qf_min": smallest, "qf_max": largest, "td_error": td_error}
