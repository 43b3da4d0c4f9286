"""Modules that share parameters: which they are, and whose turn it is to take a gradient step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from corral.learners.update import ModuleUpdate

Shared = Mapping[str, set[nn.Parameter]]
"""Parameters that a module has in common with any other module, by module id."""


def shared_parameters(modules: Mapping[str, nn.Module]) -> dict[str, set[nn.Parameter]]:
    """Return the parameters that several modules have, by module id; modules that share none are left out."""
    holders: dict[nn.Parameter, list[str]] = {}
    for module_id, module in modules.items():
        for parameter in module.parameters():
            holders.setdefault(parameter, []).append(module_id)
    shared: dict[str, set[nn.Parameter]] = {}
    for parameter, module_ids in holders.items():
        for module_id in module_ids if len(module_ids) > 1 else ():
            shared.setdefault(module_id, set()).add(parameter)
    return shared


def parameters_of_several(groups: Iterable[Mapping[str, Iterable[nn.Parameter]]]) -> set[nn.Parameter]:
    """Return the parameters that are in the groups of more than one optimizer of a module."""
    seen: set[nn.Parameter] = set()
    several: set[nn.Parameter] = set()
    for own in groups:
        parameters = set(itertools.chain.from_iterable(own.values()))
        several |= seen & parameters
        seen |= parameters
    return several


def group_sharing(module_ids: Iterable[str], shared: Shared) -> list[list[str]]:
    """Return module ids in groups: modules that share parameters, directly or through others, are in one group.

    Args:
        module_ids: Ids of the modules that learn.
        shared: What `shared_parameters` returned.

    Returns:
        The groups in the order of their first ids, each in the order of `module_ids`.
    """
    groups: list[list[str]] = []
    for module_id in module_ids:
        near = [group for group in groups if any(_share(module_id, other, shared) for other in group)]
        if not near:
            groups.append([module_id])
            continue
        first, *others = near
        first += [other for group in others for other in group] + [module_id]
        groups = [group for group in groups if not any(group is other for other in others)]
    return groups


def _share(one: str, other: str, shared: Shared) -> bool:
    return one in shared and other in shared and not shared[one].isdisjoint(shared[other])


def take_turns(updates: Iterable[ModuleUpdate]) -> None:
    """Take the gradient steps of updates in turn, one minibatch of each, until all have ended."""
    left = {update: update.minibatches() for update in updates}
    while left:
        for update in list(left):
            if (minibatch := next(left[update], None)) is None:
                del left[update]
                continue
            update.optimizer.sync()  # callbacks of another module's step may have changed parameters that they share
            update.step(minibatch)
