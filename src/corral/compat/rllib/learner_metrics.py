"""What user code logs in a learner."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from corral.compat.rllib.metrics import MISSING, MetricsLogger


class LearnerMetrics(MetricsLogger):
    """A logger whose means by module are reported with the numbers of the update.

    `log_value((module_id, name), value)` reports the mean over the values and gradient steps of the update. Other keys
    and other reductions mean what they mean in any logger.

    Args:
        modules: Ids of the modules.
    """

    def __init__(self, modules: Container[str]) -> None:
        """Start without values."""
        super().__init__()
        self._modules = modules
        self._means: dict[str, dict[str, list[Tensor]]] = {}

    def log_value(self, key: Any, value: Any, **settings: Any) -> None:
        """Log one value, a number or a tensor."""
        path = (key,) if isinstance(key, str) else tuple(key)
        is_mean = settings.get("reduce") in (None, "mean") and not settings.get("clear_on_reduce")
        if len(path) == 2 and path[0] in self._modules and is_mean:
            mean = torch.as_tensor(value, dtype=torch.float32).detach().mean()
            self._means.setdefault(path[0], {}).setdefault(str(path[1]), []).append(mean)
            return
        settings.pop("with_throughput", None)
        super().log_value(key, value.detach().cpu().item() if isinstance(value, Tensor) else value, **settings)

    def peek(self, key: Any = None, default: Any = MISSING, **settings: Any) -> Any:
        """Return a value, reduced so far.

        Raises:
            KeyError: Nothing was logged under the key, and there is no default.
        """
        path = (key,) if isinstance(key, str) else tuple(key or ())
        if len(path) == 2 and (values := self._means.get(path[0], {}).get(path[1])):
            return torch.stack(values).mean().item()
        return super().peek(key, default, **settings)

    def take_means(self, module_id: str) -> dict[str, Tensor]:
        """Return the means of a module since the last call, by name."""
        found = self._means.pop(module_id, {})
        return {name: torch.stack(values).mean() for name, values in found.items()}
