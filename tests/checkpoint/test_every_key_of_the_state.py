"""Every key of the state matters: a resumed run that forgets one of them continues in another way.

Together with the tests that a run continues exactly, on the same runs, this finds each field that `get_state` or
`set_state` forgets: what makes a difference here is missed there.
"""

from __future__ import annotations

import ast
import logging
import re
import sys
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import corral
from at_least import all_of
from exact_runs import differences
from forgotten_keys import Study, as_saved, forget, install_clock, keys_of, observe
from rich_runs import FAST, RUNS

WITHOUT_EFFECT = {
    "logger/*/is_new": "each iteration marks all keys as old before it asks which ones are new",
    "logger/*/shape": "it is known again with the next value, and only refuses values of other shapes",
    "logger/*clear_on_reduce*/reducer/*": "the end of an iteration has cleared it",
    "logger/*/rate/*": "the end of an iteration has cleared it",
    "learners/by_learner/*/metrics*": "a learner in the process of the algorithm logs into the logger of the algorithm",
    "runner/numbers/_timestep": "each request of the algorithm says how many steps were sampled",
    "runner/numbers/_last_num_rows": "it only says for how many rows memory is taken",
    "runner/numbers/num_env_steps_lost": "test_counts_of_failures_continue",
    "*runners/num_failures": "test_counts_of_failures_continue",
    "*runners/num_env_steps": "test_counts_of_failures_continue",
    "runner/env/reset_seed": "there is none once the envs were reset; test_a_run_that_did_not_begin_continues",
    "runner/env/env_config": "test_changed_envs_and_their_tasks_continue",
    "runner/env/envs/*/kept/generators": "test_generators_of_envs_inside_an_env_are_kept",
    "runner/env/same_step": "a setting, by which envs of another mode are refused",
    "runner/env/seeds/*": "the seed of the config and the number of the runner, which are the same",
    "runner/id_prefix": "the seed of the config and the number of the runner, which are the same",
    "runner/episodes/lanes/*/open_steps/terminated": "a step that is open has not ended",
    "runner/episodes/lanes/*/open_steps/truncated": "a step that is open has not ended",
    "runner/episodes/lanes/*/open_steps/valid": "a step that is open does not count yet",
    "runner/episodes/lanes/*/begins": "test_an_episode_continues_exactly",
    "runner/episodes/lanes/*/early_rewards": "test_an_episode_continues_exactly",
    "exploration/waiting/*/[01]*": "random distillation looks at the next observations only, and curiosity at all",
    "runner/env/envs/*/start/task": "test_an_episode_is_played_again_with_the_arguments_of_its_reset",
    "runner/episodes/infos/*/task": "the infos of steps, t, are seen",
    "exploration/due": "the noise of weights is in the runners",
    "attributes/draw_rng": "in test_appo_and_impala_everywhere.py: one runner in this process fills no circular buffer",
    "exploration/stddev": "the noise of weights is in the runners",
    "runner/episodes/lanes/*/lengths": "the results have no lengths of agents",
    "runner/env/envs/*/seat_state/*": "test_who_has_ended_is_part_of_the_state",
    "*/rngs/*/bit_generator": "there is one kind",
    "*rngs/numpy/bit_generator": "there is one kind",
    "evaluation/rngs/numpy/has_gauss": "the same as of rngs, in rounds that draw an odd number",
    "*rngs/numpy/state/key": "it changes with every 624 numbers; where they begin is in it",
    "*rngs/python/0": "the version of the format",
    "callback/*/0": "the class of the callback, which is the same",
    "callback/*/1/*_before*": "they tell when a mean counts, in tests/curriculum/test_thresholds.py",
    "callback/*/1/tasks": "the tasks of the callback, by which other ones are refused",
    "runner/episodes/events/*/chunks/*/custom_data": "chunks share the notes of their episode",
    "runner/episodes/events/*/chunks/*/temporary_data": "chunks share the notes of their episode",
    "runner/episodes/events/*/episode/custom_data": "agents of an episode have no notes of their own",
    "runner/episodes/events/*/episode/temporary_data": "agents of an episode have no notes of their own",
    "runner/episodes/events/*/is_terminated": "an earlier chunk is not the end of its episode",
    "runner/episodes/events/*/is_truncated": "an earlier chunk is not the end of its episode",
    "runner/episodes/events/*/len_lookback": "the chunks of a runner have no steps before their own",
    "learners/optimizers/*/made_for": "the same optimizer and parameters, by which others are refused",
    "learners/optimizers/*/param_groups/*": "torch asks for them, and the settings are set again",
    "learners/optimizers/*/lr_scheduler/state/_get_lr_called_within_step": "torch changes it within a step only",
    "learners/optimizers/*/lr_scheduler/state/_is_initial": "torch changes it within a step only",
    "learners/optimizers/*/lr_scheduler/state/_last_lr": "torch gives it to those who ask the scheduler",
    "learners/optimizers/*/lr_scheduler/state/step_size": "a setting of the scheduler, which the config gives again",
    "learners/optimizers/*/lr_scheduler/state/gamma": "a setting of the scheduler, which the config gives again",
    "data/*/fingerprint": "test_other_data_is_said_when_a_run_continues",
    "replay_buffer*/version": "the format, by which other ones are refused",
    "replay_buffer*/layout/*": "the spaces of the env, by which others are refused",
    "replay_buffer*/type": "a setting, by which other buffers are refused",
    "replay_buffer*/capacity": "a setting, by which other buffers are refused",
    "replay_buffer*/num_runners": "a setting, by which other buffers are refused",
    "replay_buffer*/frame_stack": "a setting, by which other buffers are refused",
    "replay_buffer*/alpha": "a setting, by which other buffers are refused",
    "replay_buffer*/strategy": "a setting, by which other buffers are refused",
    "replay_buffer*/num_goals": "a setting, by which other buffers are refused",
    "replay_buffer*/epsilon": "a setting, by which other buffers are refused",
}
"""Keys that make no difference, or never change, with the reason or the test that has them instead."""

SEEN_IN = {
    "rngs/numpy/gauss": "ppo_that_samples_tasks",
    "runner/env/tasks": "ppo_that_samples_tasks",
    "runner/episodes/begins": "dqn_with_memory",
}
"""Runs in which a key makes a difference, where the first run in which it changes can do without it."""


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    install_clock(monkeypatch)
    caplog.set_level(logging.CRITICAL, "corral")  # the errors of callbacks and envs are wanted


@cache
def study(name: str) -> Study:
    return Study(RUNS[name])


def is_known(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in WITHOUT_EFFECT)


def own_keys(name: str) -> list[str]:
    """Keys that change in a run, and in none of the runs before it."""
    names = list(RUNS)
    before = {key for other in names[: names.index(name)] for key in study(other).keys}
    return [
        key
        for key in study(name).keys
        if (name == SEEN_IN[key] if key in SEEN_IN else key not in before) and not is_known(key)
    ]


def without_rates(found: list[str]) -> list[str]:
    """Differences without values per second, in which the time between two iterations counts."""
    return [place for place in found if not re.search("restored|throughput|rate_here|reducer/_(value|part)", place)]


# This is about the runs: that they would notice. That they continue exactly is tested below, with all of them.
@pytest.mark.slow_cases("ppo", "dqn", "bandit")
@pytest.mark.xdist_group("every_key")
@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in RUNS if name not in FAST)]
)
def test_each_key_makes_a_difference(name: str) -> None:
    assert study(name).makes_no_difference(own_keys(name)) == []


@pytest.mark.xdist_group("every_key")
def test_each_key_changes_in_a_run() -> None:
    changed = {key for name in RUNS for key in study(name).keys}
    for name in RUNS:
        empty = {key for key, paths in study(name).unmoved.items() if study(name).is_empty(paths)}
        still = {key for key in study(name).unmoved.keys() - changed - empty if not is_known(key)}
        assert sorted(still) == [], name


@pytest.mark.xdist_group("every_key")
@pytest.mark.parametrize("name", RUNS)
def test_a_rich_run_continues_exactly(name: str) -> None:
    with RUNS[name]().build() as algo:
        algo.set_state(study(name).state)
        first = list(observe(algo))
        assert without_rates(differences(study(name).expected, first)) == []
        algo.set_state(study(name).state)  # what an algorithm did before leaves nothing behind
        assert differences(first, list(observe(algo))) == []


# Envs that people make once cannot be reset to what they were before their first episode.
@pytest.mark.xdist_group("every_key")
@pytest.mark.parametrize("name", [name for name in FAST if name != "ppo"])
def test_a_run_that_did_not_begin_continues(name: str) -> None:
    state = study(name).fresh
    runners = state["runners"]["runners"]
    assert all_of((runner["env"]["reset_seed"] is not None for runner in runners), least=name != "marwil")  # from data
    with RUNS[name]().build() as algo:
        algo.set_state(state)
        first = list(observe(algo))[:3]
        algo.set_state(state)
        assert without_rates(differences(first, list(observe(algo))[:3])) == []
        if name == "noisy_dqn":  # each of its episodes has a seed of its own
            return
        if name == "cql_from_data_to_the_env":  # it learns from data alone at first
            return
        [paths] = [paths for key, paths in keys_of(state).items() if key == "runner/env/reset_seed"]
        algo.set_state(forget(state, {}, paths))
        assert differences(first, list(observe(algo))[:3])


# Classes whose states are in no state of an algorithm of these runs, with the tests that have them.
ELSEWHERE = {
    "EnvRunner": "what a replacement of a failed runner continues from: tests/runners/test_restarts.py",
    "IdentityEnv": "corral.testing: test_the_small_envs_continue",
    "JaxVectorEnv": "an env of an extra, JAX: tests/envs/test_jax_env.py",
    "ReachEnv": "corral.testing: test_the_small_envs_continue",
    "TMaze": "corral.testing: test_the_small_envs_continue",
    "DeviceActor": "a generator of a GPU: tests/runners/test_tensor_stepping.py continues runs of all classes below",
    "DeviceReplayBuffer": "on the device of an env of tensors: tests/replay/test_device_buffer.py",
    "TensorEnvAdapter": "around an env of tensors: tests/runners/test_tensor_stepping.py",
    "TorchEnv": "an env of tensors: tests/envs/test_torch_envs.py",
}


def classes_with_state() -> set[str]:
    """The classes of the library that define `get_state`."""
    source, found = Path(corral.__file__).parent, set()
    for path in source.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "compat" not in path.parts and "def get_state" in text:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    names = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                    found |= {node.name} if "get_state" in names else set()
    return found


@pytest.mark.xdist_group("every_key")
def test_each_class_with_a_state_is_in_a_run() -> None:
    asked: set[str] = set()

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_name == "get_state":
            asked.add(frame.f_code.co_qualname.split(".")[-2])

    for name in RUNS:
        with RUNS[name]().build() as algo:
            algo.set_state(study(name).state)
            sys.setprofile(note)
            try:
                algo.get_state()
            finally:
                sys.setprofile(None)
    assert sorted(classes_with_state() - asked - ELSEWHERE.keys()) == []
    assert not asked & ELSEWHERE.keys()


def test_counts_of_failures_continue() -> None:
    with FAST["ppo_that_samples_tasks"]().build() as algo:
        state = as_saved(algo.get_state())
        state["runners"] |= {"num_failures": 3}
        state["runners"]["runners"][0]["numbers"]["num_env_steps_lost"] = 5
        algo.set_state(state)
        found: Any = algo.train()["fault_tolerance"]
    assert (found["num_env_runner_failures"], found["num_env_steps_lost"]) == (3, 5)
