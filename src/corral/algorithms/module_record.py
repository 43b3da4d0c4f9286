"""What an algorithm has for one module in its own process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from corral.algorithms.driver_policy import DriverPolicy
from corral.modules.heuristic import HeuristicModule
from corral.modules.module import Module


@dataclass
class ModuleRecord:
    """One module of an algorithm: its config, what acts with it here, and the module that learns.

    Attributes:
        module_id: Its id.
        config: Its frozen config; with several agents, with the module's own settings in it.
        policy: The policy of this process, with the exploration, and the pipeline of transforms.
        module: The module in the learner of this process.
        has_weights: Whether the module can learn: it is no heuristic.
        has_memory: Whether the module has memory.
    """

    module_id: str
    config: Any
    policy: DriverPolicy
    module: Module
    has_weights: bool = field(init=False)
    has_memory: bool = field(init=False)

    def __post_init__(self) -> None:
        """Resolve what does not change."""
        self.has_weights = not isinstance(self.module, HeuristicModule)
        self.has_memory = self.module.has_memory()
