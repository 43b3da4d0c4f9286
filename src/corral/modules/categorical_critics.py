"""Modules of SAC and TD3 whose critics give the distribution of the return over atoms (Bellemare et al. 2017).

The distribution is over fixed returns between `v_min` and `v_max`, as in C51 (arXiv:1707.06887).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from corral.core.tree import Tree
from corral.modules.critic_heads import AtomHead
from corral.modules.sac_module import ActorAndCritics, SACModule
from corral.modules.td3_module import TD3Module


class _OverAtoms(ActorAndCritics):
    """What both modules have in common; the algorithm's settings are `num_atoms`, `v_min` and `v_max`."""

    head: AtomHead

    def read_settings(self, settings: dict[str, Any]) -> AtomHead:
        """Read the settings of the atoms, and return the head of the critics."""
        super().read_settings(settings)
        return AtomHead(*(settings.pop(name) for name in ("num_atoms", "v_min", "v_max")))

    @property
    def atoms(self) -> Tensor:
        """Returns that the atoms represent, float32 `[K]`."""
        return self.head.atoms

    def logits(self, obs: Tree, actions: Tensor, *, target: bool = False) -> Tensor:
        """Return the logits of all critics for Box actions in [-1, 1], `[C, B, K]`."""
        return super().q_values(obs, actions, target=target)

    def q_values(self, obs: Tree, actions: Tensor | None = None, *, target: bool = False) -> Tensor:
        """Return the mean of the distribution of each critic, `[C, B]`."""
        assert actions is not None
        return self.head.means(self.logits(obs, actions, target=target))


class CategoricalSACModule(_OverAtoms, SACModule):
    """SAC's module for Box actions whose critics give logits of atoms, `[B, K]`."""

    BOX_ONLY = ("SAC: critics over atoms take", "set num_atoms=1")


class CategoricalTD3Module(_OverAtoms, TD3Module):
    """TD3's module whose critics give logits of atoms, `[B, K]`."""
