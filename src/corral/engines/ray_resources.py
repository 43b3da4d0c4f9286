"""The free and the total resources of Ray's cluster, or of the placement group of a Tune trial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group

from corral.engines.base import Resources
from corral.errors import ConfigError

# Rounding error of sums such as ten times 0.1 CPU.
TOLERANCE = 1e-6

NOT_ASKED_FOR = ("memory", "object_store_memory")


def require(resources: Sequence[Resources]) -> None:
    """Refuse more resources than the cluster has, or the placement group in which this process runs.

    Raises:
        ConfigError: The message says what was requested, and what there is.
    """
    asked = [_amounts(part) for part in resources]
    where, places = _places()
    total, there = sum(asked, Counter()), sum(places, Counter())
    if short := [name for name in total if total[name] > there[name] + TOLERANCE]:
        needs = f"The workers asked for ({len(asked)}) need {_listed(total, short)} in all"
        problem = f"{needs}, and {where} has {_listed(there, short)}."
    elif large := [part for part in asked if not any(_fits(part, place) for place in places)]:
        problem = f"A worker needs {_listed(large[0], large[0])}, and {where} does not have so much in one place."
    else:
        return
    raise ConfigError(
        f"{problem} Ask for fewer runners (num_env_runners) or learners, or for less per worker, such as "
        "num_cpus_per_env_runner=0.5; or set engine_name='process', whose workers share the CPUs."
    )


def describe_available() -> str:
    """Return a sentence about the free and the total resources of Ray."""
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
    """Return the amounts that a worker needs, by Ray's names of the resources, without zeros."""
    return +Counter({"CPU": resources.num_cpus, "GPU": resources.num_gpus, **resources.custom})


def _placement_group() -> Any:
    """Return the placement group in which Ray places the actors of this process, or `None`; a Tune trial has one."""
    if not ray.get_runtime_context().should_capture_child_tasks_in_placement_group:
        return None
    return get_current_placement_group()


def _place_name(group: Any) -> str:
    return "Ray's cluster" if group is None else "the placement group of this process (in Tune: of the trial)"


def _places() -> tuple[str, list[Counter[str]]]:
    """Return the name of the cluster or placement group, and the resources of each of its nodes or bundles."""
    group = _placement_group()
    if group is None:
        return _place_name(None), [Counter(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    bundles: list[Counter[str]] = [*map(Counter, group.bundle_specs)]
    bundles[0].subtract(ray.get_runtime_context().get_assigned_resources())  # the trial itself runs there
    return _place_name(group), bundles


def _fits(part: Counter[str], place: Counter[str]) -> bool:
    return all(place[name] + TOLERANCE >= amount for name, amount in part.items())


def _listed(amounts: Mapping[str, float], names: Iterable[str]) -> str:
    return " and ".join(f"{amounts[name]:g} {name}" for name in names)
