"""The whole state of an algorithm, and setting it once all of it was checked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.core.metrics.logger import check_metrics_state
from corral.core.plain import check_parts, check_plain
from corral.core.seeding import check_global_rngs, check_rng, get_global_rngs, get_rng, set_global_rngs, set_rng
from corral.core.tree import copy_nested
from corral.errors import CheckpointError
from corral.exploration.base import restore_exploration
from corral.exploration.state import check_exploration_state

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

    A part that cannot be had is `None` or missing, and `lost` has its name: it costs that part, and not the checkpoint.
    """
    lost: list[str] = []
    part = partial(_collect, lost)
    algorithm.weights.take_changed()
    runners = algorithm.env_runner_group.get_state()
    optional = {
        "evaluation": part("evaluation", algorithm.evaluator.get_state),
        "data": None if algorithm.recorded is None else part("data", algorithm.recorded.get_state),
        "transforms": part("transforms", lambda: copy_nested(algorithm.modules.get_transform_states())) or None,
    }
    attributes = {
        name: part(f"attributes/{name}", partial(_plain_attribute, algorithm, name)) for name in algorithm.STATE
    }
    state = {
        **{name: found for name, found in optional.items() if found is not None},
        "attributes": {_saved_name(name): value for name, value in attributes.items()},
        "metrics": part("metrics", lambda: _get_metrics(algorithm)),
        "learners": algorithm.learner_group.get_state(),
        "exploration": part(
            "exploration",
            lambda: _joined(
                algorithm, {name: copy_nested(each.get_state()) for name, each in algorithm.explorations.items()}
            ),
        ),
        "runners": runners,
        "policy": part(
            "policy",
            lambda: _joined(algorithm, {name: each.policy.get_state() for name, each in algorithm.modules.items()}),
        ),
        "callbacks": algorithm._callbacks.get_state(),
        "rngs": get_global_rngs(),
    }
    return {**state, "lost": lost} if lost else state


def _collect(lost: list[str], name: str, get: Callable[[], Any]) -> Any:
    """Return a part of the state; if it cannot be had, warn and return `None`."""
    try:
        found = get()
        check_plain(found, name, CheckpointError)
    except Exception as error:
        lost.append(name)
        log.warning(
            "The checkpoint has no %s, so that a restored run begins without it: %s: %s",
            *(name, type(error).__name__, error),
            exc_info=True,
        )
        return None
    return found


def _get_metrics(algorithm: Algorithm) -> dict[str, Any]:
    # An iteration that an exception ended has not collected the metrics of steps that count.
    if algorithm.report.num_steps_trained:
        algorithm.report.log_steps_trained()
    algorithm.env_runner_group.collect_metrics(algorithm.metrics, algorithm.timers)
    return algorithm.metrics.get_state()


@contextmanager
def restoring(algorithm: Algorithm) -> Iterator[None]:
    """Stop an algorithm if the block raises an exception after it has changed something; such blocks can be nested.

    The block says that it changes something by another dict in `algorithm.report.restored`.

    Raises:
        CheckpointError: The block raised an exception.
    """
    before = algorithm.report.restored
    try:
        yield
    except BaseException as error:
        problem = "the state cannot be restored, and nothing was changed"
        if algorithm.report.restored is not before and algorithm._stage != "stopped":
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
    lost = set(state.get("lost", ()))
    if lost:
        log.warning("The checkpoint has no %s, because of an exception when it was saved.", ", ".join(sorted(lost)))
    if algorithm.recorded is not None and "data" not in lost:
        set_first = [*set_first, partial(algorithm.recorded.set_state, state.get("data", {}))]
    for set_part in set_first:
        set_part()
        algorithm.report.restored = dict(NOT_RESTORED)
    algorithm.report.restored = {**NOT_RESTORED, "training_iteration": state["attributes"]["training_iteration"]}
    if "metrics" not in lost:
        algorithm.metrics.set_state(state["metrics"])  # first: what logs there adds what its own state holds
        algorithm.report.num_steps_trained = 0
    algorithm.report.restored |= _name_envs(algorithm.env_runner_group.set_state(state["runners"]))
    algorithm.report.may_be_early = True  # there may be more runners than in the state
    algorithm.evaluator.set_state(state.get("evaluation"))
    algorithm._callbacks.set_state(state["callbacks"])
    algorithm.learner_group.set_state(state["learners"])
    if "transforms" not in lost:
        algorithm.modules.set_transform_states(copy_nested(state.get("transforms", {})))
    for name, value in _saved_attributes(algorithm, state):
        _set_attribute(algorithm, name, value)
    for exploration, saved in _with_saved(algorithm.explorations, algorithm, state, "exploration"):
        restore_exploration(exploration, copy_nested(saved))
    for record, saved in _with_saved(algorithm.modules, algorithm, state, "policy"):
        record.policy.set_state(saved)
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
    lost = set(state.get("lost", ()))
    algorithm.learner_group.check_state(state["learners"])
    if "transforms" not in lost:
        _check_transforms(algorithm, state.get("transforms", {}))
    for name, value in _saved_attributes(algorithm, state):
        _check_attribute(algorithm, name, value)
    if "metrics" not in lost:
        check_metrics_state(state["metrics"])
    for exploration, saved in _with_saved(algorithm.explorations, algorithm, state, "exploration"):
        check_exploration_state(exploration, saved)
    for record, saved in _with_saved(algorithm.modules, algorithm, state, "policy"):
        record.policy.check_state(saved)
    int(state["callbacks"]["num_errors"])
    check_global_rngs(state["rngs"])
    algorithm.env_runner_group.check_state(state["runners"])
    algorithm.evaluator.check_state(state.get("evaluation"))


def _check_transforms(algorithm: Algorithm, saved: Mapping[str, Any]) -> None:
    """Check the statistics of all modules that have transforms with statistics, here or in a state."""
    for module_id in dict.fromkeys((*algorithm.modules.get_transform_states(), *saved)):
        if module_id in algorithm.modules:  # else it was removed
            pipeline, state = algorithm.modules[module_id].policy.pipeline, saved.get(module_id, {})
            if pipeline is None:
                raise CheckpointError(
                    f"transforms: the state has statistics of {list(state)} for module {module_id!r}, which has no "
                    "transforms here: set the same transforms."
                )
            pipeline.check_state(state)


def _joined(algorithm: Algorithm, states: dict[str, Any]) -> Any:
    """Return states by module id as a state holds them: with a single agent, the state of the only module."""
    return states if algorithm.config.is_multi_agent else next(iter(states.values()))


def _with_saved(
    members: Mapping[str, Any], algorithm: Algorithm, state: Mapping[str, Any], part: str
) -> Iterator[tuple[Any, Any]]:
    """Yield each member by module id with its state, the inverse of `_joined`; none if the part was lost."""
    if part not in state.get("lost", ()):
        states = state[part]
        for module_id, member in members.items():
            yield member, states[module_id] if algorithm.config.is_multi_agent else states


def _saved_attributes(algorithm: Algorithm, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the attributes that were not lost."""
    for name in algorithm.STATE:
        if f"attributes/{name}" not in state.get("lost", ()):
            yield name, _saved_attribute(algorithm, name, state)


def _plain_attribute(algorithm: Algorithm, name: str) -> Any:
    value = attrgetter(name)(algorithm)
    return get_rng(value) if isinstance(value, np.random.Generator) else copy_nested(value)


def _saved_name(name: str) -> str:
    """Return the name in a state of an attribute of an algorithm, or of one of its parts, such as `report.latest`."""
    return name.rpartition(".")[2].lstrip("_")


def _saved_attribute(algorithm: Algorithm, name: str, state: Mapping[str, Any]) -> Any:
    """Return an attribute of a state; one number, from when there were no numbers by module, is the only module's."""
    saved = state["attributes"][_saved_name(name)]
    is_number = isinstance(saved, (int, float)) and isinstance(attrgetter(name)(algorithm), dict)
    return dict.fromkeys(algorithm.module_ids, saved) if is_number else saved


def _check_attribute(algorithm: Algorithm, name: str, value: Any) -> None:
    """Check that an attribute is of the kind that this algorithm has: a number, a dict, or the state of a generator."""
    here = attrgetter(name)(algorithm)
    if isinstance(here, np.random.Generator):
        check_rng(here, value)
    elif isinstance(here, (bool, int, float, dict)) and type(value) is not type(here):
        both = isinstance(value, (int, float)) and isinstance(here, float) and not isinstance(value, bool)
        if not both:
            raise CheckpointError(f"the attribute {name!r} is {value!r:.80}, and is {type(here).__name__} here.")


def _set_attribute(algorithm: Algorithm, name: str, value: Any) -> None:
    here = attrgetter(name)(algorithm)
    if isinstance(here, np.random.Generator):
        set_rng(here, value)
    else:
        owner, _, last = name.rpartition(".")
        setattr(attrgetter(owner)(algorithm) if owner else algorithm, last, copy_nested(value))
