"""The description of a module: made once, in the driver, and sent to every process that builds a copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gymnasium import spaces

from corral.modules.module import Module


@dataclass(frozen=True)
class ModuleSpec:
    """Everything that a module is built from; two builds of one spec give equal weights.

    Attributes:
        module_class: Subclass of `Module`.
        observation_space: Space of one observation.
        action_space: Space of one action of the env.
        model_config: The settings of the class.
        seed: Seed of the initial weights.
    """

    module_class: type[Module]
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    model_config: Mapping[str, Any]
    seed: int = 0

    def build(self) -> Module:
        """Return a new module; no global random state is changed."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            return self.module_class(self.observation_space, self.action_space, dict(self.model_config))
