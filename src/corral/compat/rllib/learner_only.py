"""Modules that exist in learners only, such as models of curiosity: trained on what connectors of learners pass them.

They take their steps in the process of the algorithm, each with its own optimizer, before the other modules learn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from corral.compat.rllib.modules import MultiRLModuleSpec, SelfSupervisedLossAPI
from corral.core.seeding import get_rng, set_rng
from corral.core.tree import map_tree
from corral.errors import ConfigError
from corral.learners.learner_state import get_learner_state, set_learner_state
from corral.learners.losses import clip_gradients
from corral.learners.ready_optimizers import ready_optimizers


def learner_only_modules(config: Any, device: Any) -> dict[str, Any]:
    """Return new modules for the specs with `learner_only=True`, by id.

    Args:
        config: RLlib's config.
        device: Device of the modules.

    Raises:
        ConfigError: A module has no loss of its own.
    """
    spec = config.rl_module_spec
    specs = spec.rl_module_specs if isinstance(spec, MultiRLModuleSpec) else {}
    found = {}
    for module_id, part in specs.items() if isinstance(specs, Mapping) else ():
        if not part.learner_only:
            continue
        module = part.build()
        if not isinstance(module, SelfSupervisedLossAPI):
            raise ConfigError(
                f"rl_module_spec: {module_id!r} is in learners only, and {type(module).__name__} has no method "
                "compute_self_supervised_loss: derive it from SelfSupervisedLossAPI."
            )
        found[module_id] = module.to(device)  # type: ignore[attr-defined]
    return found


class LearnerOnly:
    """Trains the modules of a learner that no runner has.

    Args:
        learner: The instance of the user's learner class.

    Attributes:
        modules: The modules by id.
    """

    def __init__(self, learner: Any) -> None:
        """Make the optimizers."""
        self._learner = learner
        self.modules = {
            name: module for name, module in learner.module.items() if getattr(module, "learner_only", False)
        }
        self._optimizers = {
            name: ready_optimizers(
                {name: torch.optim.Adam(module.parameters(), lr=_lr(learner.config.get_config_for_module(name)))}
            )
            for name, module in self.modules.items()
        }
        self._rng = np.random.default_rng(learner.config.seed or 0)

    def learn(self, batch: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """Take gradient steps on the columns of the modules in a batch, and return what to report by module id."""
        results = {}
        for name in (name for name in self.modules if name in batch):  # in one order, for the generator's sake
            losses = [self._step(name, part) for part in self._minibatches(batch[name])]
            means = self._learner.metrics.take_means(name)
            results[name] = {
                "total_loss": sum(losses) / len(losses),
                **{key: float(each) for key, each in means.items()},
            }
        return results

    def _minibatches(self, columns: Mapping[str, Any]) -> Any:
        config = self._learner.config
        size = len(next(iter(columns.values())))
        step = min(size, config.minibatch_size or size)
        for _ in range(config.num_epochs or 1):
            order = torch.from_numpy(self._rng.permutation(size))
            for start in range(0, size - step + 1, step):
                rows = order[start : start + step]
                yield {key: map_tree(lambda leaf, rows=rows: leaf[rows], column) for key, column in columns.items()}

    def _step(self, name: str, minibatch: dict[str, Any]) -> float:
        module, optimizer = self.modules[name], self._optimizers[name]
        config = self._learner.config.get_config_for_module(name)
        loss = module.compute_self_supervised_loss(
            learner=self._learner,
            module_id=name,
            config=config,
            batch=minibatch,
            fwd_out=module.forward_train(minibatch),
        )
        optimizer.zero_grad()
        loss.backward()
        clip_gradients({"": list(module.parameters())}, [""], config.grad_clip, config.grad_clip_by)
        optimizer.step()
        return float(loss.detach())

    def get_state(self) -> dict[str, Any]:
        """Return weights and states of the optimizers by module id, and the state of the shuffling."""
        return {**get_learner_state(self.modules, self._optimizers), "rng": get_rng(self._rng)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        set_learner_state(self.modules, self._optimizers, state)
        set_rng(self._rng, state["rng"])


def _lr(config: Any) -> float:
    if not isinstance(config.lr, (int, float)):
        raise ConfigError(f"lr={config.lr!r:.60}: a module of learners only takes one number.")
    return float(config.lr)
