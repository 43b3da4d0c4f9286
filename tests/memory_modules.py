"""Modules with memory whose states are known, for processes where pytest is not imported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from corral import Module


class CountsSteps(Module):
    """Its state is the number of steps in the episode so far, which is also the value of every observation."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.logits = nn.Parameter(torch.zeros(self.distribution.num_inputs))

    def initial_state(self) -> dict[str, Tensor]:
        return {"count": torch.zeros(1)}

    def policy(self, obs: Tensor, state: Any) -> Any:  # type: ignore[override]
        return self.logits.expand(len(obs), -1), {"count": state["count"] + 1}

    def value(self, obs: Tensor, state: Any) -> Tensor:  # type: ignore[override]
        return state["count"][:, 0] + 0 * self.logits.sum()  # type: ignore[no-any-return]


class Accumulates(Module):
    """A recurrent net by hand: tanh of linear functions of the observation and of the state, one step at a time."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        size = self.observation_space.shape[0]  # type: ignore[index]
        self.read, self.recall = nn.Linear(size, 8), nn.Linear(8, 8)
        self.head, self.value_head = nn.Linear(8, self.distribution.num_inputs), nn.Linear(8, 1)

    def initial_state(self) -> Tensor:
        return torch.full((8,), 0.5)

    def _next(self, obs: Tensor, state: Tensor) -> Tensor:
        return torch.tanh(self.read(0.1 * obs) + self.recall(state))

    def policy(self, obs: Tensor, state: Tensor) -> Any:  # type: ignore[override]
        state = self._next(obs, state)
        return self.head(state), state

    def value(self, obs: Tensor, state: Tensor) -> Tensor:  # type: ignore[override]
        return self.value_head(self._next(obs, state)).squeeze(-1)  # type: ignore[no-any-return]
