"""Means of the first episodes to end favour short ones: no decision is taken by them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from corral import Algorithm, MultiAgentEnv, PPOConfig
from corral.callbacks.curriculum import LearningProgressSampler
from corral.core.metrics.result import flat_result, without_early_means
from corral.runs.checkpoint import read_checkpoint
from corral.runs.checkpoint.finding import find_checkpoint
from corral.runs.loggers.run_summary import last_numbers
from corral.testing import CountingEnv
from corral.tools.report.runs import read_run
from faulty import TroubleEnv
from small import small

RETURN = "env_runners/episode_return_mean"
SHORT, LONG = 2, 60


class Race(CountingEnv):
    """Costs 1 per step. Sub-env 0 has episodes of 2 steps, and the others of 60 steps, or as `env_config` says."""

    def __init__(self, context: Any) -> None:
        lengths = context.get("lengths", [SHORT, LONG])
        super().__init__({"episode_length": lengths[context.vector_index]})
        self.task = 0

    def step(self, action: int) -> Any:
        obs, _, *rest = super().step(action)
        return obs, -1.0, *rest

    def get_task(self) -> Any:
        return self.task

    def set_task(self, task: Any) -> None:
        self.task = task


def config(env: Any = Race, **settings: Any) -> PPOConfig:
    """Return a config with iterations of 16 steps of each of two sub-envs: the long episode ends in the fourth."""
    return small(env, **{"disable_env_checking": True, "metrics_num_episodes_for_smoothing": 1000, **settings})


def early(algo: Algorithm, num_iterations: int) -> list[bool]:
    """Return whether the mean return is early in each of the next iterations."""
    return [RETURN in algo.train()["early_means"] for _ in range(num_iterations)]


def test_a_mean_is_early_until_every_sub_env_has_ended_the_episode_that_it_began_with() -> None:
    with config().build() as algo:
        first = algo.train()
        assert first["env_runners"]["episode_return_mean"] == -SHORT
        assert {RETURN, "env_runners/episode_len_max"} <= {*first["early_means"]}
        assert not {name for name in first["early_means"] if "num_" in name or name.startswith("learners")}
        assert early(algo, 4) == [True, True, False, False]


def test_a_mean_is_early_until_its_window_is_full() -> None:
    made = config(metrics_num_episodes_for_smoothing=10, env_config={"lengths": [SHORT, 100_000]})
    with made.build() as algo:
        assert early(algo, 3) == [True, False, False]  # 8 short episodes in each iteration, or less with resets


def test_stop_and_best_wait_for_a_mean_that_counts(tmp_path: Path) -> None:
    with config().build() as algo:
        result = algo.fit(
            stop={"episode_return_mean": -10, "last": lambda result: result["training_iteration"] == 6},
            run_dir=tmp_path / "run",
            progress=False,
        )
    assert result["training_iteration"] == 4  # as soon as the mean counts
    best = read_checkpoint(tmp_path / "run" / "checkpoints" / "best", with_state=False).metadata
    assert best["training_iteration"] == 4 and best["best"]["value"] == result["env_runners"]["episode_return_mean"]


def test_functions_that_stop_get_nan_for_early_means(tmp_path: Path) -> None:
    def is_good(result: dict[str, Any]) -> bool:
        return bool(result["env_runners"]["episode_return_mean"] > -10)

    with config().build() as algo:
        assert algo.fit(stop=is_good, run_dir=tmp_path / "run", progress=False)["training_iteration"] == 4


def test_until_then_the_latest_checkpoint_is_the_best(tmp_path: Path) -> None:
    made = config(checkpoint_every_iterations=1)
    with made.build() as algo:
        algo.fit(stop={"training_iteration": 3}, run_dir=tmp_path / "run", progress=False)
    best = read_checkpoint(tmp_path / "run" / "checkpoints" / "best", with_state=False).metadata
    assert best["training_iteration"] == 3 and best["best"]["value"] is None
    assert Path(find_checkpoint(tmp_path / "run", prefer="best")).name == "best"
    with made.build() as algo:  # the first value that counts replaces it, though it is no better than the early ones
        algo.fit(stop={"training_iteration": 6}, resume=tmp_path / "run", progress=False)
    best = read_checkpoint(tmp_path / "run" / "checkpoints" / "best", with_state=False).metadata
    assert -20 < best["best"]["value"] < -SHORT


def test_a_run_that_continues_is_not_ended_by_an_early_mean_before_its_first_iteration(tmp_path: Path) -> None:
    with config().build() as algo:
        algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path / "run", progress=False)
    with config().build() as algo:
        stop = {"episode_return_mean": -3, "training_iteration": 2}
        assert algo.fit(stop=stop, resume=tmp_path / "run", progress=False)["training_iteration"] == 2


# On a busy machine, a runner that was slow for a moment would get a smaller share.
RUNNERS = {"num_env_runners": 2, "engine_name": "local", "straggler_factor": None}


@pytest.mark.parametrize("settings", [{}, RUNNERS], ids=["embedded", "runners"])
def test_which_episodes_are_over_travels_in_checkpoints(settings: dict[str, Any], tmp_path: Path) -> None:
    made = config(**settings)
    with made.build() as algo:
        for _ in range(8):
            algo.train()
        assert not algo.train()["early_means"]
        algo.save(tmp_path / "saved")
        over = algo.env_runner_group.num_episodes_over
        assert all(0 not in counts for counts in over.values())
    with made.build() as algo:
        algo.restore_from_path(tmp_path / "saved")
        assert algo.env_runner_group.num_episodes_over == over
        assert early(algo, 1) == [False]


def test_a_checkpoint_between_them_keeps_the_mean_early(tmp_path: Path) -> None:
    with config().build() as algo:
        algo.train()
        algo.save(tmp_path / "saved")
    with config().build() as algo:
        algo.restore_from_path(tmp_path / "saved")
        assert early(algo, 2) == [True, True]


def test_all_runners_count_and_more_runners_after_a_checkpoint_are_new(tmp_path: Path) -> None:
    made = config(num_env_runners=1, engine_name="local")
    with made.build() as algo:
        assert early(algo, 4) == [True, True, True, False]
        algo.save(tmp_path / "saved")
    with made.copy(num_env_runners=2).build() as algo:
        algo.restore_from_path(tmp_path / "saved")
        assert early(algo, 1) == [True]


def test_whole_episodes_favour_no_short_ones() -> None:
    with config(batch_mode="complete_episodes").build() as algo:
        assert early(algo, 1) == [False]


def test_an_episode_that_broke_is_not_over() -> None:
    trouble = {"episode_length": 25, "step_faults": [10], "vector_index": 1, "counts": {}}
    made = config(env=TroubleEnv, env_config=trouble).fault_tolerance(restart_failed_sub_environments=True)
    with made.build() as algo:
        assert early(algo, 3) == [False, True, False]  # no episode has ended; one; both, the other one after 10 + 25
        assert algo.env_runner_group.counts.num_sub_env_restarts == 1


def test_own_metrics_are_early_as_well_with_and_without_a_window() -> None:
    def log(episode: Any, metrics_logger: Any) -> None:
        metrics_logger.log_value("windowed", episode.get_return(), window=30)
        metrics_logger.log_value("average", episode.get_return())
        metrics_logger.log_value("of_iteration", episode.get_return(), reduce="mean")
        metrics_logger.log_value("median", episode.get_return(), reduce="percentiles", percentiles=[50], window=1000)
        metrics_logger.log_value("wins", 1, reduce="sum")
        metrics_logger.log_value("latest", episode.get_return(), reduce="item")

    with config().callbacks(on_episode_end=log).build() as algo:
        names = [[name.partition("/")[2] for name in algo.train()["early_means"]] for _ in range(5)]
    own = [{"windowed", "average", "of_iteration", "median/p50", "wins", "latest"} & {*found} for found in names]
    assert own[0] == {"windowed", "average", "of_iteration", "median/p50"}
    assert own[-1] == set() and names[-1] == []


def test_an_own_metric_of_iterations_counts_in_a_run_with_one_very_long_episode(tmp_path: Path) -> None:
    def log(samples: Any, metrics_logger: Any) -> None:
        metrics_logger.log_value("reward_mean", float(np.mean(samples.rewards)), reduce="mean")

    made = config(env_config={"lengths": [100_000, 100_000]}).callbacks(on_sample_end=log)
    with made.build() as algo:
        result = algo.fit(stop={"reward_mean": -1.0}, run_dir=tmp_path / "run", progress=False)
    assert result["training_iteration"] == 1


class TwoOfThem(MultiAgentEnv):
    """Agents a and b; the length of an episode depends on the sub-env, as in `Race`."""

    possible_agents = agents = ("a", "b")  # type: ignore[assignment]
    observation_spaces = dict.fromkeys("ab", spaces.Box(-1, 1, (1,), np.float32))  # type: ignore[assignment]
    action_spaces = dict.fromkeys("ab", spaces.Discrete(2))  # type: ignore[assignment]

    def __init__(self, context: Any) -> None:
        super().__init__()
        self._length = [SHORT, LONG][context.vector_index]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._t = 0
        return self._obs(), {}

    def _obs(self) -> Any:
        return {agent: np.zeros(1, np.float32) for agent in "ab"}

    def step(self, actions: Any) -> Any:
        self._t += 1
        over = self._t >= self._length
        return self._obs(), dict.fromkeys("ab", -1.0), {"__all__": over}, {"__all__": False}, {}


def test_returns_of_agents_and_modules_are_early_as_well() -> None:
    made = config(env=TwoOfThem).multi_agent(policies={"main"})
    with made.build() as algo:
        first = algo.train()
        names = {"env_runners/agent_episode_return_mean/a", "env_runners/module_episode_return_mean/main", RETURN}
        assert names <= {*first["early_means"]}
        assert early(algo, 3) == [True, True, False]


def test_seeds_and_reports_leave_early_means_out(tmp_path: Path) -> None:
    with config().build() as algo:
        algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path / "run", progress=False)
    numbers = last_numbers(tmp_path / "run")
    assert numbers.training_iteration == 1 and math.isnan(numbers.trained_return)
    assert math.isnan(read_run(tmp_path / "run").last(RETURN))
    with config().build() as algo:
        result = algo.fit(stop={"training_iteration": 4}, resume=tmp_path / "run", progress=False)
    mean = result["env_runners"]["episode_return_mean"]
    assert last_numbers(tmp_path / "run").trained_return == mean == read_run(tmp_path / "run").last(RETURN)


def test_learning_progress_begins_with_means_that_count() -> None:
    sampler = LearningProgressSampler(["only"], seed=0)
    with config().callbacks([sampler]).build() as algo:
        algo.train()
        assert np.isnan(sampler.averages).all()
        for _ in range(3):
            algo.train()
        assert not np.isnan(sampler.averages).any()


def test_hiding_early_means_changes_nothing_else() -> None:
    result = {"a": {"b": 1.0, "c/d": {"p50": 2.0}, "e": "text"}, "f": 3, "early_means": ["a/b", "a/c/d/p50"]}
    hidden = flat_result(without_early_means(result))
    assert math.isnan(hidden.pop("a/b")) and math.isnan(hidden.pop("a/c/d/p50"))
    assert hidden == {"a/e": "text", "f": 3}
    assert result["a"]["b"] == 1.0  # type: ignore[index]
    assert without_early_means(settled := {"a": 1.0, "early_means": []}) is settled
