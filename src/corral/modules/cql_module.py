"""The module of conservative Q-learning: SAC's, and the weight of the conservative loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from corral.modules.critic_heads import ScalarHead
from corral.modules.sac_module import SACModule


class CQLModule(SACModule):
    """SAC's module with a weight of the conservative loss that can be adapted.

    Attributes:
        log_cql_weight: Logarithm of the weight, float32 `[]`; `None` without the setting `lagrangian`.
    """

    def read_settings(self, settings: dict[str, Any]) -> ScalarHead:
        """Read `lagrangian`, make the weight and the temperature, and return the head of the critics."""
        head = super().read_settings(settings)
        self.log_cql_weight = nn.Parameter(torch.zeros(())) if settings.pop("lagrangian", False) else None
        return head

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters of `actor`, `critic` and `alpha`; the weight belongs to `alpha`."""
        groups = super().parameter_groups()
        if self.log_cql_weight is not None:
            groups["alpha"].append(self.log_cql_weight)
        return groups
