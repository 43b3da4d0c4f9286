"""Modules of SAC and TD3 whose critics give the distribution of the return over atoms (Bellemare et al. 2017).

The distribution is over fixed returns between `v_min` and `v_max`, as in C51 (arXiv:1707.06887).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from corral.core.tree import Tree
from corral.errors import ConfigError
from corral.modules.sac_module import SACModule
from corral.modules.td3_module import TD3Module


class CategoricalSACModule(SACModule):
    """SAC's module for Box actions whose critics give logits of atoms, `[B, K]`.

    Attributes:
        atoms: Returns that the atoms represent, float32 `[K]`.
    """

    atoms: Tensor

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        """Build the networks.

        Args:
            observation_space: Space of one observation.
            action_space: Space of one action.
            model_config: The algorithm's settings `num_atoms`, `v_min` and `v_max`, and what `SACModule` takes.

        Raises:
            ConfigError: The actions are no floats with finite bounds.
        """
        if isinstance(action_space, spaces.Discrete):
            raise ConfigError(
                f"SAC: critics over atoms take a Box of floats, and the env's actions are {action_space}: set "
                "num_atoms=1."
            )
        settings, atoms = without_atoms(model_config)
        self._num_atoms = len(atoms)
        super().__init__(observation_space, action_space, settings)
        self.register_buffer("atoms", atoms, persistent=False)

    @property
    def critic_shape(self) -> tuple[int, ...]:
        """Shape of what a critic gives for one observation."""
        return (self._num_atoms,)

    def logits(self, obs: Tree, actions: Tensor, *, target: bool = False) -> Tensor:
        """Return the logits of all critics for Box actions in [-1, 1], `[C, B, K]`."""
        return super().q_values(obs, actions, target=target)

    def q_values(self, obs: Tree, actions: Tensor | None = None, *, target: bool = False) -> Tensor:
        """Return the mean of the distribution of each critic, `[C, B]`."""
        assert actions is not None
        return self.logits(obs, actions, target=target).softmax(-1) @ self.atoms


class CategoricalTD3Module(TD3Module):
    """TD3's module whose critics give logits of atoms, `[B, K]`.

    Attributes:
        atoms: Returns that the atoms represent, float32 `[K]`.
    """

    atoms: Tensor

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        """Build the networks; see `CategoricalSACModule`."""
        settings, atoms = without_atoms(model_config)
        self._num_atoms = len(atoms)
        super().__init__(observation_space, action_space, settings)
        self.register_buffer("atoms", atoms, persistent=False)

    @property
    def critic_shape(self) -> tuple[int, ...]:
        """Shape of what a critic gives for one observation."""
        return (self._num_atoms,)

    def logits(self, obs: Tree, actions: Tensor, *, target: bool = False) -> Tensor:
        """Return the logits of all critics for actions in [-1, 1], `[C, B, K]`."""
        return super().q_values(obs, actions, target=target)

    def q_values(self, obs: Tree, actions: Tensor, *, target: bool = False) -> Tensor:
        """Return the mean of the distribution of each critic, `[C, B]`."""
        return self.logits(obs, actions, target=target).softmax(-1) @ self.atoms


def without_atoms(model_config: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """Return settings of a module without `num_atoms`, `v_min` and `v_max`, and the atoms, float32 `[K]`."""
    settings = dict(model_config)
    num_atoms, v_min, v_max = (settings.pop(name) for name in ("num_atoms", "v_min", "v_max"))
    return settings, torch.linspace(v_min, v_max, num_atoms)
