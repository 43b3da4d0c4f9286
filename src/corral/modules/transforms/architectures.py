"""Transforms that belong to the architecture of a network; see `corral.modules.residual_blocks`."""

from __future__ import annotations

from collections.abc import Sequence

from gymnasium import Space, spaces

from corral.core.action_masks import MASK_KEY
from corral.core.spaces import space_tree
from corral.core.tree import named_leaves
from corral.modules.transforms.observations import NormalizeObservations
from corral.modules.transforms.rewards import NormalizeRewards
from corral.modules.transforms.transform import Transform

MAX_RETURN = 5.0
"""Largest absolute value of returns with `"simba_v2"` (Lee et al. 2025, arXiv:2502.15280)."""


def architecture_transforms(architecture: str, given: Sequence[Transform], space: Space) -> list[Transform]:  # type: ignore[type-arg]
    """Return the transforms that an architecture adds to those that a user gave.

    A user who normalises observations or rewards has the last word on how that is done.

    Args:
        architecture: `"simba"` or `"simba_v2"`.
        given: The transforms of the user.
        space: Space of the observations after these transforms.
    """
    added: list[Transform] = []
    if not any(isinstance(each, NormalizeObservations) for each in given) and any(
        isinstance(leaf, spaces.Box) and name != MASK_KEY and (leaf.dtype.kind == "f" or len(leaf.shape) <= 1)
        for name, leaf in named_leaves(space_tree(space))
    ):
        added.append(NormalizeObservations(clip=None, integers=True))
    if architecture == "simba_v2" and not any(isinstance(each, NormalizeRewards) for each in given):
        added.append(NormalizeRewards(clip=None, max_return=MAX_RETURN))
    return added
