"""The module of conservative Q-learning: SAC's, and the weight of the conservative loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from corral.modules.sac_module import SACModule


class CQLModule(SACModule):
    """SAC's module with a weight of the conservative loss that can be adapted.

    Attributes:
        log_cql_weight: Logarithm of the weight, float32 `[]`; `None` without the setting `lagrangian`.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        """Build the networks; see `SACModule`."""
        given = dict(model_config)
        is_adapted = given.pop("lagrangian", False)
        super().__init__(observation_space, action_space, given)
        self.log_cql_weight = nn.Parameter(torch.zeros(())) if is_adapted else None

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters of `actor`, `critic` and `alpha`; the weight belongs to `alpha`."""
        groups = super().parameter_groups()
        if self.log_cql_weight is not None:
            groups["alpha"].append(self.log_cql_weight)
        return groups
