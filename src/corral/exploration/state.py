"""Checks of the state of an exploration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from corral.core.tree import copy_nested
from corral.errors import CheckpointError
from corral.exploration.base import Exploration
from corral.exploration.build import make_exploration


def check_exploration_state(exploration: Exploration, state: Mapping[str, Any]) -> None:
    """Check that an exploration can take a state, by giving it to another one that is made alike.

    Raises:
        Exception: What `set_state` raised.
    """
    if not isinstance(state, dict):
        raise CheckpointError(f"the state of the exploration is {type(state).__name__}, and not a dict.")
    if not state:
        return
    other = make_exploration(
        exploration.config,
        exploration.action_space,
        model=exploration.model,
        num_workers=exploration.num_workers,
        worker_index=exploration.worker_index,
        num_envs=exploration.num_envs,
        rng=np.random.default_rng(0),
    )
    other.set_state(copy_nested(state))
