"""Exploration: how actions are chosen while sampling; see docs/exploration.md."""

from __future__ import annotations

from corral.exploration.base import Exploration, RowDistribution
from corral.exploration.build import BUILT_IN, check_exploration, exploration_class, make_exploration

__all__ = [
    "BUILT_IN",
    "Exploration",
    "RowDistribution",
    "check_exploration",
    "exploration_class",
    "make_exploration",
]
