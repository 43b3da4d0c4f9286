"""The whole state of an algorithm, and setting it once all of it was checked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.core.plain import check_parts
from corral.core.seeding import check_global_rngs, check_rng, get_global_rngs, get_rng, set_global_rngs, set_rng
from corral.core.tree import copy_nested
from corral.errors import CheckpointError
from corral.exploration.base import restore_exploration
from corral.exploration.state import check_exploration_state
from corral.metrics.logger import check_metrics_state

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm

log = logging.getLogger("corral")

NOT_RESTORED = {
    **{"training_iteration": float("nan"), "num_envs_continued": 0, "num_envs_restarted": 0},
    **{"continued": "", "restarted": ""},
}
"""`result["restored"]` of a run that was not restored."""

PARTS = ("attributes", "metrics", "learners", "exploration", "runners", "policy", "callbacks", "rngs")
"""Parts of the state of every algorithm. There are also `evaluation`, if it has evaluated, and `transforms`."""


def get_algorithm_state(algorithm: Algorithm) -> dict[str, Any]:
    """Return a copy of the state of an algorithm by part: plain data and arrays.

    Raises:
        CheckpointError: An env or a callback returned a state that is not plain data.
    """
    algorithm.take_changed_weights()
    group, evaluation = algorithm.env_runner_group.get_state(), algorithm._evaluator.get_state()
    # An iteration that an exception ended has not collected the metrics of steps that count.
    algorithm.env_runner_group.collect_metrics(algorithm.metrics, algorithm.timers)
    return {
        **({} if evaluation is None else {"evaluation": evaluation}),
        **({} if algorithm.recorded is None else {"data": algorithm.recorded.get_state()}),
        **({"transforms": copy_nested(transforms)} if (transforms := algorithm.get_transform_states()) else {}),
        "attributes": {name.lstrip("_"): _plain_attribute(getattr(algorithm, name)) for name in algorithm.STATE},
        "metrics": algorithm.metrics.get_state(),
        "learners": algorithm.learner_group.get_state(),
        "exploration": _joined(
            algorithm, {name: copy_nested(part.get_state()) for name, part in algorithm.explorations.items()}
        ),
        "runners": group,
        "policy": _joined(algorithm, {name: record.policy.get_state() for name, record in algorithm.records.items()}),
        "callbacks": algorithm._callbacks.get_state(),
        "rngs": get_global_rngs(),
    }


@contextmanager
def restoring(algorithm: Algorithm) -> Iterator[None]:
    """Stop an algorithm if the block raises an exception after it has changed something; such blocks can be nested.

    The block says that it changes something by another dict in `algorithm._restored`.

    Raises:
        CheckpointError: The block raised an exception.
    """
    before = algorithm._restored
    try:
        yield
    except BaseException as error:
        problem = "the state cannot be restored, and nothing was changed"
        if algorithm._restored is not before and not algorithm._stopped:
            algorithm.stop()
            problem = "only a part of the state was restored, so the algorithm was stopped and must be built again"
        elif isinstance(error, CheckpointError):
            raise
        if not isinstance(error, Exception):
            raise
        raise CheckpointError(f"{problem}: {type(error).__name__}: {error}") from error


def set_algorithm_state(
    algorithm: Algorithm, state: Mapping[str, Any], set_first: Sequence[Callable[[], None]] = ()
) -> None:
    """Check a state, then let an algorithm continue from it; call it within `restoring`.

    Args:
        algorithm: The algorithm.
        state: State of `get_algorithm_state`.
        set_first: Functions that set further parts after the checks. One that raises an exception changes nothing.
    """
    _check_state(algorithm, state)
    if algorithm.recorded is not None:
        set_first = [*set_first, partial(algorithm.recorded.set_state, state.get("data", {}))]
    for set_part in set_first:
        set_part()
        algorithm._restored = dict(NOT_RESTORED)
    algorithm._restored = {**NOT_RESTORED, "training_iteration": state["attributes"]["training_iteration"]}
    algorithm.metrics.set_state(state["metrics"])  # first: what logs there adds what its own state holds
    algorithm._restored |= _name_envs(algorithm.env_runner_group.set_state(state["runners"]))
    algorithm._may_be_early = True  # there may be more runners than in the state
    algorithm._evaluator.set_state(state.get("evaluation"))
    algorithm._callbacks.set_state(state["callbacks"])
    algorithm.learner_group.set_state(state["learners"])
    algorithm.set_transform_states(copy_nested(state.get("transforms", {})))
    for name in algorithm.STATE:
        _set_attribute(algorithm, name, _saved_attribute(algorithm, name, state))
    for module_id, exploration in algorithm.explorations.items():
        restore_exploration(exploration, copy_nested(_of_module(algorithm, state["exploration"], module_id)))
    for module_id, record in algorithm.records.items():
        record.policy.set_state(_of_module(algorithm, state["policy"], module_id))
    set_global_rngs(state["rngs"])
    algorithm.sync_weights()
    algorithm.env_runner_group.take_costs()
    algorithm.timers.take()


def _name_envs(restored: Mapping[str, Any]) -> dict[str, Any]:
    """Return what became of the envs for the result, and log it."""
    names = {name: "; ".join(restored[name]) for name in ("continued", "restarted")}
    if restored["restarted"]:
        log.warning("Some envs restart their episodes, so the run does not continue exactly: %(restarted)s.", names)
    if restored["continued"]:
        log.info("Envs that continue where they stood: %(continued)s.", names)
    return {**restored, **names}


def _check_state(algorithm: Algorithm, state: Mapping[str, Any]) -> None:
    """Check all parts that can be checked without changing anything, in all processes."""
    check_parts(state, PARTS, "an algorithm", CheckpointError)
    algorithm.learner_group.check_state(state["learners"])
    _check_transforms(algorithm, state.get("transforms", {}))
    for name in algorithm.STATE:
        _check_attribute(algorithm, name, _saved_attribute(algorithm, name, state))
    check_metrics_state(state["metrics"])
    for module_id, exploration in algorithm.explorations.items():
        check_exploration_state(exploration, _of_module(algorithm, state["exploration"], module_id))
    for module_id, record in algorithm.records.items():
        record.policy.check_state(_of_module(algorithm, state["policy"], module_id))
    int(state["callbacks"]["num_errors"])
    check_global_rngs(state["rngs"])
    algorithm.env_runner_group.check_state(state["runners"])
    algorithm._evaluator.check_state(state.get("evaluation"))


def _check_transforms(algorithm: Algorithm, saved: Mapping[str, Any]) -> None:
    """Check the statistics of all modules that have transforms with statistics, here or in a state."""
    for module_id in dict.fromkeys((*algorithm.get_transform_states(), *saved)):
        if module_id in algorithm.records:  # else it was removed
            pipeline, state = algorithm.records[module_id].policy.pipeline, saved.get(module_id, {})
            if pipeline is None:
                raise CheckpointError(
                    f"transforms: the state has statistics of {list(state)} for module {module_id!r}, which has no "
                    "transforms here: set the same transforms."
                )
            pipeline.check_state(state)


def _joined(algorithm: Algorithm, states: dict[str, Any]) -> Any:
    """Return states by module id as a state holds them: with a single agent, the state of the only module."""
    return states if algorithm.config.is_multi_agent else next(iter(states.values()))


def _of_module(algorithm: Algorithm, states: Any, module_id: str) -> Any:
    """Return the state of a module: the inverse of `_joined`."""
    return states[module_id] if algorithm.config.is_multi_agent else states


def _plain_attribute(value: Any) -> Any:
    return get_rng(value) if isinstance(value, np.random.Generator) else copy_nested(value)


def _saved_attribute(algorithm: Algorithm, name: str, state: Mapping[str, Any]) -> Any:
    """Return an attribute of a state; one number, from when there were no numbers by module, is the only module's."""
    attributes, key = state["attributes"], name.lstrip("_")
    saved = attributes.get(key, {}) if name == "_imitation_units" else attributes[key]  # which 0.1 did not have
    is_number = isinstance(saved, (int, float)) and isinstance(getattr(algorithm, name), dict)
    return dict.fromkeys(algorithm.module_ids, saved) if is_number else saved


def _check_attribute(algorithm: Algorithm, name: str, value: Any) -> None:
    """Check that an attribute is of the kind that this algorithm has: a number, a dict, or the state of a generator."""
    here = getattr(algorithm, name)
    if isinstance(here, np.random.Generator):
        check_rng(here, value)
    elif isinstance(here, (bool, int, float, dict)) and type(value) is not type(here):
        both = isinstance(value, (int, float)) and isinstance(here, float) and not isinstance(value, bool)
        if not both:
            raise CheckpointError(f"the attribute {name!r} is {value!r:.80}, and is {type(here).__name__} here.")


def _set_attribute(algorithm: Algorithm, name: str, value: Any) -> None:
    here = getattr(algorithm, name)
    if isinstance(here, np.random.Generator):
        set_rng(here, value)
    else:
        setattr(algorithm, name, copy_nested(value))
