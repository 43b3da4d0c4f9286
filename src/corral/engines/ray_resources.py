"""What Ray has room for, in its cluster or in the placement group of a Tune trial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group

from corral.engines.base import Resources
from corral.errors import ConfigError

# Of the sums of what workers need, such as 0.1 ten times.
TOLERANCE = 1e-6

NOT_ASKED_FOR = ("memory", "object_store_memory")


def require(resources: Sequence[Resources]) -> None:
    """Refuse more than the cluster has, or the placement group that this process runs in.

    Raises:
        ConfigError: Says what was asked, and what there is.
    """
    asked = [_amounts(part) for part in resources]
    where, places = _places()
    total, there = sum(asked, Counter()), sum(places, Counter())
    if short := [name for name in total if total[name] > there[name] + TOLERANCE]:
        needs = f"The workers asked for ({len(asked)}) need {_listed(total, short)} in all"
        problem = f"{needs}, and {where} has {_listed(there, short)}."
    elif large := [part for part in asked if not any(_fits(part, place) for place in places)]:
        problem = f"A worker needs {_listed(large[0], large[0])}, and {where} has nowhere so much in one place."
    else:
        return
    raise ConfigError(
        f"{problem} Ask for fewer runners (num_env_runners) or learners, or for less for each, such as "
        "num_cpus_per_env_runner=0.5; or take engine_name='process', whose workers share the cores."
    )


def describe_available() -> str:
    """Say what Ray could still place, and what there is."""
    group = _placement_group()
    suffix = "" if group is None else f"_group_{group.id.hex()}"
    free, there = ray.available_resources(), ray.cluster_resources()
    names = [name.removesuffix(suffix) for name in there if name.endswith(suffix)]
    parts = [
        f"{free.get(name + suffix, 0.0):g} of {there[name + suffix]:g} {name}"
        for name in sorted(names)
        if name not in NOT_ASKED_FOR and ":" not in name and "_group_" not in name
    ]
    return f"Free in {_place_name(group)}: {', '.join(parts) or 'nothing'}."


def _amounts(resources: Resources) -> Counter[str]:
    """Return what a worker needs, by Ray's names, without zeros."""
    return +Counter({"CPU": resources.num_cpus, "GPU": resources.num_gpus, **resources.custom})


def _placement_group() -> Any:
    """Return the placement group that takes up the actors that this process starts, or `None`; a Tune trial has one."""
    if not ray.get_runtime_context().should_capture_child_tasks_in_placement_group:
        return None
    return get_current_placement_group()


def _place_name(group: Any) -> str:
    return "Ray's cluster" if group is None else "the placement group of this process (in Tune: of the trial)"


def _places() -> tuple[str, list[Counter[str]]]:
    """Return where actors run, and what each node or bundle of that has."""
    group = _placement_group()
    if group is None:
        return _place_name(None), [Counter(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    bundles: list[Counter[str]] = [*map(Counter, group.bundle_specs)]
    bundles[0].subtract(ray.get_runtime_context().get_assigned_resources())  # Tune puts a trial itself there
    return _place_name(group), bundles


def _fits(part: Counter[str], place: Counter[str]) -> bool:
    return all(place[name] + TOLERANCE >= amount for name, amount in part.items())


def _listed(amounts: Mapping[str, float], names: Iterable[str]) -> str:
    return " and ".join(f"{amounts[name]:g} {name}" for name in names)
