"""Modules, losses and callbacks that the learners of a group get in their processes, where pytest is not imported."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from corral import APPOConfig, DQNConfig, IMPALAConfig, PPOConfig, SACConfig
from corral.algorithms.config.config import AlgorithmConfig
from corral.callbacks.dispatch import Dispatcher
from corral.learners.distributed import Peers
from corral.learners.learner import Learner
from corral.learners.learner_group import LearnerGroup
from corral.learners.losses import Batch, Loss
from corral.learners.settings import LearningSpec, UpdateSettings
from corral.modules.module import ActorCritic, Module
from corral.modules.q_module import QModule
from corral.modules.sac_module import SACModule

LossResult = tuple[Tensor, dict[str, Tensor]]
Weights = dict[str, dict[str, Any]]


class Net(Module):
    """A small net with what is awkward to average: two dtypes, a parameter that few rows use, and a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2), {})
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.rare = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))

    def value(self, obs: Tensor) -> Tensor:
        values = self.layers(obs).squeeze(-1).double() * self.scale[0] + self.scale[1] + self.frozen
        if self.training:
            self.count += len(obs)
        is_rare = obs[:, 0] > 5
        if is_rare.any():
            values = values + self.rare * is_rare
        return values.float()


def squares(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> LossResult:
    errors = (module.value(batch["obs"]) - batch["y"]).square()
    return errors.mean(), {"mean_y": batch["y"].mean()}


def squares_and_large(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> LossResult:
    """Report the mean of large `y` first, where there are any."""
    loss, reported = squares(module, batch, coefficients)
    large = batch["y"][batch["y"] > 5]
    return loss, {"large_y": large.mean(), **reported} if len(large) else reported


def roots(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> LossResult:
    """The loss is finite, and its gradient is not where `y` is 7: the root's slope at 0 is infinite."""
    values = module.value(batch["obs"])
    return (values * (batch["y"] != 7)).abs().sqrt().mean(), {}


class Recorder:
    """A loss that writes down which rows each minibatch held."""

    def __init__(self) -> None:
        self.minibatches: list[list[int]] = []

    def __call__(self, module: Module, batch: Batch, coefficients: Mapping[str, float]) -> LossResult:
        self.minibatches.append(batch["row"].tolist())
        return module.value(batch["obs"]).mean(), {}


# Algorithms' own modules and losses, small.

OBS = spaces.Box(-1, 1, (3,), np.float32)
SMALL = {"fcnet_hiddens": (4, 4), "fcnet_activation": "tanh"}


def seeded(make: Callable[..., Module], *args: Any) -> Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(*args)


def ppo_module() -> Module:
    return seeded(ActorCritic, OBS, spaces.Box(-1, 1, (2,), np.float32), SMALL)


def dqn_module() -> Module:
    return seeded(QModule, OBS, spaces.Discrete(3), SMALL)


def sac_module() -> Module:
    return seeded(SACModule, OBS, spaces.Box(-1, 1, (2,), np.float32), {**SMALL, "initial_alpha": 0.3})


def algorithm_batch(name: str, size: int = 12) -> Batch:
    """Return a batch as the algorithm's loss expects it, the same for each size."""
    rng = np.random.default_rng(size)

    def normal(*shape: int) -> Any:
        return rng.standard_normal((size, *shape), dtype=np.float32)

    if name in ON_POLICY:
        columns = ("logp", "values", "advantages", "value_targets")
        inputs = {"obs": normal(3), "actions": normal(2), "dist_inputs": 0.1 * normal(4)}
        if name == "appo":
            inputs["target_dist_inputs"] = 0.1 * normal(4)
        return {**inputs, **{column: normal() for column in columns}}
    batch = {
        "obs": normal(3),
        "next_obs": normal(3),
        "rewards": normal(),
        "terminated": rng.random(size) < 0.3,
        "discounts": np.full(size, 0.9, np.float32),
        "weights": np.ones(size, np.float32),
    }
    if name == "dqn":
        return {**batch, "actions": rng.integers(0, 3, size)}
    return {**batch, **{column: normal(2) for column in ("actions", "noise", "next_noise")}}


ALGORITHMS: dict[str, tuple[Callable[[], Module], AlgorithmConfig]] = {
    "ppo": (ppo_module, PPOConfig()),
    "impala": (ppo_module, IMPALAConfig()),
    "appo": (ppo_module, APPOConfig()),
    "dqn": (dqn_module, DQNConfig()),
    "sac": (sac_module, SACConfig()),
}
ON_POLICY = ("ppo", "impala", "appo")
PPO_COEFFICIENTS = {"kl_coeff": 0.1, "entropy_coeff": 0.01, "clip_param": 0.2}


def algorithm_loss(name: str) -> Loss:
    """Return the loss of an algorithm with the default settings."""
    config = ALGORITHMS[name][1]
    return config.algo_class.make_loss(SimpleNamespace(), config)  # type: ignore[arg-type]


class DeterministicActorCritic(Module):
    """The module of a small TD3: an actor, a critic, and slowly moving copies of both."""

    def __init__(self) -> None:
        super().__init__(OBS, spaces.Box(-1, 1, (2,), np.float32), {"action_bounds": "squash"})
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.actor = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2), nn.Tanh())
            self.critic = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.target_critic = copy.deepcopy(self.critic).requires_grad_(False)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        return {"critic": list(self.critic.parameters()), "actor": list(self.actor.parameters())}

    def update_target(self, tau: float) -> None:
        for target, source in ((self.target_actor, self.actor), (self.target_critic, self.critic)):
            torch._foreach_lerp_(list(target.parameters()), list(source.parameters()), tau)


def td3_loss(module: DeterministicActorCritic, batch: Batch, coefficients: Mapping[str, float]) -> Any:
    """Return a loss per group: the critic's depends on no actor that learns, the actor's on the critic."""

    def q(critic: nn.Module, obs: Tensor, actions: Tensor) -> Tensor:
        values: Tensor = critic(torch.cat([obs, actions], -1))
        return values.squeeze(-1)

    with torch.no_grad():
        next_q = q(module.target_critic, batch["next_obs"], module.target_actor(batch["next_obs"]))
        targets = batch["rewards"] + batch["discounts"] * ~batch["terminated"] * next_q
    errors = q(module.critic, batch["obs"], batch["actions"].tanh()) - targets
    actor_loss = -q(module.critic, batch["obs"], module.actor(batch["obs"])).mean()
    return {"critic": errors.square().mean(), "actor": actor_loss}, {"td_error_mean": errors.detach().mean()}


def update_target(module: Any, tau: float) -> None:
    module.update_target(tau)


def td3_batch(seed: int) -> Batch:
    """Return a batch of 12 rows, other ones for each seed."""
    return {name: column[12 * seed : 12 * (seed + 1)] for name, column in algorithm_batch("sac", 120).items()}


def td3_training_step(group: LearnerGroup, batch: Batch, number: int) -> dict[str, Any]:
    """Step the critic; each second time, the actor and the targets too."""
    groups = ("critic", "actor") if number % 2 == 0 else ("critic",)
    results = group.update({"m": batch}, {"m": UpdateSettings(lr=0.01, groups=groups)})
    if "actor" in groups:
        group.foreach_module("m", update_target, 0.1)
    return results["m"]


def td3_update_at_once(group: LearnerGroup, batch: Batch, num_steps: int) -> dict[str, Any]:
    """Take several gradient steps of the critic, and half as many of the actor and the targets, in one update."""
    size = len(batch["rewards"]) // num_steps // group.num_learners
    settings = {"minibatch_size": size, "shuffle": False, "every": {"actor": 2}}
    return update(group, batch, lr=0.01, after_step=update_target_with_actor, **settings)


def td3_reference(batches: Sequence[Batch], optimizer_class: type[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Return the weights after the same steps, written by hand for torch."""
    module = DeterministicActorCritic()
    critic_optimizer = optimizer_class(module.critic.parameters(), lr=0.01)  # type: ignore[call-arg]
    actor_optimizer = optimizer_class(module.actor.parameters(), lr=0.01)  # type: ignore[call-arg]
    for number, batch in enumerate(batches, 1):
        losses, _ = td3_loss(module, {name: torch.from_numpy(column) for name, column in batch.items()}, {})
        critic_optimizer.zero_grad()
        losses["critic"].backward()
        actor_optimizer.zero_grad()
        gradients = torch.autograd.grad(losses["actor"], list(module.actor.parameters()))
        critic_optimizer.step()
        if number % 2 == 0:
            for parameter, gradient in zip(module.actor.parameters(), gradients, strict=True):
                parameter.grad = gradient
            actor_optimizer.step()
            with torch.no_grad():
                for target, source in ((module.target_actor, module.actor), (module.target_critic, module.critic)):
                    for old, new in zip(target.parameters(), source.parameters(), strict=True):
                        old.copy_(0.9 * old + 0.1 * new)
    return {name: value.detach() for name, value in module.state_dict().items()}


def update_target_with_actor(module: Any, groups: Collection[str]) -> None:
    if "actor" in groups:
        module.update_target(0.1)


def freeze(module: Module, names: Collection[str]) -> None:
    """Freeze the parameters of these names and the targets, which never learn, and no others."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in names and not name.startswith("target_"))


class SignedMomentum(torch.optim.Optimizer):
    """An optimizer of a user: steps by the sign of a running mean of the gradients, with weight decay."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 0.5)
                    parameter.mul_(0.999).sub_(mean.sign(), alpha=group["lr"])


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "adagrad": (torch.optim.Adagrad, {"weight_decay": 0.01}),
    "own": (SignedMomentum, {}),
}
# Every optimizer trains PPO, and DQN in NumPy; the other algorithms need not try them all.
OTHER_PAIRS = [
    f"{algorithm}-{optimizer}"
    for algorithm in ("impala", "appo", "sac", "td3")
    for optimizer in ("adamw", "sgd", "nadam", "own", "rmsprop", "without default lr")
]


@dataclass(frozen=True)
class StopAbove:
    """Ends the epochs once a scalar is above a limit."""

    name: str
    limit: float

    def __call__(self, scalars: Mapping[str, float]) -> bool:
        return scalars[self.name] > self.limit


def regression(size: int) -> Batch:
    rng = np.random.default_rng(size)
    obs = rng.normal(size=(size, 3)).astype(np.float32)
    obs[-1, 0] = 6  # the one row that uses `rare`, in the last shard
    return {"obs": obs, "y": (obs @ [2.0, -1.0, 0.5] + rng.normal(size=size)).astype(np.float32)}


def make_learner(
    module: Module,
    loss: Loss,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam,
    optimizer_config: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Learner:
    """Make a learner of one module, "m", on the CPU."""
    spec = LearningSpec(loss, optimizer_class, optimizer_config or {})
    return Learner({"m": module}, {"m": spec}, device="cpu", **settings)


def update(learner: Learner | LearnerGroup, batch: Batch, **settings: Any) -> dict[str, Any]:
    """Update the module "m" and return its results."""
    return learner.update({"m": batch}, {"m": UpdateSettings(**settings)})["m"]


class MakeLearner:
    """Makes the learner of one rank; `None` is the learner of the driver, or a single one."""

    def __init__(
        self,
        num_learners: int,
        loss: Callable[..., Any] = squares,
        make_module: Callable[[], Module] = Net,
        **settings: Any,
    ) -> None:
        self.num_learners, self._loss, self._make_module, self._settings = num_learners, loss, make_module, settings

    def __call__(self, rank: int | None = None) -> Learner:
        settings = dict(self._settings)
        functions = settings.pop("callbacks", {})
        on_error = settings.pop("on_error", "raise")
        if rank is not None:
            settings |= {"seed": rank, "callbacks": Dispatcher([], functions, on_error)}
        learner = make_learner(self._make_module(), self._loss, **settings)
        if rank is not None and self.num_learners > 1:
            learner.set_peers(Peers(rank, self.num_learners, learner.device))
        return learner


# Called in the workers.


def rebuild(learner: Learner, make: MakeLearner, rank: int) -> None:
    """Become another learner, which spares the start of a process."""
    if learner.peers is not None:
        learner.peers.leave()
    learner.__dict__ = make(rank).__dict__


def weights_of(learner: Learner) -> Weights:
    return {key: {name: value.copy() for name, value in named.items()} for key, named in learner.get_weights().items()}


def minibatches_of(learner: Learner) -> list[list[int]]:
    loss = learner._parts["m"].objectives["main"].loss
    assert isinstance(loss, Recorder)
    return loss.minibatches


def pid_of(learner: Learner) -> int:
    return os.getpid()


# Callbacks.


def log_rows(train_batch: Any, metrics_logger: Any) -> None:
    metrics_logger.log_value("rows", len(train_batch["y"]), reduce="sum")


def count_gradients(gradients: Any, metrics_logger: Any) -> None:
    metrics_logger.log_value("gradients", 1, reduce="sum")


def count_end(metrics_logger: Any, result: dict[str, Any], learner: Learner) -> None:
    metrics_logger.log_value("ends", 1, reduce="sum")
    assert learner.peers is not None
    result["rank"] = learner.peers.rank
    result["who"] = f"learner of rank {learner.peers.rank}"
    if learner.peers.rank == 1:
        result["only_in_one"] = 5.0


def ones_of_rank(gradients: dict[str, Tensor], learner: Learner) -> None:
    """Make all gradients the gradients of a number that differs between the learners: 1, 2, ..."""
    assert learner.peers is not None
    for gradient in gradients.values():
        gradient.fill_(learner.peers.rank + 1.0)


def raise_in_second(learner: Learner) -> None:
    if learner.peers is not None and learner.peers.rank == 1:
        raise ZeroDivisionError("the second learner has had enough")


def die_in_second(learner: Learner) -> None:
    if learner.peers is not None and learner.peers.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
