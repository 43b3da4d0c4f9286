"""The learners of an algorithm behind one object. There is one learner today, in this process."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.core.learner import Batch, Learner
from corral.core.module import Module
from corral.core.tree import Tree
from corral.metrics.logger import MetricsLogger
from corral.metrics.timers import Timers


class LearnerGroup:
    """Updates the modules and hands out their weights with a version number.

    Attributes:
        weights_version: Counts the updates; 0 is the random initialisation.
    """

    def __init__(self, learner: Learner) -> None:
        """Take the embedded learner."""
        self._learner = learner
        self.weights_version = 0

    def update(self, batches: dict[str, Batch], **settings: Any) -> dict[str, dict[str, float]]:
        """Take gradient steps and move the version on; see `Learner.update`."""
        try:
            return self._learner.update(batches, **settings)
        finally:
            self.weights_version += 1  # also after an error: steps before it have changed the weights

    def values(self, module_id: str, obs: Tree) -> NDArray[np.float32]:
        """Return state values `[B]` of observations `[B, ...]`."""
        return self._learner.values(module_id, obs)

    def get_weights(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Return the weights by module id and parameter name."""
        return self._learner.get_weights()

    def collect_metrics(self, metrics: MetricsLogger, timers: Timers) -> None:
        """Aggregate what the learner's callbacks logged since the last call, under `learners`, and what time they took.

        They run within the time of learning.
        """
        seconds, self._learner.callbacks_s = self._learner.callbacks_s, 0.0
        timers.add({"learning": -seconds, "callbacks": seconds})
        metrics.aggregate([self._learner.metrics.take()], key="learners")

    @property
    def num_callback_errors(self) -> int:
        """Exceptions so far that `on_error="log"` kept from ending the run."""
        return self._learner.callbacks.num_errors

    def get_module(self, module_id: str) -> Module:
        """Return the module that is being trained."""
        return self._learner.modules[module_id]
