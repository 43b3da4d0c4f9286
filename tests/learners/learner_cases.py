"""Modules, losses and callbacks that the learners of a group get in their processes, where pytest is not imported."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from corral.callbacks.dispatch import Dispatcher
from corral.learners.distributed import Peers
from corral.learners.learner import Learner
from corral.learners.learner_group import LearnerGroup
from corral.learners.losses import Batch, Loss
from corral.learners.settings import LearningSpec, UpdateSettings
from corral.modules.module import Module

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
            learner.peers = Peers(rank, self.num_learners, learner.device)
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
    loss = learner._losses["m"]
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
    """Make all gradients those of a number that differs between the learners: 1, 2, ..."""
    assert learner.peers is not None
    for gradient in gradients.values():
        gradient.fill_(learner.peers.rank + 1.0)


def raise_in_second(learner: Learner) -> None:
    if learner.peers is not None and learner.peers.rank == 1:
        raise ZeroDivisionError("the second learner has had enough")


def die_in_second(learner: Learner) -> None:
    if learner.peers is not None and learner.peers.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
